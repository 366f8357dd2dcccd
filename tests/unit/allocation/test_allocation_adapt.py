"""`adapt` and `settled`: Eq. 10 against the paper's own linear system, sums and bounds, and the stop rule."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.allocation import adapt, settled

epochs = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 60), min_size=n, max_size=n), st.lists(st.floats(1e-3, 1e3), min_size=n, max_size=n)
    )
)


def by_linear_system(counts: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """The appendix of the paper, Eqs. 19 to 21: solve A u = b and return w + u."""
    n = counts.size
    a, b = np.zeros((n, n)), np.zeros(n)
    for row in range(n - 1):
        a[row, row], a[row, row + 1] = 1 / speeds[row], -1 / speeds[row + 1]
        b[row] = counts[row + 1] / speeds[row + 1] - counts[row] / speeds[row]
    a[n - 1] = 1
    return counts + np.linalg.solve(a, b)


def with_minimum(speeds: np.ndarray, total: int) -> np.ndarray:
    """The real-valued optimum with everybody at 1 or more: fix who would be below, divide again."""
    shares = np.ones(speeds.size)
    free = np.ones(speeds.size, dtype=bool)
    while free.any():
        shares[free] = speeds[free] / speeds[free].sum() * (total - (~free).sum())
        if (shares[free] >= 1 - 1e-9).all():
            break
        free &= shares >= 1
        shares[~free] = 1
    return shares


@given(epochs)
def test_keeps_sum_and_bounds_within_one_unit_of_the_real_optimum(epoch) -> None:
    """Integers >= 1, the same sum, less than one unit (and float dust) from Eq. 10 with its minimum."""
    counts, seconds = map(np.array, epoch)
    adapted = adapt(counts, seconds)
    assert adapted.dtype == np.int64
    assert adapted.sum() == counts.sum()
    assert adapted.min() >= 1
    assert np.abs(adapted - with_minimum(counts / seconds, int(counts.sum()))).max() < 1 + 1e-4


def test_equals_the_linear_system_of_the_appendix() -> None:
    """Where the minimum does not bind, Eq. 10 is the solution of Eq. 21, rounded by less than one unit."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(2, 9))
        counts, speeds = rng.integers(50, 100, n), rng.uniform(1, 3, n)
        system = by_linear_system(counts, speeds)
        assert np.abs(adapt(counts, counts / speeds) - system).max() < 1 + 1e-6


@pytest.mark.parametrize(
    ("counts", "seconds", "expected"),
    [
        ([5, 5], [1.0, 1.0], [5, 5]),
        ([10, 10], [3.0, 1.0], [5, 15]),
        ([15, 5], [3.0, 3.0], [15, 5]),  # equal times are the fixed point
        ([1, 1], [1.0, 100.0], [1, 1]),  # nobody falls below 1
        ([19, 1], [1.0, 1e9], [19, 1]),
        ([5, 5], [1e-320, 1.0], [9, 1]),
        ([4], [2.0], [4]),
        ([6, 6, 6], [1.0, float("nan"), 2.0], [8, 6, 4]),  # not measured: keeps its count
        ([6, 6, 6], [float("inf"), 1.0, 2.0], [6, 8, 4]),
        ([6, 6, 6], [1.0, 2.0, 0.0], [8, 4, 6]),
        ([6, 6, 6], [1.0, 2.0, -1.0], [8, 4, 6]),
        ([6, 3], [float("nan"), 0.0], [6, 3]),
    ],
)
def test_known_epochs(counts, seconds, expected) -> None:
    given_counts = np.array(counts)
    assert adapt(given_counts, seconds).tolist() == expected
    assert given_counts.tolist() == counts  # the argument is not written to


def test_converges_and_settles_within_the_papers_five_epochs() -> None:
    """From three starts, at speeds 1, 2 and 4 with 3 % noise, all reach one ratio, and the rule stops by epoch 5."""
    for start in ([7, 7, 7], [19, 1, 1], [1, 1, 19]):
        rng = np.random.default_rng(0)
        history = [np.array(start)]
        while not settled(history):
            seconds = history[-1] / np.array([1.0, 2.0, 4.0]) * rng.lognormal(0, 0.03, 3)
            history.append(adapt(history[-1], seconds))
        assert len(history) <= 5
        assert np.abs(history[-1] - np.array([3, 6, 12])).max() <= 1


def test_one_noisy_epoch_is_not_rest() -> None:
    """Too short a history, a jump, or a drift of one unit an epoch does not settle; staying still does."""
    assert not settled([])
    assert not settled([[5, 5], [5, 5]])
    assert settled([[9, 1], [5, 5], [5, 5], [5, 5]])
    assert not settled([[5, 5], [8, 2], [5, 5]])
    assert not settled([[5, 5], [6, 4], [7, 3]])  # drift
    assert settled([[5, 5], [6, 4], [5, 5]])
    assert not settled([[5, 5], [6, 4], [5, 5]], tolerance=0)
    assert settled([[5, 5], [5, 5]], window=2, tolerance=0)
    assert settled(deque([[9, 1], [5, 5], [5, 5], [5, 5]], maxlen=4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: adapt([0, 4], [1.0, 1.0]), ValueError, r"counts\[0\].* 0"),
        (lambda: adapt([2**62, 2**62], [1.0, 1.0]), ValueError, r"counts.* 92233"),
        (lambda: settled([[1, 2]], window=1), ValueError, r"window.* 1"),
        (lambda: settled([[1, 2]], tolerance=-1), ValueError, r"tolerance.* -1"),
        (lambda: settled([[1, 2, 3], [1, 2], [1, 2]]), ValueError, r"history.*\(3,\)"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
