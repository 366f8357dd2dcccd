"""The run-time and throughput formulas against exact fractions, quadrature and Monte Carlo."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from script_modules import load

theory = load("_theory", "benchmarks")

LAMBDA = 0.25


def equation_10(workers):
    """The paper's alternating sum, in exact fractions (rate 1)."""
    terms = (Fraction((-1) ** k * math.comb(workers - 1, k), (k + 1) ** 2) for k in range(workers))
    return float(workers * sum(terms))


def exponential_quantile(u):
    return -math.log1p(-u) / LAMBDA


@pytest.mark.parametrize("workers", [1, 2, 3, 10, 60, 200])
def test_equation_10_is_the_harmonic_number(workers):
    """The closed form equals the paper's sum, where that is summed without rounding."""
    assert theory.round_time_synchronous(workers) == pytest.approx(equation_10(workers), rel=1e-13)


@pytest.mark.parametrize("n", [0, 1, 2, 100, 10_000])
def test_harmonic_numbers(n):
    """Equal to the sum, to rounding, up to 10,000."""
    assert theory.harmonic(n) == pytest.approx(math.fsum(1 / k for k in range(1, n + 1)), rel=1e-14)


@pytest.mark.parametrize("workers", [1, 2, 1000, 10_000, 10**9])
def test_the_first_of_many_does_not_cancel(workers):
    """Eq. 9 is right to the last digits for any number of workers, and so is Eq. 13."""
    assert theory.round_time_nonblocking(workers, LAMBDA) * workers * LAMBDA == pytest.approx(1.0, rel=1e-15)
    assert theory.epoch_time_nonblocking(workers, 8, 2) == pytest.approx(4 / workers**2, rel=1e-15)


