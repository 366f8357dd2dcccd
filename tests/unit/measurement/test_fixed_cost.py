"""The fixed cost of a micro-batch is found from batches that change, and from nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.measurement import fixed_cost
from hvd_hetero.measurement.fixed_cost import FixedCost
from hvd_hetero.measurement.fixed_costs import FixedCosts

REFERENCE = 64.0


def fed(rounds, beta: float, noise: float = 0.0, seed: int = 0) -> FixedCost:
    """After rounds of (size, seconds of a sample), times scattering by ``noise``."""
    rng = np.random.default_rng(seed)
    cost = FixedCost(REFERENCE)
    for size, sample_s in rounds:
        cost.learn(size, sample_s * (size + beta) * np.exp(noise * rng.standard_normal()), teaches=True)
    return cost


SPLITS = [(64, 1.0)] * 10 + [(90, 1.0)] * 10 + [(40, 1.0)] * 10


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_it_is_found_where_batches_change(share, noise):
    beta = REFERENCE * share / (1 - share)
    found = [fed(SPLITS, beta, noise, seed).samples for seed in range(10)]
    shares = [b / (b + REFERENCE) for b in found if b]
    assert len(shares) >= (8 if noise < 0.03 or share > 0.3 else 1)
    assert abs(np.median(shares) - share) < 0.04 + 2 * noise


def test_where_there_is_none_none_is_found():
    for seed in range(20):
        assert fed(SPLITS, 0.0, 0.02, seed).samples <= 0.1 * REFERENCE
    assert fed(SPLITS, 0.0).samples == 0.0


def test_batches_that_stay_say_nothing_of_it_whatever_happens_to_the_rank():
    paces = [(64, 1.0)] * 10 + [(64, 5.0)] * 10 + [(64, 0.7)] * 10
    assert fed(paces, 200.0, 0.02).samples == 0.0


def test_a_slowdown_after_which_the_plan_takes_samples_away_is_no_fixed_cost():
    """Two times slower at round 10, a round later half of the samples: by round alone the time would be the same."""
    rounds = [(64, 1.0)] * 10 + [(64, 2.0)] + [(32, 2.0)] * 10
    assert fed(rounds, 0.0).samples == 0.0
    assert fed(rounds, 64.0).samples == pytest.approx(64.0, rel=0.05)


def test_rounds_with_other_drivers_are_no_evidence():
    """A rank that foresees its pace by its CPU loses samples in the round in which it loses pace."""
    cost = FixedCost(REFERENCE)
    for size, sample_s, cpu in [(64, 1.0, 1.0)] * 10 + [(32, 2.0, 0.5)] * 10:
        cost.learn(size, sample_s * size, (cpu, 0.5), teaches=True)
    assert cost.samples == 0.0


def test_short_rounds_are_enough():
    rounds = ([(64, 1.0)] * 20 + [(10, 1.0)]) * 3
    assert fed(rounds, 128.0, 0.01).samples == pytest.approx(128.0, rel=0.15)


def test_a_pace_does_not_jump_where_the_fixed_cost_becomes_known():
    """Whoever forecasts paces sees a rank that goes on as before, and the speed told is that of the reference size."""
    cost = FixedCost(REFERENCE)
    paces = [cost.learn(size, size + 100.0, teaches=True) for size in [90] * 10 + [40] * 10]
    assert cost.samples == pytest.approx(100.0, rel=0.05)
    assert paces[-1] == pytest.approx(paces[9], rel=0.02)
    assert cost.speed(paces[-1]) == pytest.approx(REFERENCE / (REFERENCE + 100.0), rel=0.02)


def test_it_forgets_a_fixed_cost_that_is_another_by_now():
    cost = fed(SPLITS * 3, 200.0, 0.01)
    assert cost.samples == pytest.approx(200.0, rel=0.2)
    rng = np.random.default_rng(1)
    for size, _ in SPLITS * 6:
        cost.learn(size, (size + 20.0) * np.exp(0.01 * rng.standard_normal()), teaches=True)
    assert cost.samples == pytest.approx(20.0, rel=0.4)


def test_a_saved_one_goes_on():
    cost = fed(SPLITS, 100.0, 0.01)
    other = FixedCost(REFERENCE)
    other.restore(json.loads(json.dumps(cost.state())))
    rounds = [(50, 1.0)] * 5 + [(70, 1.0)] * 5
    for size, sample_s in rounds:
        told = cost.learn(size, sample_s * (size + 100.0), teaches=True)
        assert other.learn(size, sample_s * (size + 100.0), teaches=True) == pytest.approx(told, rel=0.05)
    assert other.samples == pytest.approx(cost.samples, rel=0.05)


@pytest.mark.parametrize("change", [{"noise": 0.0}, {"samples": -1.0}, {"against": [1.0]}, {"unit": float("inf")}])
def test_a_state_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=r"state: .* must be positive and finite"):
        FixedCost(REFERENCE).restore({**FixedCost(REFERENCE).state(), **change})


@pytest.mark.parametrize("seed", range(3))
def test_the_fixed_costs_of_many_ranks_at_once_are_those_of_each(seed):
    """Sizes that change now and then, noise, ranks that jump and drift, short rounds, rounds without a measurement."""
    rng = np.random.default_rng(seed)
    ranks = 8
    alone, together = [FixedCost(64.0) for _ in range(ranks)], FixedCosts(64.0, ranks)
    size, slope = np.full(ranks, 64.0), rng.uniform(1e-3, 5e-3, ranks)
    fixed, noise = rng.choice([0.0, 10.0, 100.0], ranks), rng.choice([0.0, 0.01, 0.05], ranks)
    known = []
    for _ in range(600):
        size = np.where(rng.random(ranks) < 0.1, np.round(rng.uniform(1.0, 128.0, ranks)), size)
        slope *= np.where(rng.random(ranks) < 0.01, rng.choice([0.5, 2.0], ranks), np.exp(rng.normal(0, 0.002, ranks)))
        at = np.flatnonzero(rng.random(ranks) < 0.9)
        seconds, teaches = slope * (size + fixed) * np.exp(rng.normal(0, 1, ranks) * noise), bool(rng.random() < 0.9)
        paces = together.learn(size[at], seconds[at], at, teaches=teaches)
        expected = [alone[i].learn(float(size[i]), float(seconds[i]), teaches=teaches) for i in at.tolist()]
        np.testing.assert_allclose(paces, expected, rtol=1e-11)
        known.append([one.samples for one in alone])
        np.testing.assert_allclose(together.samples, known[-1], rtol=1e-9, atol=1e-9)
        told = [one.speed(3.0) for one in alone]
        np.testing.assert_allclose(together.speeds(np.full(ranks, 3.0)), told, rtol=1e-10)
    assert np.array(known).max() > 10.0, "some have found a fixed cost"


def test_it_is_judged_again_only_where_something_new_speaks_for_it(monkeypatch):
    """Two sizes whose times tell something, then one size that goes on, then changes too small to tell anything."""
    found, judged = FixedCost(64.0), []
    exp = np.exp
    monkeypatch.setattr(fixed_cost.np, "exp", lambda x: judged.append(1) or exp(x))
    for size in [64.0] * 8 + [32.0] * 8:
        found.learn(size, 1e-3 * (size + 30.0), teaches=True)
    told, samples = len(judged), found.samples
    assert told >= 8
    assert samples > 0
    for size in [32.0] * 20 + [31.9, 32.0] * 20:
        found.learn(size, 1e-3 * (size + 30.0), teaches=True)
    assert len(judged) == told
    assert found.samples == samples
