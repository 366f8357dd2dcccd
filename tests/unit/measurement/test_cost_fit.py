"""What a sample costs is found from the seconds of rounds, and from nothing that only looks like it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hvd_hetero.allocation.by_cost import divide_padded
from hvd_hetero.measurement.cost_fit import CostFit
from hvd_hetero.rounds import CostRule, SampleFigures

LENGTHS = (0.0, 0.0, 1e-4, 0.0, 0.0, 0.0)
NUMBER = (0.0, 2e-3, 0.0, 0.0, 0.0, 0.0)
SQUARES = (1e-3, 0.0, 1e-4, 1e-6, 0.0, 0.0)
PADDING = (1e-3, 0.0, 0.0, 0.0, 1e-4, 0.0)
ATTENTION = (1e-3, 0.0, 0.0, 0.0, 1e-4, 5e-7)
MIXED = (1e-2, 1e-3, 5e-5, 5e-7, 1e-4, 1e-7)


def features(lengths) -> np.ndarray:
    return np.array(SampleFigures.of(np.asarray(lengths, dtype=np.float64)))


def rounds(count: int, *, spread: float = 1.0, seed: int = 0):
    """Features of rounds of two micro-batches of log-normal lengths."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sizes = rng.integers(4, 24, 2)
        yield sum(features(30 * np.exp(spread * rng.standard_normal(size))) for size in sizes)


def fed(true, count: int = 200, *, noise: float = 0.03, factor=lambda index: 1.0, spread: float = 1.0) -> CostFit:
    """After rounds whose times scatter; ``factor``: how many times as long a round takes."""
    fit, rng = CostFit(), np.random.default_rng(1)
    for index, features in enumerate(rounds(count, spread=spread)):
        fit.learn(features, 2, exact(true, features) * factor(index) * math.exp(noise * rng.standard_normal()))
    return fit


def exact(true, features) -> float:
    return float(np.dot(true, [2, *features]))


def errors(fit: CostFit, true) -> np.ndarray:
    """Relative errors of predictions for rounds that were not learned from, but for their common factor."""
    ratios = np.array([fit.seconds(x, 2) / exact(true, x) for x in rounds(100, seed=7)])
    return np.abs(ratios / np.median(ratios) - 1)


@pytest.mark.parametrize("true", [LENGTHS, NUMBER, ATTENTION, MIXED])
def test_seconds_of_unseen_rounds_are_predicted(true):
    """Times that scatter by 3 % teach a form that is right within 2 % in the median, and a level within 5 %."""
    fit = fed(true)
    assert np.median(errors(fit, true)) < 0.02
    assert np.median([fit.seconds(x, 2) / exact(true, x) for x in rounds(100, seed=7)]) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("true", [LENGTHS, MIXED])
@pytest.mark.parametrize(
    "factor",
    [
        lambda index: 2.0 if 60 <= index < 120 else 1.0,
        lambda index: 10.0 if index % 9 == 0 else 1.0,
        lambda index: 1e-6 if index % 20 == 0 else 1.0,
        lambda index: 1.0 + index / 100,
    ],
    ids=["slow for a while", "single slow rounds", "too fast to be true", "slower and slower"],
)
def test_a_rank_that_changes_its_speed_keeps_the_form(true, factor):
    """Also where one round of nine takes ten times as long."""
    assert np.median(errors(fed(true, factor=factor), true)) < 0.02


def test_the_level_follows_the_rank_within_nine_rounds():
    """After five rounds of twice the time, the median of nine is twice what it was."""
    fit = fed(LENGTHS, noise=0.0)
    x = next(rounds(1, seed=9))
    before = fit.seconds(x, 2)
    for features in rounds(5, seed=8):
        fit.learn(features, 2, 2 * exact(LENGTHS, features))
    assert fit.seconds(x, 2) == pytest.approx(2 * before, rel=0.01)


