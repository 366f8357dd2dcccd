"""Telemetry in part: every k-th round, from an earlier round on, and what is left of a run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from recorded_runs import finished, write
from script_modules import load

from hvd_hetero.telemetry import Telemetry, read_run

rounds_figure = load("demo_picture", "examples").rounds_figure


def test_a_training_that_loads_an_earlier_state_begins_another_file(tmp_path):
    """Rounds that were done twice are not one run, and no reader would know which to believe."""
    path = tmp_path / "run.jsonl"
    writer = write(path, 10)
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
        ([*rounds, *rounds], r"line 8: round\b.* 5\b.* 0\b.*cut the file"),
        ([*rounds[:3], *rounds[2:]], r"line 5: round\b.* 2\b.* 2\b"),
        (rounds[::-1], r"line 3: round\b.* 5\b.* 4\b"),
    ):
        path.write_text("".join([head, *wrong]))
        with pytest.raises(ValueError, match=said):
            read_run(path)
    path.write_text("".join([head, *rounds[::2]]))
    assert read_run(path).round.tolist() == [0, 2, 4], "a line that is lost is no error"


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


def test_a_disk_that_is_full_when_another_file_begins_ends_the_telemetry_alone(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    writer = write(path, 3)
    writer.file._path = tmp_path / "file" / "run.jsonl"
    (tmp_path / "file").write_text("in the way")
    for number in range(2):
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
        os.kill(job.pid, signal.SIGKILL)
        seen += [int(line) for line in job.stdout if line.endswith("\n")]
    run = read_run(path)
    assert seen[-1] - run.round[-1] <= 1
    assert run.round.tolist() == list(range(len(run.round)))
    assert job.returncode == -signal.SIGKILL
