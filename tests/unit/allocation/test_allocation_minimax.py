"""`minimax` and `minimax_lp`: brute force, `scipy.optimize.milp`, and the certificate of an optimum."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from hvd_hetero.allocation import Allocation, SolverFailure, minimax, minimax_lp

Instance = tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray, np.ndarray, int]


def small_instance(rng: np.random.Generator) -> tuple[Instance, list[list[int]]]:
    """Few workers, few binary digits (so that ties abound and times are exact), bounds, multiples; and the choices."""
    while True:
        n, step = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        lower = rng.integers(0, 5, n)
        upper = lower + rng.integers(0, 7, n)
        choices = [[x for x in range(low, high + 1) if x % step == 0] for low, high in zip(lower, upper, strict=True)]
        if all(choices):
            break
    slope = rng.integers(0, 6, n) / rng.choice([1, 8])
    total = sum(int(rng.choice(choice)) for choice in choices)
    return (slope, rng.integers(-3, 6, n) * 1.0, rng.integers(0, 4, n) * 1.0, total, lower, upper, step), choices


def check(instance: Instance, allocation: Allocation) -> None:
    """Sum, bounds and multiples are kept, and the seconds belong to the shares."""
    slope, intercept, comm, total, lower, upper, step = instance
    shares = allocation.shares
    assert shares.dtype == np.int64
    assert int(shares.sum()) == total
    assert (shares >= lower).all()
    assert (shares <= upper).all()
    assert (shares % step == 0).all()
    assert allocation.finish_s == pytest.approx(slope * shares + intercept + comm, rel=1e-12, abs=1e-300)
    assert allocation.latest_s == allocation.finish_s.max()


def test_equals_brute_force_down_to_the_earliest_worker() -> None:
    """150 small instances: latest, second latest, ... equal the best over all splits, exactly."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        instance, choices = small_instance(rng)
        slope, intercept, comm, total, *_ = instance
        splits = np.array([split for split in itertools.product(*choices) if sum(split) == total])
        times = -np.sort(-(slope * splits + intercept + comm), axis=1)
        best = min(map(tuple, times.tolist()))
        allocation = minimax(*instance)
        check(instance, allocation)
        assert tuple(sorted(allocation.finish_s.tolist(), reverse=True)) == best
        assert allocation.bound_s == best[0]


