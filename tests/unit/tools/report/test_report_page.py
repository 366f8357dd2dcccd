"""The page and the summary: complete, safe whatever a file holds, and small at any size."""

import io
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import write
from report_runs import record, run_of
from rich.console import Console

from hvd_hetero.policies import BSP
from hvd_hetero.tools.cli import main
from hvd_hetero.tools.cli.terminal import write_summary
from hvd_hetero.tools.report.build import make_reports, report_of
from hvd_hetero.tools.report.causes import Cause
from hvd_hetero.tools.report.page import page
from hvd_hetero.tools.report.verdict import verdict
from hvd_hetero.tools.simulation import Cluster

HEADER = {"schema": "hvd-hetero/telemetry", "version": 1, "policy": "bsp", "workers": 2, "global_batch": 20}
LINE = {
    "round": 0, "epoch": 0, "elapsed_s": 2.0, "plan": [10, 10], "samples": [10, 10], "micro_batches": [1, 1],
    "compute_s": [1.0, 1.5], "input_s": [0.0, 0.0], "samples_per_s": [10.0, None], "cpu": [1.0, 1.0],
    "memory": [0.5, None], "wait_s": [1.0, 0.5],
}  # fmt: skip


def written(path, lines=20, header=(), **changed):
    rows = [HEADER | dict(header), *({**LINE, **changed, "round": number} for number in range(lines))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    record(path, Cluster.of_speeds([400, 200]), BSP(), 96, 60)
    return path


def test_the_command_writes_summary_and_page(run_file, capsys):
    assert main(["report", str(run_file)]) == 0
    out, err = capsys.readouterr()
    # 48 samples in 0.24 s; all 96 in 0.16 s at 400 + 200 samples per second; 0.08 s of 0.24 s are lost.
    assert "Verdict: Rank 1 held all others up for 33% of the time." in out
    assert err == f"page: {run_file.with_suffix('.html')}\n"
    text = run_file.with_suffix(".html").read_text()
    for heading in ("Where the time went", "Which ranks held others up", "How fast other splits would have been"):
        assert heading in text


def test_the_terminal_tells_the_causes_that_the_verdict_does_not():
    """Rank 1 costs the most and is the verdict's; rank 2, less than half as late, has a cause of its own."""
    run = run_of(
        [[20] * 3] * 60, [[1, 2, 1.3]] * 60, [2.1] * 60, wait_s=[[1.1, 0.1, 0.8]] * 60, memory=[[0.5] * 3] * 60
    )
    report = report_of(run, "run", replayed=False)
    one, other = Cause("garbage", "Python collected garbage.", "gc"), Cause("loop", "Its loop was long.", "Save less.")

    def told(causes):
        console = Console(file=io.StringIO(), width=120)
        write_summary(console, [replace(report, causes=causes, verdict=verdict(report.figures, causes))])
        return console.file.getvalue()

    both = told([None, one, other])
    assert both.count("Python collected garbage.") == 2, "in the verdict and in the table"
    assert re.search(r"2 +Its loop was long\. +Save less\.", both)
    assert told([None, one, None]).count("Python collected garbage.") == 1, "the verdict is enough"
    slower = Cause("slower", "It took longer.", "Give it less work.")
    assert re.search(r"0 +It took longer\. +Give it less work\.", told([slower, one, None])), "though it costs nothing"


def test_the_page_of_a_single_rank_speaks_of_no_other(tmp_path):
    path = tmp_path / "one.jsonl"
    record(path, Cluster.of_speeds([400]), BSP(), 96, 40)
    text = page(make_reports([path]))
    shown = text[: text.index("<footer>")]
    for words in (
        "held others up",
        "held all others up",
        "of the fastest",
        "late ranks",
        "between ranks",
        "times this run",
    ):
        assert words not in shown
    for words in ("How fast the rank was", "waiting for data", "a single rank gets all samples"):
        assert words in shown


def test_two_runs_stand_side_by_side_on_one_scale(run_file, capsys, tmp_path):
    other = tmp_path / "other.jsonl"
    record(other, Cluster.of_speeds([400, 400]), BSP(), 96, 60)
    assert main(["report", str(run_file), str(other), "--page", str(tmp_path / "two.html")]) == 0
    assert "other.jsonl did 2.00 times as many samples per second as run.jsonl." in capsys.readouterr().out
    text = (tmp_path / "two.html").read_text()
    labels = re.findall(r"<b>Speed<.*?</figure>", text, re.DOTALL)
    scales = [re.findall(r'class="y" style="bottom:([\d.]+)%">([^<]+)<', each) for each in labels]
    assert len(scales) == 2
    assert scales[0] == scales[1]


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(run_file):
    main(["report", str(run_file)])
    text = run_file.with_suffix(".html").read_text()
    assert not re.search(r"https?:|<script|@import|url\(|<link|<img", text)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert re.search("prefers-color-.*: dark", text)


def test_script_in_a_name_is_text(tmp_path, capsys):
    """The policy's name comes from the file, and the file's from anywhere."""
    evil = "<script>alert(1)</script>"
    path = written(tmp_path / "<img src=x onerror=alert(1)>.jsonl", header={"policy": evil})
    assert main(["report", str(path), "--page", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    capsys.readouterr()
    written(path, header={"policy": "[bold red]x[/nonsense]"})
    assert main(["report", str(path), "--no-page"]) == 0
    assert "[bold red]x[/nonsense]" in capsys.readouterr().out, "names are no markup in the terminal either"


def header_and(line=b"", **changed):
    """Return a file's header, and a line after it: as given, or a usual one with these figures."""
    line = json.dumps(LINE | changed).encode() if changed else line
    return json.dumps(HEADER).encode() + b"\n" + (line + b"\n" if line else b"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no telemetry: it has no complete line"),
        (b"\x00\xff\xfe" * 100 + b"\n", "is not telemetry of hvd-hetero"),
        (b"<html></html>\n", "is not telemetry of hvd-hetero"),
        (json.dumps(HEADER | {"workers": 0}).encode() + b"\n", "workers must hold a whole number"),
        (header_and(), "none of the 0 recorded rounds"),
        (header_and(b'{"round": 1'), "line 2 is no JSON"),
        (header_and(b"[" * 100_000), "line 2 is no JSON"),
        (header_and(samples=[1e300, 1]), "samples must hold whole numbers"),
        (header_and(plan=[None, 1]), "plan must hold whole numbers"),
        *((header_and(samples=[odd, 1]), "samples must hold whole numbers") for odd in (-5, 5.7, "900", True)),
        (header_and(elapsed_s=math.nan), "line 2 is no JSON"),
        (json.dumps(HEADER | {"policy": "\x1b[31mred"}).encode() + b"\n", "policy must hold the name of a policy"),
        (header_and(input_s=["one", 1]), "input_s must hold numbers"),
        (header_and(cpu=[1]), "cpu must hold a list of 2 numbers, one for each rank"),
        (header_and(wait_s=[10**400, 1]), "run.jsonl, line 2"),
    ],
)
def test_a_file_that_is_no_run_is_an_error_and_leaves_no_page(tmp_path, capsys, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("hvd-hetero: error: ")
    assert err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_run_cut_short_is_reported_and_says_so(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl")
    path.write_bytes(path.read_bytes()[:-30])
    assert main(["report", str(path)]) == 0
    assert "Note:    The last line of the file is incomplete" in capsys.readouterr().out
    assert "<b>Notes</b>" in path.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("compute_s", value) for value in (-(2.0**52), -1.0, 0.0, 1e-300, 1e-12, 1e9, 2.0**52, None)),
        *((key, value) for key in ("input_s", "wait_s", "fixed_samples") for value in (-1.0, 1e-300, 2.0**52)),
        *((key, value) for key in ("samples_per_s", "once_s", "slope_s", "intercept_s") for value in (-1.0, 2.0**52)),
    ],
)
def test_figures_that_cannot_be_true_of_one_rank_leave_a_report_of_the_rest(tmp_path, capsys, key, value):
    """One rank's figure is absurd in every round: a report with the true figures, and none that is no number."""
    path = written(tmp_path / "run.jsonl", **{key: [value, 1.5]})
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    text = path.with_suffix(".html").read_text().partition("</style>")[2]
    for shown in (out, text):
        assert "19 rounds in 38 s, without" in " ".join(shown.split())
        assert not re.search(r"\b(nan|inf)\b", shown)
    if key in ("compute_s", "input_s", "wait_s") and value is not None and (value < 0 or value >= 1e9):
        assert f"{key} is impossible in 20 of 20 rounds (rank 0), compared with the duration" in " ".join(out.split())
    else:
        assert "impossible" not in out
    without_speed = key == "compute_s" or (key == "fixed_samples" and value == 2.0**52)
    assert ("The speed of rank 0 is not known" in out) == without_speed


