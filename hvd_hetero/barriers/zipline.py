"""ZipLine, the barrier with the least waiting (elastic-bsp, section IV, Algorithm 2).

Objective: pick one end e^p of every worker p such that d_Z = max Z - min Z is smallest; the earliest of equals.

Sort all nR ends into one timeline x_0 <= x_1 <= ... (equal times in the order of the workers) and work with slots
instead of times. next(j) is the slot of the next end of the worker whose end is at slot j; first(p) is the slot of
the first end of p. The shortest stretch of the timeline that starts at slot j and holds every worker ends at

    c(j) = max( max_p first(p), max_{i < j} next(i) )

because each worker's first end at or after j is either its very first, or follows an end before j. So

    c(0) = max_p first(p),    c(j + 1) = max(c(j), next(j)),    d* = min_j x_{c(j)} - x_j

as long as every worker still has an end, j <= min_p last(p). c is one running maximum. The answer is the first j that
attains d*; each worker then takes its last end up to slot c(j). c never falls, so this is the first window at which
Algorithm 2 finds d*, and the set it holds there.

Complexity: O(nR log nR) time, for the sort, O(nR) space; the paper's is O(R n^2).

Differences from the paper
- Algorithm 2 keeps the set Z and scans it to drop a worker's old end, O(n) per step. Here no set is kept.
- Algorithm 2 leaves open how equal times sort. Here by worker, then by iteration.

Shapes: n workers, R predicted ends of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """A barrier: one chosen end per worker, the paper's set Z.

    ``wait`` and ``time`` are in the unit of the ends.
    """

    index: NDArray[np.intp]
    """Chosen column of each worker, (n,): worker p does ``index[p] + 1`` iterations before the barrier."""
    wait: float
    """Time that the fastest worker waits, d_Z = max Z - min Z."""
    time: float
    """Time of the barrier, max Z."""


def checked_ends(ends: ArrayLike) -> NDArray[Any]:
    """Return the ends as an (n, R) array of int64 or float64, each row strictly increasing and finite.

    Integers stay integers: ranks that must agree on a barrier can pass quantised times, such as whole microseconds, so
    that no two processors round differently.
    """
    array = np.asarray(ends)
    if array.dtype.kind not in "iuf" or array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"ends must be a matrix of numbers (workers, R) with at least one worker and one end, got shape "
            f"{array.shape} of {array.dtype}; the row of a worker that needs 2 s for each iteration is 2, 4, 6 … 2 R"
        )
    if array.max() > np.iinfo(np.int64).max and array.dtype.kind == "u":
        raise ValueError(f"ends must be below 2**63, got {array.max()}; count from a later instant, or in larger units")
    array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)
    ascending = np.isfinite(array).all(axis=1) & (array[:, 1:] > array[:, :-1]).all(axis=1)
    if not ascending.all():
        row = int(ascending.argmin())
        raise ValueError(
            f"ends of one worker must be finite and strictly increasing, got {array[row].tolist()} at worker {row}; "
            "leave out a worker that has no prediction"
        )
    return array


def zipline(ends: ArrayLike) -> Barrier:
    """Return the barrier of least waiting over the (n, R) predicted ends, the earliest of equals."""
    times = checked_ends(ends)
    # Stable, so that equal times sort by worker on every rank. Considered: a heap of the workers' current ends,
    # O(nR log n) too, but with one Python operation per end.
    order = times.argsort(axis=None, kind="stable")
    timeline = times.ravel()[order]
    slot = np.empty(times.shape, dtype=np.intp)
    slot.ravel()[order] = np.arange(times.size)  # ravel of a fresh array is a view

    # Beyond, some worker has no end left.
    lefts = slot[:, -1].min() + 1
    cover = np.empty(times.size, dtype=np.intp)
    cover[0] = slot[:, 0].max()
    # next(j), stored at j + 1. The slot after a worker's last end stays unset, and is never below `lefts`.
    cover[slot[:, :-1] + 1] = slot[:, 1:]
    cover = np.maximum.accumulate(cover[:lefts])

    left = (timeline[cover] - timeline[:lefts]).argmin()
    right = cover[left]
    index = np.count_nonzero(slot <= right, axis=1) - 1
    return Barrier(index, float(timeline[right] - timeline[left]), float(timeline[right]))
