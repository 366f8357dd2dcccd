"""ZipLine and the grid scans against brute force, the paper's algorithms written out, and each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.barriers import full_grid_scan, grid_scan, zipline


def random_ends(rng, workers, lookahead, tied=False):
    """Predicted ends; tied ones are small integers, so that equal times and equal waits abound."""
    intervals = rng.integers(1, 4, (workers, lookahead)) if tied else rng.uniform(0.5, 1.5, (workers, lookahead))
    return np.cumsum(intervals, axis=1)


def brute_force(ends):
    """The least wait over every choice, and of the choices that reach it the earliest barrier."""
    choices = (list(z) for z in itertools.product(*ends.tolist()))
    return min((max(z) - min(z), max(z)) for z in choices)


def algorithm_2(ends):
    """The paper's, with Z a dict in order of insertion, which is the order of time."""
    omega = sorted((end, p, i) for p, row in enumerate(ends.tolist()) for i, end in enumerate(row))
    z, best, best_z = {}, np.inf, None
    for end, p, i in omega:
        z.pop(p, None)
        z[p] = (end, i)
        if len(z) == len(ends):
            wait = end - next(iter(z.values()))[0]
            if wait < best:
                best, best_z = wait, dict(z)
    return best, [best_z[p][1] for p in range(len(ends))]


def algorithm_1(ends, row):
    """The paper's GridScan with its designated row given, by looking at every end."""
    best, best_z = np.inf, None
    for e in ends[row]:
        z = [int(np.abs(other - e).argmin()) for other in ends]
        times = ends[np.arange(len(ends)), z]
        if times.max() - times.min() < best:
            best, best_z = times.max() - times.min(), z
    return best, best_z


def consistent(ends, barrier):
    """The wait and time that are stated are those of the ends that are chosen."""
    times = ends[np.arange(len(ends)), barrier.index]
    assert barrier.time == times.max()
    assert barrier.wait == times.max() - times.min()


def test_zipline_equals_brute_force():
    """The least wait, and the earliest barrier that has it, ties or none."""
    rng = np.random.default_rng(0)
    for tied in (False, True) * 100:
        ends = random_ends(rng, rng.integers(1, 5), rng.integers(1, 6), tied)
        barrier = zipline(ends)
        consistent(ends, barrier)
        assert (barrier.wait, barrier.time) == brute_force(ends)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("workers", "lookahead"), [(1, 1), (1, 9), (9, 1), (2, 40), (30, 7), (100, 15)])
def test_zipline_equals_algorithm_2(workers, lookahead, tied):
    """The same set Z as the paper's scan, index by index."""
    for seed in range(5):
        ends = random_ends(np.random.default_rng(seed), workers, lookahead, tied)
        wait, index = algorithm_2(ends)
        barrier = zipline(ends)
        assert barrier.wait == wait
        assert barrier.index.tolist() == index


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("workers", "lookahead"), [(1, 1), (1, 5), (6, 1), (5, 12), (12, 5)])
def test_grid_scans_equal_algorithm_1(workers, lookahead, tied):
    """The same choice as the paper's scan over all ends; the full scan is the first best of all designated rows."""
    for seed in range(5):
        ends = random_ends(np.random.default_rng(seed), workers, lookahead, tied)
        expected = [algorithm_1(ends, row) for row in range(workers)]
        one, full = grid_scan(ends), full_grid_scan(ends)
        for barrier, (wait, index) in (
            (one, expected[int(ends[:, 0].argmin())]),
            (full, min(expected, key=lambda found: found[0])),
        ):
            consistent(ends, barrier)
            assert barrier.wait == wait
            assert barrier.index.tolist() == index


@pytest.mark.parametrize(
    ("ends", "index", "wait"),
    [
        ([[10, 20, 30], [13, 23, 33]], [0, 0], 3.0),  # d_6 and d_10 in the paper's Figure 3 wait alike
        (np.tile([2.0, 4.0, 6.0], (5, 1)), [0] * 5, 0.0),
        ([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]], [1, 0], 0.0),
        (np.outer([1.0, 3.0], np.arange(1, 16)), [2, 0], 0.0),
    ],
    ids=["the first of equals", "equal workers", "twice as fast", "three times as fast"],
)
def test_known_barriers(ends, index, wait):
    barrier = zipline(ends)
    assert (barrier.index.tolist(), barrier.wait) == (index, wait)


def test_grid_scan_takes_the_first_of_equals():
    assert grid_scan([[10, 20, 30], [13, 23, 33]]).index.tolist() == [0, 0]
    assert grid_scan([[10, 20], [8, 12]]).index.tolist() == [0, 0]  # 8 and 12 are equally near to 10


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6), st.integers(-50, 50), st.integers(1, 9))
def test_zipline_invariances(workers, lookahead, seed, shift, scale):
    """Shifting or scaling the clock moves the barrier with it; reordering the workers reorders their indices."""
    rng = np.random.default_rng(seed)
    ends = rng.permuted(np.arange(1, workers * lookahead + 1)).reshape(workers, lookahead)
    ends.sort(axis=1)  # all different, so that no tie depends on the order of the workers
    barrier, order = zipline(ends), rng.permutation(workers)
    moved = zipline(ends * scale + shift)
    assert moved.index.tolist() == barrier.index.tolist()
    assert (moved.wait, moved.time) == (barrier.wait * scale, barrier.time * scale + shift)
    assert zipline(ends[order]).index.tolist() == barrier.index[order].tolist()


def test_integers_stay_exact():
    """Ends in nanoseconds, beyond what a float tells apart, are compared as the integers that they are."""
    start = 2**60
    assert zipline([[start, start + 1000], [start + 3, start + 1001]]).index.tolist() == [1, 1]


@pytest.mark.parametrize("search", [zipline, grid_scan, full_grid_scan])
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([["1", "2"]], "ends.*numbers"),
        ([[1j, 2.0]], "ends.*numbers"),
        ([1.0, 2.0], r"ends.*\(2,\)"),
        (np.empty((0, 3)), r"ends.*\(0, 3\)"),
        (np.empty((3, 0)), r"ends.*\(3, 0\)"),
        ([[1.0, 2.0], [2.0, 2.0]], "ends.*worker 1"),
        ([[1.0, np.nan, 3.0]], "ends.*worker 0"),
        ([[1.0], [np.nan]], "ends.*worker 1"),
        ([[1.0, np.inf]], "ends.*worker 0"),
    ],
)
def test_bad_ends_are_refused(search, ends, message):
    with pytest.raises(ValueError, match=message):
        search(ends)


@pytest.mark.parametrize("search", [zipline, grid_scan, full_grid_scan])
def test_layout_and_kind_of_the_array_do_not_matter(search):
    """Rows or columns first, strided, read-only, small integers, unsigned, float32: one barrier, and no writing."""
    ends = np.array([[2, 5, 9], [3, 4, 7], [1, 6, 8]])
    frozen = np.repeat(ends, 2, axis=1)[:, ::2]
    frozen.flags.writeable = False
    expected = search(ends)
    for other in (np.asfortranarray(ends), frozen, ends.tolist(), *map(ends.astype, ("u1", "i2", "u8", "f4", "f8"))):
        barrier = search(other)
        assert barrier.index.tolist() == expected.index.tolist()
        assert (barrier.wait, barrier.time) == (expected.wait, expected.time)
