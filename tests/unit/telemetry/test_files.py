"""Files that users name to be written: what is no file, or of something else, is left as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hvd_hetero.telemetry.files import check_output, write_whole


def check(path):
    check_output(path, "--page", "report", lambda begin: begin.startswith(b"ours"))


@pytest.mark.parametrize("kind", ["a device", "a pipe", "a folder"])
def test_what_is_no_regular_file_is_refused_and_neither_read_nor_replaced(tmp_path, kind):
    path = {"a device": Path("/dev/null"), "a pipe": tmp_path / "pipe", "a folder": tmp_path}[kind]
    if kind == "a pipe":
        os.mkfifo(path)  # to read it would be to wait for ever
    before = path.stat()
    with pytest.raises(ValueError, match=f"--page must name a file that can be written, and .* is {kind}; name a file"):
        check(path)
    assert stat.S_IFMT(path.stat().st_mode) == stat.S_IFMT(before.st_mode)
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize(("content", "fine"), [("", True), ("ours, of last week", True), ("a book", False)])
def test_only_a_file_of_the_kind_is_replaced(tmp_path, content, fine):
    path = tmp_path / "page.html"
    path.write_text(content)
    if fine:
        check(path)
        return
    with pytest.raises(ValueError, match=r"--page names .*page\.html, which exists and is no report; name another"):
        check(path)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"--page must name a file that can be written, got .*; name another"):
        check(tmp_path / "none" / "page.html")


def test_a_folder_that_takes_no_file_is_told_whoever_asks():
    """Root may write to any folder, by its permissions; the kernel's own take no file all the same."""
    with pytest.raises(
        ValueError, match=r"--page must name a file that can be written, got /proc/page\.html: .*; name an"
    ):
        check(Path("/proc/page.html"))


def test_looking_whether_a_file_can_be_written_leaves_nothing(tmp_path):
    check(tmp_path / "page.html")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "there" / "page.html")
    check(link)
    with write_whole(link) as file:
        file.write("ours")
    assert link.is_symlink()
    assert (tmp_path / "there" / "page.html").read_text() == "ours"
    check(link)