@pytest.mark.parametrize("workers", [1, 2, 7, 100, 1000, 10_000])
def test_order_statistics_by_quadrature(workers):
    """The closed forms equal the integral over the Beta quantile, first, middle and last of up to 10,000 workers."""
    for k in {1, (workers + 1) // 2, workers}:
        closed = theory.order_statistic_exponential(k, workers, LAMBDA)
        assert theory.order_statistic(k, workers, exponential_quantile) == pytest.approx(closed, rel=1e-8)


def test_order_statistic_of_other_distributions():
    """E[U_{k:P}] = k / (P + 1) for uniform times; the largest of two standard normals has mean 1 / sqrt(pi)."""
    assert theory.order_statistic(3, 9, lambda u: u) == pytest.approx(0.3)
    assert theory.order_statistic(2, 2, lambda u: float(stats.norm.ppf(u))) == pytest.approx(1 / math.sqrt(math.pi))


@pytest.mark.parametrize("workers", [2, 5, 30])
def test_monte_carlo(workers):
    """Means of 200,000 simulated rounds are within 2 % (the benchmark: 1 %, to P = 1,000)."""
    times = np.random.default_rng(workers).exponential(1 / LAMBDA, (200_000, workers))
    first, last = times.min(axis=1), times.max(axis=1)
    samples = 64 * (first[:, np.newaxis] / times).sum(axis=1)
    near = {"rel": 0.02}
    assert first.mean() == pytest.approx(theory.round_time_nonblocking(workers, LAMBDA), **near)
    assert last.mean() == pytest.approx(theory.round_time_synchronous(workers, LAMBDA), **near)
    assert first.mean() / last.mean() == pytest.approx(theory.round_time_ratio(workers), **near)
    assert samples.mean() == pytest.approx(theory.expected_samples_nonblocking(workers, 64), **near)
    throughput = theory.expected_throughput_synchronous(workers, 64, LAMBDA)
    assert (workers * 64 / last).mean() == pytest.approx(throughput, **near)
    speedup = samples.mean() / first.mean() / (workers * 64 / last.mean())
    assert speedup == pytest.approx(theory.long_run_speedup(workers), **near)


def test_epoch_times():
    """D / (P B) rounds, Eqs. 11 to 14 as printed."""
    workers, dataset, batch = 8, 50_000, 64
    expected = dataset / (LAMBDA * workers**2 * batch)
    assert theory.epoch_time_nonblocking(workers, dataset, batch, LAMBDA) == pytest.approx(expected)
    expected = dataset / (LAMBDA * batch) * equation_10(workers) / workers
    assert theory.epoch_time_synchronous(workers, dataset, batch, LAMBDA) == pytest.approx(expected)


def test_throughput_of_given_times():
    """Eqs. 15 to 18 on a case done by hand: one worker twice as fast as the other."""
    times = [1.0, 2.0]
    assert theory.throughput_nonblocking(times, 10) == 15.0
    assert theory.samples_nonblocking(times, 10) == 15.0
    assert theory.throughput_synchronous(times, 10) == 10.0
    assert theory.throughput_ratio(times) == 1.5
    assert theory.throughput_ratio([3.0] * 5) == 1.0


def test_throughput_ratio_is_the_quotient():
    """Eq. 18 is Eq. 15 over Eq. 17, and Eq. 16 is Eq. 15 times the fastest time, for any times."""
    times = np.random.default_rng(0).lognormal(size=50)
    nonblocking = theory.throughput_nonblocking(times, 32)
    assert theory.throughput_ratio(times) == pytest.approx(nonblocking / theory.throughput_synchronous(times, 32))
    assert theory.samples_nonblocking(times, 32) == pytest.approx(nonblocking * times.min())


def test_expected_throughput_of_two():
    """Eq. 17's mean for two workers is 4 B rate log 2 (P = 2 in the sum of Frullani integrals)."""
    assert theory.expected_throughput_synchronous(2, 5, LAMBDA) == pytest.approx(20 * LAMBDA * math.log(2), rel=1e-8)


def test_one_worker():
    """With one worker both schemes are the same; only the mean of 1/X has no value."""
    assert theory.round_time_ratio(1) == 1.0
    assert theory.expected_samples_nonblocking(1, 7) == 7.0
    assert theory.long_run_speedup(1) == 1.0
    assert theory.expected_throughput_synchronous(1, 7) == math.inf


def test_large_numbers_stay_finite_and_ordered():
    """To P = 10,000 the ratio falls, the speed-up grows, and both follow their asymptotes."""
    counts = [1, 2, 10, 100, 1000, 10_000]
    ratios = [theory.round_time_ratio(p) for p in counts]
    speedups = [theory.long_run_speedup(p) for p in counts]
    assert ratios == sorted(ratios, reverse=True)
    assert speedups == sorted(speedups)
    assert ratios[-1] * 10_000 * (math.log(10_000) + np.euler_gamma) == pytest.approx(1.0, rel=1e-4)
    # P / X_{P:P} shrinks like P / log P
    throughput = theory.expected_throughput_synchronous(10_000, 1) / 10_000
    assert 1 / theory.harmonic(10_000) < throughput < 1.05 / math.log(10_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.harmonic(-1), r"\bn\b.* -1"),
        (lambda: theory.harmonic(2.5), r"\bn\b.* 2\.5"),
        (lambda: theory.harmonic(math.nan), r"\bn\b.* nan"),
        (lambda: theory.round_time_nonblocking(2.5), r"workers.* 2\.5"),
        (lambda: theory.order_statistic_exponential(1.5, 3), r"\bk\b.* 1\.5"),
        (lambda: theory.round_time_nonblocking(0), r"workers.* 0"),
        (lambda: theory.round_time_synchronous(3, rate=0.0), r"rate.* 0\.0"),
        (lambda: theory.order_statistic_exponential(4, 3), r"\bk\b.* 4"),
        (lambda: theory.order_statistic(0, 3, exponential_quantile), r"\bk\b.* 0"),
        (lambda: theory.epoch_time_nonblocking(2, -1, 4), "dataset"),
        (lambda: theory.epoch_time_synchronous(2, 10, math.nan), "batch"),
        (lambda: theory.throughput_nonblocking([1.0, 0.0], 4), "times_s"),
        (lambda: theory.throughput_ratio([]), "times_s"),
        (lambda: theory.throughput_synchronous([1.0, math.inf], 4), "times_s"),
    ],
)
def test_bad_input_is_refused(call, message):
    """Each error names the parameter, the rule and the value."""
    with pytest.raises(ValueError, match=message):
        call()