def middle_instance(rng: np.random.Generator) -> Instance:
    """A few dozen workers in seconds as they are measured."""
    n, step = int(rng.integers(5, 25)), int(rng.choice([1, 4]))
    slope = rng.lognormal(-6, 1, n) * (rng.random(n) > 0.1)
    lower = step * rng.integers(0, 10, n)
    upper = lower + step * rng.integers(0, 40, n)
    total = int(rng.integers(lower.sum() // step, upper.sum() // step + 1)) * step
    return slope, rng.normal(0.02, 0.01, n), rng.exponential(0.01, n), total, lower, upper, step


def test_equals_mixed_integer_programming() -> None:
    """25 middle instances: the latest worker is as early as HiGHS finds by branch and bound."""
    rng = np.random.default_rng(2)
    for _ in range(25):
        instance = middle_instance(rng)
        slope, intercept, comm, total, lower, upper, step = instance
        n = slope.size
        exact = milp(
            np.append(np.zeros(n), 1.0),
            integrality=np.append(np.ones(n), 0.0),
            bounds=Bounds(np.append(lower // step, -np.inf), np.append(upper // step, np.inf)),
            constraints=[
                LinearConstraint(np.c_[np.diag(slope * step), -np.ones(n)], ub=-(intercept + comm)),
                LinearConstraint(np.append(np.ones(n), 0.0), total // step, total // step),
            ],
            options={"mip_rel_gap": 0.0},
        )
        assert exact.status == 0
        allocation = minimax(*instance)
        check(instance, allocation)
        assert allocation.latest_s == pytest.approx(exact.fun, rel=1e-6, abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(0, 8), st.integers(1, 3))
def test_no_unit_could_be_moved_to_advantage(seed: int, n: int, spread: float, step: int) -> None:
    """Nobody above its lower bound finishes later than somebody below its upper bound would with one unit more."""
    rng = np.random.default_rng(seed)
    slope = rng.lognormal(-6, spread, n)
    lower = step * rng.integers(0, 10, n)
    upper = lower + step * rng.integers(0, 300, n)
    total = int(rng.integers(lower.sum() // step, upper.sum() // step + 1)) * step
    instance = (slope, rng.normal(0, 0.1, n), rng.exponential(0.1, n), total, lower, upper, step)
    allocation = minimax(*instance)
    check(instance, allocation)
    taken = allocation.finish_s[allocation.shares - step >= lower]
    offered = (allocation.finish_s + slope * step)[allocation.shares + step <= upper]
    if taken.size and offered.size:
        assert taken.max() <= offered.min() * (1 + 1e-9) + 1e-12


def latest_in_fractions(slope, intercept, comm, total, lower, upper) -> Fraction:
    """The optimum without any rounding: each unit to whoever finishes it earliest, in exact fractions of the floats."""
    m, constant = (
        [Fraction(x) for x in slope],
        [Fraction(b) + Fraction(c) for b, c in zip(intercept, comm, strict=True)],
    )
    shares = lower.tolist()
    for _ in range(total - sum(shares)):
        free = [i for i in range(len(m)) if shares[i] < upper[i]]
        shares[min(free, key=lambda i: m[i] * (shares[i] + 1) + constant[i])] += 1
    return max(m[i] * shares[i] + constant[i] for i in range(len(m)))


@pytest.mark.parametrize("spread", [1.0, 8.0, 30.0, 200.0])
def test_speeds_of_any_spread_are_solved_to_the_last_digits(spread: float) -> None:
    """Slopes up to e^600 apart, one worker late from its lower bound: the latest is the exact one's, to 1e-12."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        n = int(rng.integers(2, 9))
        lower = rng.integers(0, 3, n)
        upper = lower + rng.integers(0, 60, n)
        total = int(rng.integers(lower.sum(), upper.sum() + 1))
        slope, intercept, comm = rng.lognormal(-6, spread, n), rng.normal(0, 1e-4, n), rng.exponential(1e-4, n)
        exact = latest_in_fractions(slope, intercept, comm, total, lower, upper)
        allocation = minimax(slope, intercept, comm, total, lower, upper)
        assert allocation.latest_s == pytest.approx(float(exact), rel=1e-12, abs=1e-15)


def test_a_rank_that_stands_still_does_not_blur_the_others() -> None:
    """Beside a worker 10^15 times slower, the split of the others is what it is without it."""
    slope = np.random.default_rng(0).lognormal(-6, 0.5, 40)
    with_it = minimax(np.append(slope, 1e12), 0, 0, 4001, np.append(np.zeros(40, dtype=int), 1), 4000)
    assert with_it.shares.tolist() == [*minimax(slope, 0, 0, 4000, 0, 4000).shares.tolist(), 1]


@pytest.mark.parametrize("slope", [0.0, 1e-3])
def test_many_workers_with_large_totals_do_not_overflow(slope: float) -> None:
    """The largest total that 3,000 workers may divide, without bounds, keeps its sum; one more is an error."""
    largest = 2**62 // 3000 - 1
    shares = minimax(np.full(3000, slope), 0, 0, largest, 0, 2**62).shares
    assert sum(shares.tolist()) == largest
    assert shares.min() >= 0
    with pytest.raises(ValueError, match=rf"total.* {largest + 1}"):
        minimax(np.full(3000, slope), 0, 0, largest + 1, 0, 2**62)


def test_linear_program_brackets_the_optimum() -> None:
    """Relaxed bound <= exact optimum <= rounded program, on small and middle instances; all rules are kept."""
    rng = np.random.default_rng(3)
    for instance in [small_instance(rng)[0] for _ in range(40)] + [middle_instance(rng) for _ in range(40)]:
        relaxed = minimax_lp(*instance)
        assert isinstance(relaxed, Allocation)
        check(instance, relaxed)
        exact = minimax(*instance)
        assert relaxed.bound_s <= exact.latest_s + 1e-6
        assert exact.latest_s <= relaxed.latest_s + 1e-12


@pytest.mark.parametrize("exponent", [-60, -20, 30])
def test_the_unit_of_time_does_not_change_the_linear_program(exponent: int) -> None:
    """Rounds of nanoseconds and of years are split as well as rounds of seconds: bound and latest scale along."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        slope, intercept, comm, *rest = middle_instance(rng)
        intercept = np.abs(intercept)
        exact = minimax(slope, intercept, comm, *rest)
        times = [np.ldexp(seconds, exponent) for seconds in (slope, intercept, comm)]
        relaxed = minimax_lp(*times, *rest)
        check((*times, *rest), relaxed)
        assert relaxed.bound_s <= np.ldexp(exact.latest_s, exponent) * (1 + 1e-6)
        one_unit_s = np.ldexp(slope.max() * rest[-1], exponent)
        assert np.ldexp(exact.latest_s, exponent) * (1 - 1e-9) <= relaxed.latest_s <= relaxed.bound_s + one_unit_s


@pytest.mark.parametrize(
    ("slope", "total", "shares"),
    [([2, 1], 4, [1, 3]), ([1, 2], 4, [3, 1]), ([1, 1, 1], 4, [2, 1, 1]), ([3, 2, 1], 10, [2, 3, 5])],
)
def test_the_linear_program_rounds_up_who_finishes_earliest(slope, total, shares) -> None:
    """Missing units go to the workers that finish them earliest, ties to the lower rank; done by hand."""
    assert minimax_lp(slope, 0, 0, total, 0, total).shares.tolist() == shares


def test_a_solver_that_gives_up_is_a_value() -> None:
    """HiGHS without time returns its status and message, not an exception and not a split."""
    rng = np.random.default_rng(4)
    n = 300
    failure = minimax_lp(rng.lognormal(size=n), rng.normal(size=n), 0, 64 * n, 0, 64 * n, time_limit_s=0.0)
    assert isinstance(failure, SolverFailure)
    assert failure.status == 1
    assert "limit" in failure.message.lower()


@pytest.mark.parametrize(
    ("slope", "intercept", "comm", "total", "lower", "upper", "shares"),
    [
        ([1, 2], 0, 0, 9, 0, 9, [6, 3]),
        ([1, 1], [0, 4], 0, 10, 1, 10, [7, 3]),
        ([1, 1], 0, [0, 4], 10, 1, 10, [7, 3]),
        ([1, 1, 1], 0, 0, 7, 0, 7, [3, 2, 2]),  # ties to the lower rank
        ([2, 1], [0, 1], 0, 2, 0, 5, [1, 1]),
        ([2, 1], [0, 1], 0, 1, 0, 5, [0, 1]),  # ties to the lesser slope
        ([0, 0], [1, 2], 0, 10, 0, 8, [8, 2]),
        ([0, 1], [9, 0], 0, 10, 0, 6, [6, 4]),  # what costs nothing is dealt first
        ([1, 1], 0, 0, 10, [8, 0], 10, [8, 2]),  # a lower bound decides
        ([1, 9], 0, 0, 10, 0, [3, 10], [3, 7]),
        ([1, 9], 0, 0, 4, [1, 3], 10, [1, 3]),  # no choice
        ([3.0], 0, 0, 5, 0, 5, [5]),
        ([1, 1], 0, 0, 0, 0, 0, [0, 0]),
        ([1e-300, 1e300], 0, 0, 50, 0, 50, [50, 0]),
        ([5e-324, 1e-323], 0, 0, 3, 0, 3, [2, 1]),
        ([1, 1], 0, 0, 2**48, 0, 2**62, [2**47, 2**47]),
    ],
)
def test_known_splits(slope, intercept, comm, total, lower, upper, shares) -> None:
    assert minimax(slope, intercept, comm, total, lower, upper).shares.tolist() == shares


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_many_units_of_few_workers_are_found_by_halving(spread: float) -> None:
    """A million samples on 3 workers, alike and a thousand times apart: the certificate holds there too."""
    slope = np.array([1.0, 10.0**spread, 2.0]) * 1e-4
    allocation = minimax(slope, 0.01, 0.0, 10**6, 0, 10**6)
    assert int(allocation.shares.sum()) == 10**6
    assert allocation.finish_s.max() <= (allocation.finish_s + slope).min() * (1 + 1e-12)


@pytest.mark.parametrize("solve", [minimax, minimax_lp])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lower": [6, 6]}, ValueError, r"total.* 12 .*X=10.*lower\[0\]=6"),
        ({"upper": [5, 4]}, ValueError, r"total.* 9 .*X=10.*upper\[1\]=4"),
        ({"lower": [1, 7], "upper": [9, 6]}, ValueError, r"rank 1 .*lower\[1\]=7.*upper\[1\]=6"),
        ({"lower": 3, "upper": [10, 4], "multiple_of": 5}, ValueError, r"rank 1 .*multiple_of=5"),
        ({"multiple_of": 3}, ValueError, r"multiple_of=3.*total=9 or 12"),
        ({"slope": [1.0, -1.0]}, ValueError, r"slope\[1\].* -1\.0"),
        ({"intercept": [0.0, float("nan")]}, ValueError, r"intercept\[1\].* nan"),
        ({"comm": [0.0, -0.1]}, ValueError, r"comm\[1\].* -0\.1"),
        ({"total": 2**53}, ValueError, "total"),
    ],
)
def test_infeasible_input_is_named(solve, change, error, message) -> None:
    """Errors name the parameter, and where bounds conflict the rank, the bounds and X."""
    arguments = {
        "slope": [1.0, 2.0],
        "intercept": 0.0,
        "comm": 0.0,
        "total": 10,
        "lower": 0,
        "upper": 10,
        "multiple_of": 1,
    } | change
    with pytest.raises(error, match=message):
        solve(**arguments)


def test_times_beyond_floats_are_named() -> None:
    for slope, beside in ([1e308, 1e308], 0.0), ([1, 1], [0.0, 1e308]):
        with pytest.raises(ValueError, match=r"slope.*1e\+308"):
            minimax(slope, beside, beside, 10**6, 0, 10**6)
