"""The source of Horovod: download, hash, patches."""

import os
import tarfile
from pathlib import Path

import pytest
from fake_builds import COMPILED, FAKE_FILES, PYTHON, make_sdist

from horovod_build import HorovodBuildError, patches, series, source
from horovod_build.cache import cache_root

GNU = patches.patch_command(os.environ["PATH"])
GIT = ("git", "apply", "-p1")


@pytest.fixture
def tree(tmp_path):
    """The small source, unpacked in a folder of its own."""
    for name, text in FAKE_FILES.items():
        file = tmp_path / "work" / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "work" / "tree"


@pytest.mark.parametrize("command", [GNU, GIT], ids=["patch", "git"])
def test_patches_change_what_they_name(tree, tmp_path, command):
    """Also below a repository, where git would by itself do nothing."""
    (tmp_path / ".git").mkdir()
    patches.apply(tree, (COMPILED, PYTHON), command, tmp_path / "log")
    assert (tree / "CMakeLists.txt").read_text() == "project(fake)\nset(CMAKE_CXX_STANDARD 17)\n"
    assert (tree / "horovod/runner/server.py").read_text() == "import queue\nSIZE = 4096\n"
    assert {path.name for path in tree.rglob("*") if path.is_file()} == {Path(name).name for name in FAKE_FILES}


@pytest.mark.parametrize("command", [GNU, GIT], ids=["patch", "git"])
@pytest.mark.parametrize("text", ["import queue\nSIZE = 6\n", "import other\nSIZE = 5\n", None])
def test_a_patch_that_does_not_fit_is_named(tree, tmp_path, command, text):
    """Where a line to change, or one beside it, or the file is another one, or there is none."""
    path = tree / "horovod/runner/server.py"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(HorovodBuildError, match=r"^python\.patch "):
        patches.apply(tree, (COMPILED, PYTHON), command, tmp_path / "log")


def test_a_patch_of_python_files_alone_compiles_nothing():
    """A patch that changes both counts by its other files; setup.py decides what the compiler does."""
    assert PYTHON.compiled == ""
    both = patches.Patch("both", "", COMPILED.text + PYTHON.text.partition("\n\n")[2])
    assert both.compiled == COMPILED.compiled != ""
    assert patches.Patch("setup", "", PYTHON.text.replace("horovod/runner/server.py", "setup.py")).compiled


def test_each_patch_has_a_purpose_and_a_header_and_is_in_the_series_once():
    """The header says what fails without it, why, and whether Horovod's tracker knows it."""
    names = [patch.name for patch in series()]
    assert sorted([*names, "series"]) == sorted(path.name for path in patches._FOLDER.iterdir())
    for patch in series():
        header = patch.text.partition("\n--- a/")[0]
        assert patch.purpose, patch.name
        assert all(f"\n{word}: " in header for word in ("Without it", "Why so", "Upstream")), patch.name


@pytest.mark.parametrize("command", [GNU, GIT], ids=["patch", "git"])
def test_all_patches_fit_the_source_that_is_pinned(tmp_path, command):
    """Each at the lines that it names, without a guess."""
    sdist = cache_root(os.environ) / source.SDIST_NAME
    if not sdist.exists():
        pytest.skip("Horovod's source is not in the cache, where building it leaves it")
    files = {name for patch in series() for name in patches._FILE.findall(patch.text)}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, [m for m in archive if m.name.partition("/")[2] in files], filter="data")
    tree, log = tmp_path / f"horovod-{source.HOROVOD_VERSION}", tmp_path / "log"
    patches.apply(tree, series(), command, log)
    assert not any(word in log.read_text() for word in ("offset", "fuzz"))
    assert {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()} == files


def test_download_with_another_hash_is_refused(tmp_path, monkeypatch):
    """A wrong file is an error with both hashes, and is not kept."""

    kept, work = tmp_path / "kept", tmp_path / "work"
    kept.mkdir()
    work.mkdir()
    monkeypatch.setattr(source, "run_logged", lambda argv, **_: (work / source.SDIST_NAME).write_text("something else"))
    with pytest.raises(HorovodBuildError, match=f"{source.SDIST_SHA256}.*[0-9a-f]{{64}}"):
        source.fetch(kept, work, tmp_path / "log")
    assert list(kept.iterdir()) == []


def test_source_is_downloaded_once_and_again_if_damaged(tmp_path, monkeypatch):
    """The kept copy is used while it is intact; a damaged one is replaced."""
    original = make_sdist(tmp_path / "original", FAKE_FILES, monkeypatch)
    kept, work, calls = tmp_path / "kept", tmp_path / "work", []
    kept.mkdir()
    work.mkdir()

    def download(argv, **_):
        calls.append(argv)
        (work / source.SDIST_NAME).write_bytes(original.read_bytes())

    monkeypatch.setattr(source, "run_logged", download)
    for damage, downloads in ((False, 1), (False, 1), (True, 2)):
        if damage:
            (kept / source.SDIST_NAME).write_bytes(original.read_bytes()[:100])
        found = source.fetch(kept, work, tmp_path / "log")
        assert found.read_bytes() == original.read_bytes()
        assert len(calls) == downloads
