"""Telemetry in parts: every k-th round, several files, and what is left of a run that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from recorded_runs import finished, write

from hvd_hetero.telemetry import Telemetry, read_run
from hvd_hetero.telemetry.reader import read_lines
from hvd_hetero.telemetry.rotation import RunFiles
from hvd_hetero.tools.report.plots import rounds_figure


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_files_of_one_run_are_read_as_one(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    assert len(names(tmp_path)) > 3
    assert all(file.stat().st_size < 900 + 400 for file in tmp_path.iterdir())
    run = read_run(path)
    assert run.round.tolist() == list(range(20))
    assert run.wait_s[:-1, 0].tolist() == list(range(19))
    assert run.left_out == ""
    assert read_run(tmp_path / "run.1.jsonl").round.tolist() == list(range(20)), "whichever file is named"


def test_files_of_other_runs_between_them_are_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 2).close()  # becomes run.1.jsonl
    write(Telemetry(path, rotate_bytes=900), 20).close()
    (tmp_path / "run.2.jsonl").rename(tmp_path / "run.99.jsonl")  # numbers say nothing of the order
    assert read_run(path).round.tolist() == list(range(20))
    assert read_run(tmp_path / "run.1.jsonl").round.tolist() == [0, 1]
    write(Telemetry(path, rotate_bytes=900), 3).close()
    assert read_run(path).round.tolist() == [0, 1, 2]


def test_a_name_that_ends_in_a_number_is_a_run_of_its_own(tmp_path):
    """As ``run.0.jsonl``, ``run.1.jsonl`` of each start of an elastic job, whose parts are ``run.0.1.jsonl`` and on."""
    for start, rounds in enumerate((20, 15)):
        write(Telemetry(tmp_path / f"run.{start}.jsonl", rotate_bytes=900), rounds).close()
    write(Telemetry(tmp_path / "run.jsonl", rotate_bytes=900), 12).close()
    for name, rounds in {"run.0": 20, "run.0.1": 20, "run.1": 15, "run.1.2": 15, "run": 12}.items():
        run = read_run(tmp_path / f"{name}.jsonl")
        assert (run.round.tolist(), run.left_out) == (list(range(rounds)), "")


def test_files_that_cannot_be_read_or_are_of_something_else_are_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    (tmp_path / "run.55.jsonl").symlink_to("/proc/self/mem")  # a regular file that even root cannot read from its start
    (tmp_path / "run.66.jsonl").write_bytes(b"\xff" * 50_000)
    (tmp_path / "run.77.jsonl").write_text('{"schema": "another"}\n')
    assert read_run(path).round.tolist() == list(range(20))


def test_a_part_that_begins_while_the_run_is_read_is_read_with_it(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    writer = write(Telemetry(path, rotate_bytes=900), 20)
    rest = iter(range(20, 40))

    def read_later(*arguments):
        for number in rest:  # once: the run goes on for twenty rounds
            writer(finished(number, wait_s=number - 1.0))
        return read_lines(*arguments)

    monkeypatch.setattr(run, "read_lines", read_later)
    assert read_run(path).round.tolist() == list(range(39)), "all but the last, which is held back"
    monkeypatch.setattr(RunFiles, "still", lambda found, headers: False)
    with pytest.raises(ValueError, match=r"run\.jsonl begins another file too often"):
        read_run(path)


@pytest.mark.parametrize("left", [None, "", '{"schema":"hvd-het'])
def test_a_run_that_was_killed_when_a_part_was_to_begin_is_read(tmp_path, left):
    path = tmp_path / "run.jsonl"
    for rounds in (4, 20):
        write(Telemetry(path, rotate_bytes=900), rounds).close()
        time.sleep(0.01)
    path.rename(tmp_path / "run.99.jsonl")
    if left is not None:
        path.write_text(left)
    assert read_run(path).round.tolist() == list(range(20))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_run(tmp_path / "walk.jsonl")


@pytest.mark.parametrize("rotate_bytes", [None, 900])
def test_a_training_that_loads_an_earlier_state_begins_another_file(tmp_path, rotate_bytes):
    """Rounds that were done twice are not one run, and no reader would know which to believe."""
    path = tmp_path / "run.jsonl"
    writer = write(Telemetry(path, rotate_bytes=rotate_bytes), 10)
    for number in range(4, 17):
        writer(finished(number))
    writer.close()
    assert read_run(path).round.tolist() == list(range(4, 17))
    assert read_run(tmp_path / "run.1.jsonl").round.tolist() == list(range(10))


def test_rounds_that_do_not_rise_are_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 6).close()
    head, *rounds = path.read_text().splitlines(keepends=True)
    for wrong, said in (
        (
            [*rounds, *rounds],
            "line 8: round must be larger than 5, that of the line before, got 0; where a training went back",
        ),
        ([*rounds[:3], *rounds[2:]], "line 5: round must be larger than 2, that of the line before, got 2"),
        (rounds[::-1], "line 3: round must be larger than 5, that of the line before, got 4"),
    ):
        path.write_text("".join([head, *wrong]))
        with pytest.raises(ValueError, match=said):
            read_run(path)
    path.write_text("".join([head, *rounds[::2]]))
    assert read_run(path).round.tolist() == [0, 2, 4], "a line that is lost is no error"


def test_parts_whose_rounds_do_not_rise_are_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    first, second = ((tmp_path / f"run.{part}.jsonl") for part in (1, 2))
    rounds = [file.read_text().splitlines(keepends=True)[1:] for file in (first, second)]
    head = second.read_text().splitlines(keepends=True)[0]
    second.write_text("".join([head, rounds[0][-1], *rounds[1]]))
    with pytest.raises(
        ValueError, match=r"run\.2\.jsonl, line 2: round must be larger than \d+, the last one of the part"
    ):
        read_run(path)


def test_parts_that_end_within_a_line_are_known(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    assert read_run(path).cut_short == ()
    middle = tmp_path / "run.2.jsonl"
    for file in (middle, path):
        file.write_text(file.read_text()[:-5])
    run = read_run(tmp_path / "run.1.jsonl")
    assert run.cut_short == (middle, path)
    assert (run.files[0].name, run.files[-1].name) == ("run.1.jsonl", "run.jsonl")
    assert len(run.round) == 18


def test_a_file_that_is_gone_is_told(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    (tmp_path / "run.1.jsonl").unlink()
    run = read_run(path)
    assert run.left_out == "1 of its files is missing"
    assert 0 < len(run.round) < 20
    assert "1 of its files is missing" in rounds_figure({"mine": run}).get_supxlabel()


def test_one_part_twice_is_an_error_that_names_both(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    (tmp_path / "run.77.jsonl").write_text(path.read_text())
    with pytest.raises(ValueError, match=r"run\.77\.jsonl and .*run\.jsonl are the same part|are the same part of one"):
        read_run(path)


def test_files_of_one_run_that_contradict_each_other_are_an_error(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, rotate_bytes=900), 20).close()
    first = tmp_path / "run.1.jsonl"
    first.write_text(first.read_text().replace('"global_batch":20', '"global_batch":21'))
    with pytest.raises(ValueError, match=r"run\.1\.jsonl, line 1: global_batch must be 20, as in the other files"):
        read_run(path)


def test_every_k_th_round_is_written_and_said(tmp_path):
    path = tmp_path / "run.jsonl"
    write(Telemetry(path, every=4), 18).close()
    run = read_run(path)
    assert run.round.tolist() == [0, 4, 8, 12, 16]
    assert run.wait_s[:, 0].tolist() == [0, 4, 8, 12, 16]
    assert (run.every, run.left_out) == (4, "1 round of 4 is recorded")
    assert "1 round of 4 is recorded" in rounds_figure({"mine": run}).get_supxlabel()
    assert run.throughput == pytest.approx(20 / 2.5), "as of all rounds, since these are like the others"
    assert run.after(5).round.tolist() == [8, 12, 16], "rounds are left out, not lines"
    assert run.after(5).every == 4


def test_a_header_without_a_sampling_rate_is_of_an_older_run(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 3).close()
    path.write_text(path.read_text().replace(',"every":1', ""))
    assert read_run(path).every == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": 3}, TypeError, r'telemetry must be a path, got 3; write telemetry="run\.jsonl"'),
        ({"path": os.PathLike}, TypeError, "telemetry must be a path, got <class"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0; with 1 every round"),
        ({"every": 1.5}, TypeError, "every must be an integer"),
        ({"rotate_bytes": 0}, ValueError, "rotate_bytes must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Telemetry(**{"path": "run.jsonl", **arguments})


def test_a_disk_that_is_full_when_another_file_begins_ends_the_telemetry_alone(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    writer = write(Telemetry(path, rotate_bytes=300), 1)
    writer.file._path = tmp_path / "file" / "run.jsonl"
    (tmp_path / "file").write_text("in the way")
    for number in range(1, 6):
        writer(finished(number))
    writer.close()
    (said,) = caplog.records
    assert "training goes on" in said.getMessage()


_TRAINING = """
import sys
sys.path[:0] = sys.argv[2:]
from recorded_runs import finished, write
writer = write(sys.argv[1], 0)
for number in range(100_000):
    writer(finished(number))
    print(number, flush=True)
"""


def test_a_killed_process_loses_one_line_at_most(tmp_path, request):
    path = tmp_path / "run.jsonl"
    folders = [str(request.config.rootpath), str(request.path.parent.parent)]
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINING, str(path), *folders], stdout=subprocess.PIPE, text=True
    ) as job:
        seen = [int(job.stdout.readline()) for _ in range(50)]
        time.sleep(0.02)
        os.kill(job.pid, signal.SIGKILL)
        seen += [int(line) for line in job.stdout if line.endswith("\n")]
    run = read_run(path)
    assert seen[-1] - run.round[-1] <= 1
    assert run.round.tolist() == list(range(len(run.round)))
    assert job.returncode == -signal.SIGKILL


def test_lines_are_json_also_where_a_figure_is_unknown(tmp_path):
    writer = write(tmp_path / "run.jsonl", 0)
    writer(finished(0, samples_per_s=[np.nan, 1e-7], compute_s=[1e12, 0.1]))
    writer.close()
    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])
    assert (line["samples_per_s"], line["compute_s"]) == ([None, 1e-7], [1e12, 0.1])
