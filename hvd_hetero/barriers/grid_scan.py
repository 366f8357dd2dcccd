"""GridScan and FullGridScan: the paper's two baselines for the barrier search (elastic-bsp, section IV, Algorithm 1).

For a designated worker b and each of its ends e, every other worker gives its end nearest to e:

    Z(e) = { e } + { argmin_{x in row p} |x - e| : p != b },    d(e) = max Z(e) - min Z(e)

GridScan takes for b the worker with the earliest first end and returns the Z(e) of least d(e); FullGridScan lets every
worker in turn be b. The first of equals is taken throughout: the earlier of two ends equally near, the earlier e, the
lower b. Both are heuristics: the best window need not consist of the points nearest to one of its own. Hence
d(ZipLine) <= d(FullGridScan) <= d(GridScan).

Complexity: GridScan O(nR log R) time, O(nR) space; FullGridScan n times that time.

Differences from the paper
- The paper looks at all R ends of a worker to find the nearest, O(n R^2) and O(n^2 R^2).
- Algorithm 1 adds M_{p,min} to Z inside the loop over i, which would add every end seen on the way to the nearest; its
  text ("find a point from other rows with the shortest distance") has one per worker, as here.
- "Rotates the designated row in turn" leaves the start open; here it is worker 0.

Shapes: n workers, R predicted ends of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_hetero.barriers.zipline import Barrier, checked_ends


def grid_scan(ends: ArrayLike) -> Barrier:
    """Return the best window around an end of the worker that ends its first iteration first."""
    times = checked_ends(ends)
    return _scan(times, int(times[:, 0].argmin()))


def full_grid_scan(ends: ArrayLike) -> Barrier:
    """Return the best window around any end of any worker."""
    times = checked_ends(ends)
    # min() keeps the first of equals, as the strict comparison of Algorithm 1 does.
    return min((_scan(times, row) for row in range(len(times))), key=lambda barrier: barrier.wait)


def _scan(times: NDArray[Any], row: int) -> Barrier:
    """Run Algorithm 1 with worker ``row`` designated."""
    workers, lookahead = times.shape
    designated = times[row]
    # Both neighbours of a designated end e in row p follow from #{x in row p : x <= e}. Rows are sorted, so one binary
    # search of all ends says how many designated points lie before each, (n, R). To count these numbers per worker, and
    # sum up, gives that count for all (p, e).
    before = designated.searchsorted(times)
    before += np.arange(workers)[:, np.newaxis] * (lookahead + 1)
    counts = np.bincount(before.ravel(), minlength=workers * (lookahead + 1)).reshape(workers, lookahead + 1)
    reached = counts[:, :lookahead].cumsum(axis=1)  # (n, R): ends of p that are <= designated[j]

    earlier = np.maximum(reached - 1, 0)
    later = np.minimum(reached, lookahead - 1)
    earlier_time = np.take_along_axis(times, earlier, axis=1)
    later_time = np.take_along_axis(times, later, axis=1)
    take_later = np.abs(later_time - designated) < np.abs(earlier_time - designated)
    chosen = np.where(take_later, later_time, earlier_time)

    latest = chosen.max(axis=0)
    wait = latest - chosen.min(axis=0)
    best = int(wait.argmin())
    index = np.where(take_later[:, best], later[:, best], earlier[:, best])
    return Barrier(index, float(wait[best]), float(latest[best]))
