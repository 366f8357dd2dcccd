"""Which files a report is made from, and what it says of them: parts, names, what is cut."""

import shutil

import pytest
from recorded_runs import write

from hvd_hetero.telemetry import Telemetry
from hvd_hetero.tools.cli import main
from hvd_hetero.tools.report import made
from hvd_hetero.tools.report.made import make_reports


@pytest.fixture
def parts(tmp_path):
    """A run of four files or more, and the name that the user gave."""
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=1500), 30).close()
    assert len(list(tmp_path.iterdir())) > 3
    return path


def reported(path, capsys):
    assert main(["report", str(path), "--no-page", "--no-replay"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("left", [None, "", '{"schema":"hvd-het'])
def test_a_run_that_was_killed_when_a_part_was_to_begin_is_reported(parts, left, capsys):
    parts.rename(parts.with_name("run.99.jsonl"))
    if left is not None:
        parts.write_text(left)
    assert "29 rounds in" in reported(parts, capsys)


def test_a_part_that_is_cut_is_told_whichever_is_named(parts, capsys):
    first, second = parts.with_name("run.1.jsonl"), parts.with_name("run.2.jsonl")
    assert "cut short" not in reported(parts, capsys)
    second.write_text(second.read_text()[:-9])
    for named in (parts, first, second):
        assert "The last line of run.2.jsonl is cut short, as a killed run leaves it" in reported(named, capsys)
    parts.write_text(parts.read_text()[:-9])
    told = reported(first, capsys)
    assert "The last lines of run.2.jsonl and run.jsonl are cut short" in told
    assert "27 rounds in" in told


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    paths = [tmp_path / job / "out" / "run.jsonl" for job in ("one", "other")]
    for path in paths:
        write(path, 12).close()
    assert [report.name for report in make_reports(paths, replayed=False)] == [
        "one/out/run.jsonl",
        "other/out/run.jsonl",
    ]
    assert make_reports([paths[0]], replayed=False)[0].name == "run.jsonl"
    assert main(["report", *map(str, paths), "--no-page", "--no-replay"]) == 0
    told = capsys.readouterr().out
    assert "one/out/run.jsonl" in told
    assert "other/out/run.jsonl" in told


def test_a_file_in_this_folder_is_told_from_one_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("run.jsonl", "sub/run.jsonl"):
        write(path, 12).close()
    paths = [tmp_path.__class__(name) for name in ("run.jsonl", "sub/run.jsonl")]
    assert [report.name for report in make_reports(paths, replayed=False)] == ["run.jsonl", "sub/run.jsonl"]


def test_two_files_of_one_run_are_not_compared(parts, capsys):
    link = parts.with_name("link.jsonl")
    single = parts.with_name("single.jsonl")
    write(single, 12).close()
    link.symlink_to(single)
    for pair in ((parts, parts.with_name("run.2.jsonl")), (single, single), (link, single)):
        assert main(["report", *map(str, pair), "--no-page", "--no-replay"]) == 2
        error = capsys.readouterr().err
        assert f"{pair[0]} and {pair[1]} must be of two runs, and are of one; name one of them alone" in error
    shutil.copy(single, copied := parts.with_name("copied.jsonl"))
    assert len(make_reports([single, copied], replayed=False)) == 2, "a copy is a file of its own"


def test_causes_looked_for_in_a_part_of_the_rounds_are_told_by_ordinals(tmp_path, monkeypatch):
    write(tmp_path / "run.jsonl", 60).close()
    for most, ordinal in ((60, "2nd"), (40, "3rd"), (10, "12th"), (6, "20th")):
        monkeypatch.setattr(made, "_MOST_FIGURES", most)
        note, *_ = make_reports([tmp_path / "run.jsonl"], replayed=False)[0].notes
        assert note == f"In a run as large as this, causes are looked for in every {ordinal} round."
    assert [made._nth(n).split()[1] for n in (11, 13, 21, 22, 23, 101, 111)] == [
        "11th", "13th", "21st", "22nd", "23rd", "101st", "111th",
    ]  # fmt: skip
