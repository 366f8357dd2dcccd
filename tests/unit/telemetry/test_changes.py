"""The log says when the split changes, and why; and says nothing unless it is asked."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from recorded_runs import table

from hvd_hetero.planner import Planner
from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.telemetry.changes import ChangeLog, reason

LOGGER = "hvd_hetero.telemetry.changes"


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, {"samples_per_s": [100, 50]}, "the ranks expect 100 50 samples/s"),
        (None, {"samples_per_s": [100, np.nan]}, "the ranks were at work for 2 2 s"),
        (
            {"samples_per_s": [100, 100]},
            {"samples_per_s": [101, 40]},
            "rank 1 expects 40 samples/s, 0.40 times what it did at the last change",
        ),
        (
            {"compute_s": [1, 1], "samples_per_s": np.nan},
            {"compute_s": [1, 3], "samples_per_s": np.nan},
            "rank 1 was at work for 4 s, 2.00 times as long as at the last change",
        ),
        ({"samples_per_s": 1}, {"samples_per_s": [2, 1], "limit": [0, 57]}, "the memory of rank 1 holds 57 samples"),
        ({"limit": [0, 57]}, {"samples_per_s": [2, 1], "limit": [0, 57]}, "rank 0 expects 2 samples/s"),
        ({}, {}, "the ranks were at work for 2 2 s"),
    ],
)
def test_the_reason_is_the_figure_that_has_changed_most(before, now, told):
    assert told in reason(None if before is None else table(**before), table(**now))


def change(before, after, caplog, workers=2):
    caplog.set_level(logging.INFO, LOGGER)
    ChangeLog()(7, RoundPlan.of(before), RoundPlan.of(after), table(workers))
    return [record.getMessage() for record in caplog.records]


def test_a_change_names_the_round_and_both_splits(caplog):
    (said,) = change([10, 10], [14, 6], caplog)
    assert said.startswith("from round 7 on, batches 10 10 -> 14 6: ")


def test_the_same_split_is_no_change(caplog):
    assert change([10, 10], [10, 10], caplog) == []


def test_a_thousand_ranks_take_a_line_as_well(caplog):
    batches = np.full(1000, 10)
    moved = batches.copy()
    moved[:3] = [11, 17, 2]
    (said,) = change(batches, moved, caplog, 1000)
    assert "batches of 3 of 1000 ranks, as rank 2's: 10 -> 2" in said
    assert len(said) < 200


def drive(logs):
    """LB-BSP learns that the second of two ranks is half as fast."""
    planner = Planner(LBBSP("memoryless"), 2, 60, logs=logs)
    for number in range(3):
        x = np.array(planner.plan().samples)
        took_s = x / [100, 50]
        done = table(samples=x, samples_per_s=[100, 50], timed_samples=x, compute_s=took_s, input_s=0.0)
        planner.learn(FinishedRound(number, 0, planner.plan(), done, 1.0))
    return planner.plan().samples


def test_a_planner_that_logs_says_each_change_once_at_level_info(caplog):
    caplog.set_level(logging.INFO, LOGGER)
    assert drive(logs=True) == (40, 20)
    assert {(record.name, record.levelname) for record in caplog.records} == {(LOGGER, "INFO")}
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "from round 1 on, batches 30 30 -> 37 23: the ranks expect 100 50 samples/s"
    assert second.startswith("from round 2 on, batches 37 23 -> 40 20: ")


@pytest.mark.parametrize(("logs", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_by_default_and_on_other_ranks_nothing_is_said(caplog, logs, level):
    caplog.set_level(level, LOGGER)
    assert drive(logs) == (40, 20)
    assert not caplog.records
