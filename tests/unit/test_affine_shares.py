"""Shares of ranks with a fixed cost: against brute force, and in jobs where plain speeds lead astray."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.affine_shares import AffineCosts
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.simulation import Cluster, RoundSimulation
from hvd_hetero.simulation.cluster import Worker
from hvd_hetero.simulation.compute import Compute
from hvd_hetero.simulation.variation import Jitter, Recorded

SIZE = 8.0


def costs(paces, fixed, minimum=1, many=False) -> AffineCosts:
    speeds = [u * SIZE / (SIZE + b) for u, b in zip(paces, fixed, strict=True)]
    return AffineCosts(np.array(speeds) if many else speeds, np.array(fixed) if many else fixed, SIZE, minimum)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_split_is_the_best_of_all(seed, many):
    rng = np.random.default_rng(seed)
    n, total = int(rng.integers(2, 4)), int(rng.integers(6, 24))
    paces, fixed = rng.uniform(0.3, 3.0, n), rng.choice([0.0, 3.0, 30.0], n) * rng.uniform(0.5, 1.5, n)
    found = costs(paces, fixed.tolist(), many=many)
    equal = RoundPlan.of(np.full(n, total // n) + (np.arange(n) < total % n))
    split = found.divided(equal, 1, None)
    splits = (x for x in itertools.product(range(1, total), repeat=n) if sum(x) == total)
    best = min(float(((np.array(x) + fixed) / paces).max()) for x in splits)
    assert float(((np.array(split.samples) + fixed) / paces).max()) == pytest.approx(best)
    assert found.near_best(split, 0.5)
    late = float(((np.array(equal.samples) + fixed) / paces).max())
    if found.near_best(equal, 0.0):  # compared with the best over the reals, which may be sooner, never later
        assert late == pytest.approx(best)


def test_a_second_micro_batch_pays_the_fixed_cost_again():
    found = costs([1.0, 1.0], [10.0, 10.0])
    held = RoundPlan((20, 20), (2, 1))
    assert not found.near_best(held, 0.05), "30 + 10 against 20 + 10"
    assert found.near_best(RoundPlan((20, 20), (1, 1)), 0.0)


def simulated(slopes, fixed, passing=(), rounds=200, noise=0.02, total=128, seed=0):
    """Shares by round. ``passing``: by how much the last rank is slower, round by round."""
    workers = []
    for rank, (m, b) in enumerate(zip(slopes, fixed, strict=True)):
        variation = [Jitter("round", noise)]
        if passing and rank == len(slopes) - 1:
            variation.append(Recorded("round", (*passing, *[1.0] * (rounds - len(passing)))))
        workers.append(Worker(Compute(m, b), variation=tuple(variation)))
    simulation = RoundSimulation(Cluster(tuple(workers), seed=seed), LBBSP(), total)
    return np.array([simulation.step().plan.samples for _ in range(rounds)])


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 3.0, 10.0, 100.0])
def test_equal_ranks_stay_equal_whatever_part_of_a_step_is_fixed(ratio):
    for seed in range(3):
        shares = simulated([1e-3] * 2, [64e-3 * ratio] * 2, seed=seed)
        assert shares.min() >= 32
        assert np.abs(np.median(shares, axis=0) - 64).max() <= 3


@pytest.mark.parametrize("factor", [2.0, 3.0, 10.0])
@pytest.mark.parametrize("ratio", [0.3, 0.8, 1.6, 3.0, 10.0])
def test_a_split_that_a_passing_slowdown_has_left_behind_is_left(ratio, factor):
    """Plain speeds stayed at (127, 1): nothing there tells that the other rank would take more as fast."""
    passing = [1.0] * 40 + [factor] * 30
    shares = simulated([1e-3] * 2, [64e-3 * ratio] * 2, passing)
    assert np.abs(shares[90:] - 64).max() <= 10


def test_ranks_of_unequal_speed_come_to_the_split_of_their_real_costs():
    """t = (x + 64), 2 (x + 64) ms: equal at x = 106 and 22; in proportion to speeds it would be 85 and 43."""
    shares = simulated([1e-3, 2e-3], [64e-3, 128e-3])
    assert np.abs(np.median(shares[20:], axis=0) - [106, 22]).max() <= 4
