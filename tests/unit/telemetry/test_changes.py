"""The log says when the split changes, and why; and says nothing unless it is asked."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from recorded_runs import table

from hvd_hetero.planner import Planner
from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.telemetry.changes import log_change

LOGGER = "hvd_hetero.telemetry.changes"


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"samples_per_s": [100, 50]}, "the ranks expect 100 50 samples/s"),
        ({"samples_per_s": [100, np.nan]}, "the ranks were at work for 2 2 s"),
        ({"samples_per_s": 1, "limit": [0, 57]}, "the ranks expect 1 1 samples/s; 0 57 samples fit in memory"),
    ],
)
def test_a_line_has_what_the_policy_went_by(now, told, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    log_change(7, RoundPlan.of([10, 10]), RoundPlan.of([14, 6]), table(**now))
    assert told in caplog.text


def change(before, after, caplog, workers=2):
    caplog.set_level(logging.INFO, LOGGER)
    log_change(7, RoundPlan.of(before), RoundPlan.of(after), table(workers))
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
        done = table(samples=x, work=x, samples_per_s=[100, 50], timed_samples=x, compute_s=took_s, input_s=0.0)
        planner.learn(FinishedRound(number, 0, planner.plan(), done, 1.0))
    return planner.plan().samples


def test_a_planner_that_logs_says_each_change_once_at_level_info(caplog):
    caplog.set_level(logging.INFO, LOGGER)
    assert drive(logs=True) == (40, 20)
    assert {(record.name, record.levelname) for record in caplog.records} == {(LOGGER, "INFO")}
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "from round 1 on, batches 30 30 -> 37 23: the ranks expect 100 50 samples/s"
    assert second.startswith("from round 2 on, batches 37 23 -> 40 20: ")


def test_a_rank_that_rests_is_warned_of_once_despite_its_trials(caplog):
    """A sample of rank 2 takes longer than 60 of the others: it rests, and is tried again. One line says so."""
    caplog.set_level(logging.WARNING, LOGGER)
    planner, speeds, trials = Planner(LBBSP("memoryless", may_rest=True), 3, 60, logs=True), np.array([100, 50, 2.4]), 0
    for number in range(300):
        x = np.array(planner.plan().samples)
        trials += int(number > 10 and x[2] > 0)
        done = table(3, samples=x, work=x, samples_per_s=speeds, timed_samples=x, compute_s=x / speeds, input_s=0.0)
        planner.learn(FinishedRound(number, 0, planner.plan(), done, 1.0))
    assert planner.plan().samples[2] == 0
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("rank 2 gets no samples from round ")
    assert trials


@pytest.mark.parametrize(("logs", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_by_default_and_on_other_ranks_nothing_is_said(caplog, logs, level):
    caplog.set_level(level, LOGGER)
    assert drive(logs) == (40, 20)
    assert not caplog.records
