"""Recoveries as the benchmarks of reliability count them: from the kill on, and lost rounds once."""

from __future__ import annotations

import pytest
from script_modules import load

from hvd_hetero.telemetry import TelemetryWriter

runs = load("recorded_runs", "tests/unit")
recoveries = load("_recoveries", "benchmarks")
throughput = load("reliability_throughput", "benchmarks")
NOTICED_AT = runs.recovery_of(2)["noticed_at"][0]


def membership(directory, number, workers, newcomers):
    writer = TelemetryWriter(directory / f"run.{number}.telemetry", policy="bsp", workers=workers, global_batch=8)
    if number:
        writer.recovery = runs.recovery_of(workers, newcomers)
    writer(runs.finished(number, workers))
    writer.close()


def mark(directory, number, kind, at):
    (directory / f"fault.{number}").write_text(f"{at} 77 {kind}\n")


def test_a_recovery_after_a_kill_begins_with_the_kill(tmp_path):
    for number, (workers, newcomers) in enumerate([(3, 0), (2, 0)]):
        membership(tmp_path, number, workers, newcomers)
    mark(tmp_path, 0, "freeze", NOTICED_AT - 0.1)
    mark(tmp_path, 1, "kill", NOTICED_AT - 0.25)
    mark(tmp_path, 2, "kill", NOTICED_AT + 5.0)
    (change,) = recoveries.changes(tmp_path, {0: 3, 1: 2})
    assert (change.kind, change.before, change.after) == ("kill", 3, 2)
    assert change.rows(newcomers=False) == [
        {
            "notice": 0.25, "leave": 0.5, "rendezvous": 8.0, "broadcast": 0.125, "set_up": 0.25, "first_round": 1.0,
            "in all": 10.125,
        }
    ] * 2  # fmt: skip
    header, _, row = recoveries.table([change]).splitlines()
    assert header.startswith("| ranks | who | times | notice | start | leave | rendezvous |")
    assert row.startswith("| killed, of 3 | survivors | 1 | 0.25, 0.25 | - | 0.50, 0.50 | 8.00, 8.00 |")


def test_a_kill_belongs_to_the_first_recovery_after_it(tmp_path):
    for number, (workers, newcomers) in enumerate([(2, 0), (3, 1), (3, 0)]):
        membership(tmp_path, number, workers, newcomers)
    mark(tmp_path, 0, "kill", NOTICED_AT - 0.25)
    found = recoveries.changes(tmp_path, {0: 2, 1: 3, 2: 3})
    assert [(change.membership, change.kind) for change in found] == [(1, "kill"), (2, "other")]
    assert [row.split("|")[1:4] for row in recoveries.table(found).splitlines()[2:]] == [
        [" killed, of 2 ", " survivors ", " 1 "],
        [" killed, of 2 ", " newcomers ", " 1 "],
        [" neither, now 3 ", " survivors ", " 1 "],
    ]


def test_what_was_done_again_counts_once_and_when_it_counted():
    events = [
        {"finished": number, "membership": member, "plan": [5, 5], "now_s": at}
        for number, member, at in ((0, 0, 1.0), (1, 0, 2.0), (2, 0, 3.0), (2, 1, 11.0), (3, 1, 12.0))
    ]
    assert throughput.rates(events, [0.0, 4.0, 14.0]) == pytest.approx([20 / 4, 20 / 10])
