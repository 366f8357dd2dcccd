"""What a sample costs each rank: averaged while it scatters, again where it has moved."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tables import table

from hvd_hetero.policies.costs import Costs


def told(seconds, samples):
    half_s = np.array(seconds) / 2
    return table(len(seconds), compute_s=half_s, input_s=half_s, timed_samples=samples)


def period(costs, rounds, samples=(10, 10, 10)):
    """One period; ``rounds`` holds the seconds of every rank, round by round."""
    for seconds in rounds:
        costs.add_round(told(seconds, samples))
    return costs.end_period()


def test_the_first_period_is_taken_as_it_is():
    costs = Costs(3)
    assert not costs.known
    assert period(costs, [(1.0, 2.0, 4.0), (3.0, 2.0, 4.0)], samples=(10, 20, 40))
    assert costs.known
    assert costs.per_sample.tolist() == [0.2, 0.1, 0.1]


def test_what_scatters_is_averaged():
    costs = Costs(3)
    period(costs, [(0.8, 1.0, 1.0), (1.2, 1.0, 1.0)])
    period(costs, [(0.9, 1.0, 1.0), (1.3, 1.0, 1.0)])
    assert costs.per_sample.tolist() == pytest.approx([0.105, 0.1, 0.1])


def test_what_moves_is_taken_as_it_is_now():
    costs = Costs(3)
    period(costs, [(0.8, 1.0, 1.0), (1.2, 1.0, 1.0)])
    period(costs, [(0.8, 1.0, 2.0), (1.2, 1.0, 2.0)])
    assert costs.per_sample.tolist() == pytest.approx([0.1, 0.1, 0.2])


def test_a_change_that_all_have_in_common_changes_nothing():
    costs = Costs(3)
    for factor in (1.0, 3.0, 0.2):
        period(costs, [(factor, 2 * factor, 4 * factor)] * 2)
        assert (costs.per_sample / costs.per_sample[0]).tolist() == pytest.approx([1.0, 2.0, 4.0])
        assert costs.state_dict()["periods"] == [costs.state_dict()["periods"][0]] * 3, "nobody has moved"


def test_a_steady_rank_does_not_seem_to_move_with_one_that_scatters_much():
    rng, costs, moved = np.random.default_rng(3), Costs(2), 0
    for _ in range(300):
        period(costs, np.exp(rng.normal(size=(20, 2)) * (0.005, 0.1)), samples=(10, 10))
        moved += bool((costs.state_dict()["periods"][0] == 1) and costs.known)
    assert moved <= 6


def test_a_period_can_be_asked_to_go_on_until_there_are_enough_rounds():
    costs = Costs(2)
    for expected in (False, False, True, False):
        costs.add_round(told((1.0, 2.0), (10, 10)))
        assert costs.end_period(least=3) is expected
    assert costs.per_sample.tolist() == pytest.approx([0.1, 0.2])


def test_over_many_periods_the_average_is_of_eight():
    rng, costs, errors = np.random.default_rng(0), Costs(3), []
    for _ in range(400):
        period(costs, np.exp(0.05 * rng.normal(size=(20, 3))))
        level = costs.per_sample
        errors.append(math.log(level[0] / level[1]))
    assert np.std(errors[20:]) == pytest.approx(0.05 * math.sqrt(2 / 20 / 15), rel=0.25)  # exponential, of 8: 1 / 15


def test_levels_do_not_drift_however_many_periods_pass():
    """They stay in the seconds that samples take: by the median's error of each period they fell without end."""
    rng, costs = np.random.default_rng(0), Costs(3)
    for _ in range(600):
        period(costs, np.exp(0.3 * rng.normal(size=(2, 3))))
        assert 0.03 < costs.per_sample.min() <= costs.per_sample.max() < 0.4


@pytest.mark.parametrize("seconds", [1e-320, 1e-200, 1e200, 1e308, math.inf])
def test_times_that_no_sample_takes_say_nothing(seconds):
    costs = Costs(2)
    assert not period(costs, [(1.0, seconds)], samples=(10, 10))
    assert period(costs, [(1.0, 2.0)] * 2, samples=(10, 10))
    assert costs.per_sample.tolist() == pytest.approx([0.1, 0.2], rel=1e-12)


@pytest.mark.parametrize("untold", [(math.nan, 10), (1.0, 0), (0.0, 10)])
def test_a_period_goes_on_until_every_rank_was_timed(untold):
    costs = Costs(3)
    seconds, samples = untold
    assert not period(costs, [(1.0, 2.0, seconds)], samples=(10, 10, samples))
    assert period(costs, [(3.0, 2.0, 1.0)])
    assert costs.per_sample.tolist() == pytest.approx([0.2, 0.2, 0.1])
