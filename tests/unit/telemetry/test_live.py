"""The live view writes lines that others' output and progress bars leave whole."""

from __future__ import annotations

import io

import pytest
from recorded_runs import finished
from tqdm import tqdm

from hvd_hetero.telemetry import Recorder
from hvd_hetero.telemetry.live import LiveView


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def viewed(stream, workers=2):
    """A recorder with a live view, and a function that finishes a round."""
    clock, recorder = Clock(), Recorder()
    recorder.add(LiveView(stream, clock))
    rounds = iter(range(1000))

    def finish(seconds=10.0, **figures):
        clock.now_s += seconds
        recorder(finished(next(rounds), workers, seconds, **figures))

    return recorder, finish


def test_a_line_has_rounds_rate_waiting_and_batches():
    stream = io.StringIO()
    _, finish = viewed(stream)
    finish(seconds=100.0)  # the start, which counts no more once there is another round
    for _ in range(5):
        finish(seconds=20.0, samples=[300, 100], wait_s=[0.0, 10.0])
    assert stream.getvalue().splitlines()[-1] == (
        "hvd-hetero: round 4 of epoch 1 · 20 samples/s · waiting 25%, rank 1 most: 50% · batches 300 100"
    )


def test_a_line_has_the_bounds_and_peaks_of_memory():
    stream = io.StringIO()
    _, finish = viewed(stream)
    for _ in range(3):
        finish(samples=[40, 24], limit=[57, 24], memory_peak_mib=[20000.0, 11500.4])
    assert stream.getvalue().splitlines()[-1].endswith("batches 40 24 of at most 57 24, 20000 11500 MiB")


def test_a_thousand_ranks_are_told_in_short():
    stream = io.StringIO()
    _, finish = viewed(stream, 1000)
    for _ in range(3):
        finish(samples=[10] * 999 + [2], wait_s=0.0)
    assert stream.getvalue().splitlines()[-1].endswith("batches 2 to 10, median 10")


def test_a_line_comes_at_most_once_in_ten_seconds():
    stream = io.StringIO()
    _, finish = viewed(stream)
    for _ in range(41):
        finish(seconds=1.0)
    assert len(stream.getvalue().splitlines()) == 4


@pytest.mark.parametrize(("stream", "clears"), [(Terminal(), True), (io.StringIO(), False)])
def test_on_a_terminal_a_line_takes_the_place_of_a_bar_that_is_drawn_again_below(stream, clears):
    _, finish = viewed(stream)
    with tqdm(total=3, file=stream, ncols=60, mininterval=0, miniters=1, desc="mine") as bar:
        for _ in range(3):
            finish()
            bar.update()
    lines = stream.getvalue().split("\n")
    assert all(line.rpartition("\r")[2].startswith("\x1b[2Khvd-hetero: ") == clears for line in lines[:2])
    assert lines[-2].rpartition("\r")[2].startswith("mine: 100%")


def test_a_stream_that_fails_ends_the_view_alone(caplog):
    stream = io.StringIO()
    recorder, finish = viewed(stream)
    stream.close()
    finish()
    finish()
    assert "training goes on" in caplog.text
    recorder.close()
