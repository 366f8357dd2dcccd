"""Which files a report is made from, and what it says of them: names, and how much of them is looked at."""

import shutil

from recorded_runs import write

from hvd_hetero.tools.cli import main
from hvd_hetero.tools.report.made import make_reports


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


def test_one_file_named_twice_is_not_compared(tmp_path, capsys):
    run, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
    write(run, 12).close()
    link.symlink_to(run)
    for pair in ((run, run), (link, run)):
        assert main(["report", *map(str, pair), "--no-page", "--no-replay"]) == 2
        assert f"{pair[0]} and {pair[1]} must be of two runs" in capsys.readouterr().err
    shutil.copy(run, copied := tmp_path / "copied.jsonl")
    assert len(make_reports([run, copied], replayed=False)) == 2, "a copy is a file of its own"
