"""The run-time and throughput formulas against exact fractions, quadrature and Monte Carlo."""

import math
from fractions import Fraction

import pytest
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


@pytest.mark.parametrize("workers", [1, 2, 7, 100, 1000, 10_000])
def test_order_statistics_by_quadrature(workers):
    """The closed forms equal the integral over the Beta quantile, first, middle and last of up to 10,000 workers."""
    for k in {1, (workers + 1) // 2, workers}:
        closed = theory.order_statistic_exponential(k, workers, LAMBDA)
        assert theory.order_statistic(k, workers, exponential_quantile) == pytest.approx(closed, rel=1e-8)


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
