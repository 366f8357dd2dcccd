"""Which rank gets which sample, if samples cost unequally and ranks are unequally fast.

n samples, sample s with cost c_s; k ranks, rank i with a share x_i of the work. With R_i the samples of rank i::

    minimise max_i F_i,    F_i = (sum_{s in R_i} c_s) / x_i,    |R_i| >= least where x_i > 0, R_i empty where x_i = 0

(scheduling on uniform machines, Q||C_max, NP-hard). No division is better than the bound
max(sum_s c_s / sum_i x_i, max_s c_s / max_i x_i).

Costliest first, each sample goes to the rank that lacks most of its part x_i / sum_j x_j of the whole cost. That is the
rule of longest processing times (Graham 1969) by absolute deficits, so no key depends on the sample.

**Padding.** Where a batch is padded to its longest sample, F_i = (sum_{s in R_i} c_s + |R_i| max_{s in R_i} p_s) / x_i,
so samples of similar length belong together. Sorted by p, then c, they are cut into runs, each as long as F_i <= F
allows; bisection finds the least F. The longest run is for the largest share. Where time allows, other orders of the
ranks are tried, because one sample more costs a run of few long samples much.

**Every rank decides alike**: by integers, whose sums are exact, and by single divisions, which all processors round
alike.

Cost: O(n log n + n log k); ``benchmarks/cost_division.py`` measures it.

Rejected: the differences of Karmarkar and Karp, which are for equal ranks. Dividing the cheapest samples of the latest
rank and of one or two others anew, in the best of all ways: rounds of 16 samples on 2 ranks, or 30 on 4, were 0.4 and
0.6 % shorter, and those of 64 on 4 ranks 0.1 %, where costs are known to some per cent.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import IntArray

_TURNS, _LEVELS = 512, 7  # samples times orders of the ranks that are tried, and steps of the bisection (arbitrary)


def divide(costs: ArrayLike, shares: ArrayLike, *, least: int = 1) -> IntArray:
    """Return the rank of each sample, so that the latest rank is about as early as possible; nothing is padded.

    Args:
        costs: c, an integer >= 0 for each sample.
        shares: x, an integer >= 0 for each rank: its part of the work.
        least: Fewest samples of a rank with a positive share.

    Raises:
        ValueError: If samples or positive shares are too few, or costs too large.
        TypeError: If costs or shares are not integers.
    """
    c, _, x, able = _checked(costs, 0, shares, least)
    k = x.size
    total, unit = int(c.sum()), int(x.sum()) * k
    heap = [-share * total * k + i for i, share in enumerate(x.tolist())]  # minus the deficit; the rank as last digit
    heapq.heapify(heap)
    order, taken = np.argsort(-c, kind="stable"), []
    for cost in c[order].tolist():
        taken.append(heap[0] % k)
        heapq.heapreplace(heap, heap[0] + cost * unit)
    ranks = np.empty_like(order)
    ranks[order] = taken
    counts = np.bincount(ranks, minlength=k)
    while (counts < least).any():  # these take the cheapest samples that others can spare
        spare = np.flatnonzero(counts[ranks] > least)
        sample, rank = spare[c[spare].argmin()], counts.argmin()
        counts[[ranks[sample], rank]] += [-1, 1]
        ranks[sample] = rank
    return able[ranks]


def divide_padded(costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, *, least: int = 1) -> IntArray:
    """Return the same where batches are padded; ``padded`` is p, an integer >= 0 for each sample."""
    c, p, x, able = _checked(costs, padded, shares, least)
    order, by_share = np.lexsort((-c, -p)), np.argsort(-x, kind="stable")
    turns = (np.roll(way, turn) for turn in range(x.size) for way in (by_share, by_share[::-1]))
    found = [
        (*_runs(c[order], p[order], x[turn].tolist(), least), turn)
        for turn in islice(turns, max(1, _TURNS // order.size))
    ]
    _, sizes, turn = min(found, key=itemgetter(0))
    ranks = np.empty_like(order)
    ranks[order] = np.repeat(turn, sizes)
    return able[ranks]


def latest(costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, ranks: ArrayLike) -> float:
    """Return max_i F_i of a division, to compare it with another; ``padded`` may be 0."""
    x, at = np.maximum(shares, 1), np.asarray(ranks)
    longest = np.zeros(x.size)
    np.maximum.at(longest, at, padded)
    load = np.bincount(at, weights=np.asarray(costs), minlength=x.size)
    return float(((load + np.bincount(at, minlength=x.size) * longest) / x).max())


def room(lengths: ArrayLike, largest: float) -> IntArray:
    """Return the most samples m >= 1 of a micro-batch by its longest sample: m times its length <= ``largest``."""
    of = np.asarray(lengths, dtype=np.float64)
    return np.maximum(largest / np.maximum(of, largest / max(of.size, 1)), 1).astype(np.int64)


def needed(room: ArrayLike) -> int:
    """Return the fewest micro-batches of samples with this room, sorted, longest first."""
    most, start, count = np.asarray(room).tolist(), 0, 0
    while start < len(most):
        start, count = start + most[start], count + 1
    return count


def cut(costs: ArrayLike, padded: ArrayLike, count: int, room: ArrayLike | None = None) -> tuple[int, ...]:
    """Return the sizes of ``count`` micro-batches of nearly equal cost, none empty, for samples sorted longest first.

    With ``room``, micro-batches keep to it if ``count`` is at least `needed`.
    """
    c, p, _, _ = _checked(costs, padded, np.ones(count, dtype=np.int64), 1)
    return tuple(_runs(c, p, [1] * count, 1, None if room is None else np.asarray(room).tolist())[1])


def _runs(
    c: IntArray, p: IntArray, shares: Sequence[int], least: int, room: Sequence[int] | None = None
) -> tuple[float, list[int]]:
    """Return max_i F_i and the sizes of runs of sorted samples, one for each share."""
    longest, before = [*p.tolist(), 0], [0, *accumulate(c.tolist())]
    alone = [0, *accumulate((c + p).tolist())]  # as if each sample were padded to itself
    n, k, whole = c.size, len(shares), sum(shares)

    def at(level: float) -> tuple[float, list[int], float]:
        """Return max_i F_i, the sizes, and by how much the last run exceeds its part."""
        start, worst, excess, sizes = 0, 0.0, 0.0, []
        for after, share in zip(range(k - 1, -1, -1), shares, strict=True):
            most, stop = n if room is None else start + room[start], n
            if after:
                first, fits = start + least, level * share
                stop = min(bisect_right(alone, fits + alone[start]) - 1, n - least * after, most)
                while stop > first and before[stop] - before[start] + (stop - start) * longest[start] > fits:
                    stop -= 1
                stop = max(stop, first)
            cost = before[stop] - before[start] + (stop - start) * longest[start]
            worst, excess = max(worst, cost / share), cost - level * share
            sizes.append(stop - start)
            start = stop
        return (worst, sizes, excess) if stop <= most else (math.inf, sizes, max(cost, excess))

    low, high, level = 0.0, math.inf, alone[-1] / whole
    best: tuple[float, list[int]] = math.inf, []
    for _ in range(_LEVELS):
        worst, sizes, excess = at(level)
        best = min(best, (worst, sizes))
        low, high = (level, high) if excess > 0 else (low, level)
        level = level + excess / whole if high == math.inf else (low + high) / 2
    return best if best[1] else at(math.inf)[:2]


def _checked(
    costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, least: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return costs, padding, the positive shares, and the ranks that have them."""
    n = np.size(costs)
    c, p = checks.integers("costs", costs, n), checks.integers("padded", padded, n)
    x = checks.integers("shares", shares, np.size(shares))
    able = np.flatnonzero(x)
    if not 0 < max(least, 1) * able.size <= n:
        raise ValueError(
            f"shares must be positive on at least one rank, and samples enough for {least} on each such rank, got "
            f"{n} samples and {able.size} positive shares; raise the global batch"
        )
    if n * (int(c.max()) + int(p.max())) >= 2**53:  # below, floats hold every sum
        raise ValueError(
            f"costs and padding must be below 2**53 / {n} for {n} samples, got {c.max()} and {p.max()}; count "
            "in larger units"
        )
    return (c if c.any() or p.any() else np.ones_like(c)), p, x[able], able