@pytest.mark.parametrize(("seconds", "code"), [(-1.0, 2), (0.0, 2), (1e-300, 2), (1e9, 0), (1.1e9, 2), (1e12, 2)])
def test_rounds_of_every_elapsed_time_make_a_report_or_are_refused(tmp_path, capsys, seconds, code):
    path = written(tmp_path / "run.jsonl", elapsed_s=seconds)
    assert main(["report", str(path), "--no-page"]) == code
    out, err = capsys.readouterr()
    assert ("Verdict:" in out) == (code == 0)
    assert ("plausible" in err) == (code == 2), "no round, or in rounds of no time no rank's computing"


def test_a_page_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.jsonl"), "--page", str(tmp_path / "no" / "page.html")]) == 2
    assert "--page must name a file that can be written" in capsys.readouterr().err


def test_the_page_of_1000_ranks_is_small_and_has_no_line_for_each():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(1, 2, (400, 1000))
    run = run_of(
        rng.integers(1, 99, (400, 1000)), seconds, seconds.max(axis=1),
        samples_per_s=rng.uniform(1, 99, (400, 1000)), wait_s=rng.random((400, 1000)),
    )  # fmt: skip
    text = page([report_of(run, "run", replayed=False)])
    assert len(text) < 1_000_000
    assert text.count('class="line') < 20
    assert "of 1,000 ranks" in text


def test_a_report_of_a_single_round_is_in_the_singular_and_its_curves_are_seen(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", 2)
    assert main(["report", str(path)]) == 0
    assert " 1 round in 2 s" in capsys.readouterr().out
    text = path.with_suffix(".html").read_text()
    assert " 1 round in 2 s" in text
    assert 'class="line dot' in text
    assert ".dot {" in text


def test_something_else_is_not_overwritten(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl")
    page_file = tmp_path / "run.html"
    page_file.write_text("my thesis")
    assert main(["report", str(path)]) == 2
    assert "is no report; name another file" in capsys.readouterr().err
    assert page_file.read_text() == "my thesis"
    page_file.unlink()
    assert [main(["report", str(path)]) for _ in range(2)] == [0, 0], "a report may be made again"


# Which files a report is made from.


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
        assert f"{pair[0]} and {pair[1]} are one file" in capsys.readouterr().err
    shutil.copy(run, copied := tmp_path / "copied.jsonl")
    assert len(make_reports([run, copied], replayed=False)) == 2, "a copy is a file of its own"