@pytest.mark.parametrize("true", [SQUARES, PADDING])
def test_ranks_that_divide_by_what_they_learn_finish_together(true):
    """1 : 1/2, one padded micro-batch each: they wait less than a third of what they would by lengths."""
    waited = {}
    for learns in (True, False):
        fits, rng, shares = (CostFit(), CostFit()), np.random.default_rng(3), []
        for _ in range(90):
            lengths = 30 * np.exp(rng.standard_normal(64))
            costs, padded = (
                np.rint(2**16 * of) for of in CostRule(*fits[0].coefficients / lengths.sum()).each(lengths)
            )
            ranks = divide_padded(costs.astype(np.int64), padded.astype(np.int64), [2, 1])
            each = [features(lengths[ranks == rank]) for rank in (0, 1)]
            times = np.array([1, 2]) * [np.dot(true, [1, *x]) for x in each] * np.exp(0.01 * rng.standard_normal(2))
            for fit, x, seconds in zip(fits if learns else (), each, times, strict=False):
                fit.learn(x, 1, seconds)
            shares.append(1 - times.mean() / times.max())
        waited[learns] = np.mean(shares[-50:])
    assert waited[True] < waited[False] / 3


def test_where_all_lengths_are_alike_they_cost_what_they_are():
    """Rounds that are all the same tell nothing of the form, so the prior stays."""
    fit = CostFit()
    for _ in range(100):
        fit.learn(features([20.0] * 8), 1, 0.01)
    assert fit.seconds(features([20.0] * 8), 1) == pytest.approx(0.01)
    assert fit.seconds(features([40.0] * 8), 1) == pytest.approx(0.02, rel=0.1)


def test_coefficients_are_in_units_of_a_sample_of_mean_length():
    """Before anything is learned they are the lengths; then a sample of the mean length costs 1."""
    assert CostFit().coefficients.tolist() == [0, 1, 0, 0, 0]
    assert math.isnan(CostFit().seconds([1, 1, 1, 1, 1], 1))
    fit, seen = fed(SQUARES, 40), sum(rounds(40))
    assert sum(CostRule(*fit.coefficients).each(seen[1] / seen[0])) == pytest.approx(1)
    assert (fit.coefficients >= 0).all()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_cannot_be_teach_nothing(seconds):
    """Neither do rounds without samples, nor features that are not finite."""
    fit, plain = fed(MIXED, 50), fed(MIXED, 50)
    fit.learn([8, 100, 2000, 200, 5000], 1, seconds)
    fit.learn([0, 0, 0, 0, 0], 1, 1.0)
    fit.learn([8, math.inf, math.inf, 200, 5000], 1, 1.0)
    fit.learn([8, math.nan, 2000, 200, 5000], 1, 1.0)
    assert fit.state_dict() == plain.state_dict()


def test_lengths_of_zero_and_rounds_that_cost_the_same_are_no_trouble():
    """Without any length the number counts; a constant time has finite coefficients."""
    empty, constant = CostFit(), CostFit()
    for features in rounds(60):
        empty.learn([features[0], 0, 0, 0, 0], 2, 1e-3 * features[0])
        constant.learn(features, 2, 0.5)
    assert empty.coefficients.tolist() == [1, 0, 0, 0, 0]
    assert np.isfinite(constant.coefficients).all()
    assert constant.seconds(features, 2) == pytest.approx(0.5, rel=0.05)


def test_it_goes_on_from_its_state():
    """A state is plain data, from which a rank goes on with its own level."""
    fit, other = fed(MIXED), fed(LENGTHS, 20)
    other.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert other.coefficients.tolist() == fit.coefficients.tolist()
    for features in rounds(10, seed=5):
        other.learn(features, 2, 3 * exact(MIXED, features))
    assert other.seconds(features, 2) == pytest.approx(3 * exact(MIXED, features), rel=0.1)
    assert np.median(errors(other, MIXED)) < 0.02


def test_features_add_up():
    """Number, sum, squares, number times longest and times its square; nothing for no samples."""
    assert features([3, 1, 2]).tolist() == [3, 6, 14, 9, 27]
    assert features([]).tolist() == [0, 0, 0, 0, 0]


def test_costs_of_samples_are_the_coefficients_terms():
    """What is in the sample, and what padding to it costs each sample of its micro-batch."""
    costs, padded = CostRule(1, 2, 3, 4, 5).each(np.array([0.0, 10.0]))
    assert costs.tolist() == [1, 321]
    assert padded.tolist() == [0, 540]
