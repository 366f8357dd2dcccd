"""Averages where speeds only seem to move, predictions where they do."""

import json
import math

import numpy as np
import pytest

from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.steady_speeds import SteadySpeeds
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundReport, RoundTable

ROUNDS = 480


def play(speeds: np.ndarray, policy: LBBSP) -> tuple[float, int, RoundPlan]:
    """Samples per second of the best split's, new splits, and the last plan, where ranks have these speeds."""
    rounds, ranks = speeds.shape
    plan = policy.first(ranks, 1000 * ranks)
    predictors = [policy.predictor() for _ in range(ranks)]
    took = best = 0.0
    changes = 0
    for number in range(rounds):
        busy_s = np.array(plan.samples) / speeds[number]
        took += busy_s.max()
        best += plan.total / speeds[number].sum()
        rows = []
        for rank, one in enumerate(predictors):
            one.update(speeds[number, rank])
            known = dict.fromkeys(RoundReport.__dataclass_fields__, 0.0)
            known |= {"samples": plan.samples[rank], "measured_per_s": speeds[number, rank]}
            known["samples_per_s"] = one.predict()
            rows.append(RoundReport(**known).vector(rank, ranks))
        after = policy.next(plan, FinishedRound(number, 0, plan, RoundTable(sum(rows), ranks), 1.0))
        changes += after != plan
        plan = after
    return best / took, changes, plan


def scattered(level: np.ndarray, share: float) -> np.ndarray:
    return level * np.exp(share * np.random.default_rng(7).normal(size=level.shape))


def follow(speeds: np.ndarray) -> tuple[float, int]:
    """What it is to follow every prediction that promises 3 %."""

    class Following(LBBSP):
        def _to_plan_by(self, table):
            predicted = table.column("samples_per_s")
            return predicted, np.zeros(len(predicted))

    return play(speeds, Following())[:2]


@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_moves_few_splits_and_costs_nothing(ranks):
    speeds = scattered(np.full((ROUNDS, ranks), 1000.0), 0.1)
    rate, changes, _ = play(speeds, LBBSP())
    followed, followed_changes = follow(speeds)
    assert changes <= 0.35 * followed_changes
    assert rate >= followed - 0.001


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_a_change_is_taken_in_as_quickly_as_by_following(share):
    level = np.full((ROUNDS, 2), 1000.0)
    for number in range(ROUNDS):
        level[number, number // 60 % 2] = 500.0
    speeds = scattered(level, share)
    rate, changes, _ = play(speeds, LBBSP())
    followed, followed_changes = follow(speeds)
    assert rate >= followed - 0.004
    assert changes < followed_changes


def test_wandering_speeds_are_followed():
    steps = np.random.default_rng(3).normal(size=(ROUNDS, 4))
    speeds = scattered(1000.0 * np.exp(0.03 * steps.cumsum(axis=0)), 0.02)
    assert play(speeds, LBBSP())[0] >= follow(speeds)[0] - 0.004


def test_steady_unequal_speeds_are_found():
    speeds = scattered(np.tile([1200.0, 600.0, 400.0], (ROUNDS, 1)), 0.1)
    plan = play(speeds, LBBSP())[2]
    assert np.allclose(plan.samples, np.array([1.0, 1 / 2, 1 / 3]) * 3000 / (11 / 6), rtol=0.06)


def test_a_level_is_the_average_since_it_was_set_and_its_uncertainty_shrinks():
    steady = SteadySpeeds()
    measured = np.tile([[105.0, 96.0], [95.0, 104.0]], (20, 1))
    for row in measured:
        level, uncertain = steady.after(row, predicted=row)
    # Before three errors are known, predictions are believed: the third row is the last that sets the level.
    assert np.allclose(level, measured[2:].mean(axis=0))
    swing = np.maximum(measured[0] / measured[1], measured[1] / measured[0]) - 1.0
    assert np.allclose(uncertain, swing / 0.6745 / math.sqrt(38))
    level, uncertain = steady.after(np.full(2, 50.0), np.full(2, 50.0))
    assert np.array_equal(level, [50.0, 50.0])
    assert (uncertain > 0.02).all()


def test_a_rank_without_a_usable_speed_teaches_nothing():
    steady = SteadySpeeds()
    for _ in range(5):
        steady.after(np.array([10.0, 20.0]), np.array([10.0, 20.0]))
    before = steady.state_dict()
    for measured in ([math.nan, 21.0], [0.0, 21.0]):
        level, uncertain = steady.after(np.array(measured), np.array([10.0, 30.0]))
        assert np.array_equal(level, [10.0, 20.0]), "what is known stays"
    for predicted in ([math.nan, 30.0], [0.0, 30.0]):
        level, uncertain = steady.after(np.array([10.0, 20.0]), np.array(predicted))
        assert np.array_equal(level, predicted, equal_nan=True)
        assert not uncertain.any()
    assert steady.state_dict() == before


def test_a_state_of_before_the_first_round_that_teaches_can_be_loaded():
    young, resumed = SteadySpeeds(), SteadySpeeds()
    resumed.load_state_dict(json.loads(json.dumps(young.state_dict())))
    for speeds in ([10.0, 20.0], [11.0, 19.0], [10.0, 20.0]):
        found = [each.after(np.array(speeds), np.array(speeds)) for each in (young, resumed)]
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert resumed.state_dict() == young.state_dict()


def test_a_late_rank_that_rounding_cannot_help_moves_little():
    """Of four pieces for three equal ranks one has two, and is always late."""
    speeds = scattered(np.full((ROUNDS, 3), 1000.0), 0.05)
    assert play(speeds, LBBSP(multiple_of=750))[1] <= 3, "while the noise is not known"


def test_tolerance_zero_follows_every_prediction():
    speeds = scattered(np.full((100, 2), 1000.0), 0.05)
    assert play(speeds, LBBSP("memoryless", tolerance=0.0))[1] > 90


def test_it_goes_on_where_it_left_off():
    speeds = scattered(np.full((60, 3), 1000.0), 0.1)
    through, halves = LBBSP(), LBBSP()
    plan = play(speeds[:30], through)[2]
    halves.load_state_dict(json.loads(json.dumps(through.state_dict())))
    assert halves.state_dict() == through.state_dict()
    for row in speeds[30:]:
        known = dict.fromkeys(RoundReport.__dataclass_fields__, 0.0)
        rows = [
            RoundReport(**known | {"samples": 1000, "measured_per_s": v, "samples_per_s": v}).vector(i, 3)
            for i, v in enumerate(row)
        ]
        finished = FinishedRound(31, 0, plan, RoundTable(sum(rows), 3), 1.0)
        assert through.next(plan, finished) == halves.next(plan, finished)
