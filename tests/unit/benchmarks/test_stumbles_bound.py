"""The bounds of ranks that stumble: cases whose answer is known, and the order that bounds must keep."""

import numpy as np
import pytest
from script_modules import load


@pytest.fixture
def bound(monkeypatch):
    module = load("stumbles_bound", "benchmarks")
    monkeypatch.setattr(module, "ROUNDS", 1500)
    monkeypatch.setattr(module, "FORESEEN", 150)
    return module


def draws():
    return np.random.default_rng(2)


def test_micro_batches_hold_all_samples_and_take_all_ranks_as_long(bound):
    ranks = bound.Ranks(3, 0.01)
    lasts_ms, samples = ranks.micro_batch(4)
    assert 4 * samples.sum() == pytest.approx(ranks.total)
    assert ranks.slope_ms * samples + ranks.fixed_ms == pytest.approx(np.full(3, lasts_ms))


def test_with_one_micro_batch_the_first_ends_nothing_early(bound):
    ranks = bound.Ranks(2, 0.0)
    assert ranks.first_ends(1, draws()) == pytest.approx(ranks.lb_bsp(draws()), rel=0.02)


def test_two_ranks_wait_for_the_larger_of_two_stumbles(bound):
    ranks = bound.Ranks(2, 0.0)
    # The share of a stumble is uniform: its mean is 1/2, and the mean of the larger of two is 2/3.
    last = 1.0 + 3.0 * (2 * 0.1 * 0.9 / 2 + 0.1 * 0.1 * 2 / 3)
    assert ranks.total / (ranks.micro_batch(1)[0] * last + 3.0) == pytest.approx(ranks.lb_bsp(draws()), rel=0.01)


@pytest.mark.parametrize("workers", [2, 4])
def test_no_rule_does_more_than_one_that_knows_all_and_that_no_more_than_ranks_that_never_wait(bound, workers):
    ranks = bound.Ranks(workers, 0.0)
    first, seen = ranks.first_ends(6, draws()), ranks.foresight(6, draws())
    assert ranks.lb_bsp(draws()) < first < seen < ranks.none_waits()


def test_ranks_that_never_stumble_gain_nothing(bound, monkeypatch):
    monkeypatch.setattr(bound, "CHANCE", 0.0)
    monkeypatch.setattr(bound, "MEAN", 1.0)
    ranks = bound.Ranks(3, 0.0)
    assert ranks.first_ends(8, draws()) == pytest.approx(ranks.lb_bsp(draws()))
    assert ranks.foresight(8, draws()) == pytest.approx(ranks.lb_bsp(draws()))
