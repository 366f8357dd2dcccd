"""`proportional`: invariants, and equality with the same definition written out in fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.allocation import proportional


def water_level(weights: list[int], units: int, lower: list[int]) -> list[Fraction]:
    """max(l_i, tau v_i) with tau found by trying every number of workers at their bound, in order of l_i / v_i."""
    if not any(weights):
        return [Fraction(least) for least in lower]
    order = sorted((i for i in range(len(weights)) if weights[i]), key=lambda i: Fraction(lower[i], weights[i]))
    still = sum(lower[i] for i in range(len(weights)) if not weights[i])
    for free in range(len(order), 0, -1):
        bound = sum(lower[i] for i in order[free:])
        tau = Fraction(units - still - bound, sum(weights[i] for i in order[:free]))
        if tau * weights[order[free - 1]] >= lower[order[free - 1]]:
            break
    return [max(Fraction(least), tau * weight) for weight, least in zip(weights, lower, strict=True)]


def in_fractions(weights: list[int], units: int, lower: list[int]) -> list[int]:
    """The largest remainder of the water level, ties to the lower rank."""
    real = water_level(weights, units, lower)
    shares = [math.floor(x) for x in real]
    for rank in sorted(range(len(real)), key=lambda i: (shares[i] - real[i], i))[: units - sum(shares)]:
        shares[rank] += 1
    return shares


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[int], int, list[int], int]:
    """Integer speeds (exact after quantisation), units, least units, multiple."""
    n = draw(st.integers(1, 8))
    speeds = draw(st.lists(st.one_of(st.integers(0, 6), st.integers(0, 2**30 - 1)), min_size=n, max_size=n))
    lower = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    extra = draw(st.one_of(st.integers(0, 60), st.integers(0, 2**40))) if any(speeds) else 0
    return speeds, sum(lower) + extra, lower, draw(st.integers(1, 5))


@given(divisions())
def test_equals_the_definition_in_fractions(division: tuple[list[int], int, list[int], int]) -> None:
    """Shares are the water level's largest remainders, hence sum, bounds, multiples and one unit of distance."""
    speeds, units, lower, step = division
    shares = proportional(speeds, units * step, [least * step for least in lower], step)
    assert shares.dtype == np.int64
    assert (shares // step).tolist() == in_fractions(speeds, units, lower)
    assert int(shares.sum()) == units * step
    assert all(share % step == 0 for share in shares)
    real = water_level(speeds, units, lower)
    assert all(least <= share for share, least in zip(shares // step, lower, strict=True))
    assert all(abs(int(share) - x) < 1 for share, x in zip(shares // step, real, strict=True))


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=12), st.integers(0, 2**30))
def test_any_finite_speeds_sum_to_the_total(speeds: list[float], total: int) -> None:
    """Real speeds of any size: the sum is kept, the faster never gets less than one unit below the slower."""
    if not any(speeds):
        speeds[0] = 1.0
    shares = proportional(speeds, total, minimum=0)
    assert int(shares.sum()) == total
    by_speed = shares[np.argsort(speeds, kind="stable")]
    assert (np.diff(by_speed) >= -1).all()


def test_a_power_of_two_of_the_speeds_changes_nothing() -> None:
    """The scaling of speeds is exact: units of measurement that differ by a power of two give the same shares."""
    speeds = np.random.default_rng(0).lognormal(size=50)
    for scale in (2.0**-900, 2.0**-3, 2.0**500):
        assert (proportional(speeds * scale, 3207) == proportional(speeds, 3207)).all()


@pytest.mark.parametrize(
    ("speeds", "total", "minimum", "expected"),
    [
        ([3, 7], 20, 1, [6, 14]),
        ([1.0, 1.0, 1.0], 8, 1, [3, 3, 2]),  # ties to the lower rank
        ([0.0, 1.0, 1.0], 9, 1, [1, 4, 4]),  # who stands still gets the minimum
        ([0.0, 1.0], 5, 0, [0, 5]),
        ([0.0, 0.0], 2, 1, [1, 1]),  # the minimum uses up the total
        ([1, 100, 100], 10, 3, [3, 4, 3]),  # fixed at the minimum, the rest divided again
        ([1, 10, 100], 30, [0, 12, 3], [0, 12, 18]),
        ([5e-324, 1.0], 4, 0, [0, 4]),  # 2^30 times slower counts as still
        ([2.0], 7, 1, [7]),
        ([1, 2], 0, 0, [0, 0]),
    ],
)
def test_known_divisions(speeds, total, minimum, expected) -> None:
    assert proportional(speeds, total, minimum).tolist() == expected


def test_every_worker_is_fixed_in_its_own_pass() -> None:
    """Speeds that halve from rank to rank: the bounds bite one after the other, and all are kept."""
    speeds = 2.0 ** -np.arange(29)
    shares = proportional(speeds, 40)
    assert shares.tolist() == in_fractions([2**28 >> i for i in range(29)], 40, [1] * 29)
    assert shares.min() == 1


@pytest.mark.parametrize("total", [2**33 - 1, 2**33, 2**33 + 1, 2**34 + 12345, 2**62])
def test_totals_beyond_64_bit_products_are_exact(total: int) -> None:
    """On both sides of the switch to Python's integers the shares are those of exact fractions."""
    speeds = [2**30 - 1, 2**30 - 3, 12345, 1]
    assert proportional(speeds, total, [0, 5, 0, 2]).tolist() == in_fractions(speeds, total, [0, 5, 0, 2])


def test_a_minimum_is_rounded_up_to_the_multiple() -> None:
    """With multiples of 8 a minimum of 3 means 8."""
    assert proportional([1, 1000], 64, minimum=3, multiple_of=8).tolist() == [8, 56]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"speeds": [1.0, float("nan")], "total": 4}, ValueError, r"speeds\[1\].* nan"),
        ({"speeds": [1.0, -2.0], "total": 4}, ValueError, r"speeds\[1\].* -2\.0"),
        ({"speeds": [], "total": 4}, ValueError, "speeds"),
        ({"speeds": ["fast"], "total": 4}, TypeError, "speeds"),
        ({"speeds": [[1.0], [2.0, 3.0]], "total": 4}, TypeError, "speeds"),
        ({"speeds": [0.0, 0.0], "total": 4}, ValueError, "speeds"),
        ({"speeds": [1, 1, 1], "total": 2}, ValueError, r"minimum.* 3, .*total=2"),
        ({"speeds": [1, 1], "total": 8, "minimum": 3, "multiple_of": 8}, ValueError, r"minimum.* 16 "),
        ({"speeds": [1, 1], "total": 65, "multiple_of": 8}, ValueError, r"multiple_of.*total=64 or 72.*multiple_of=1"),
        ({"speeds": [1, 1], "total": 8, "multiple_of": 0}, ValueError, "multiple_of"),
        ({"speeds": [1, 1], "total": 8.0}, TypeError, r"total.* 8\.0"),
        ({"speeds": [1, 1], "total": 8, "minimum": [1, -1]}, ValueError, r"minimum\[1\].* -1"),
        ({"speeds": [1, 1], "total": 8, "minimum": 2**63}, ValueError, "minimum"),
    ],
)
def test_bad_input_is_named(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        proportional(**arguments)
