"""Recoveries as the benchmarks of reliability count them: from the kill on, and lost rounds once."""

from __future__ import annotations

import pytest
from script_modules import load

from hvd_hetero.telemetry import TelemetryWriter

runs = load("recorded_runs", "tests/unit")
recoveries = load("_recoveries", "benchmarks")
throughput = load("reliability_throughput", "benchmarks")
FIRST_ROUND_AT = 1764137000.25


def changes(directory, workers, marks):
    """The changes of memberships of so many ranks, whose first rounds end ten seconds apart."""
    for number, size in enumerate(workers):
        writer = TelemetryWriter(directory / f"run.{number}.telemetry", policy="bsp", workers=size, global_batch=8)
        writer.recovered_s = 1.5 if number else None
        writer(runs.finished(number, size))
        writer.close()
    for number, (kind, at) in enumerate(marks):
        (directory / f"fault.{number}").write_text(f"{FIRST_ROUND_AT + at} 77 {kind}\n")
    ends = ((number, second) for number in range(len(workers)) for second in (0.0, 0.5))
    events = [{"finished": 0, "membership": n, "now_s": FIRST_ROUND_AT + 10.0 * n + s} for n, s in ends]
    return recoveries.changes(directory, dict(enumerate(workers)), events)


def test_a_recovery_after_a_kill_is_counted_from_the_kill_on_too(tmp_path):
    (change,) = changes(tmp_path, [3, 2], [("freeze", 9.0), ("kill", 7.75), ("kill", 14.0)])
    assert (change.kind, change.before, change.after) == ("kill", 3, 2)
    assert (change.recovered_s, change.from_kill_s) == (1.5, 2.25)
    assert recoveries.table([change]).splitlines()[2] == "| killed, of 3 | 1 | 1.50, 1.50 | 2.25, 2.25 |"


def test_a_kill_belongs_to_the_first_recovery_after_it(tmp_path):
    found = changes(tmp_path, [2, 3, 3, 4], [("kill", 8.0)])
    assert [(change.membership, change.kind) for change in found] == [(1, "kill"), (2, "other"), (3, "join")]


def test_what_was_done_again_counts_once_and_when_it_counted():
    events = [
        {"finished": number, "membership": member, "plan": [5, 5], "now_s": at}
        for number, member, at in ((0, 0, 1.0), (1, 0, 2.0), (2, 0, 3.0), (2, 1, 11.0), (3, 1, 12.0))
    ]
    assert throughput.rates(events, [0.0, 4.0, 14.0]) == pytest.approx([20 / 4, 20 / 10])
