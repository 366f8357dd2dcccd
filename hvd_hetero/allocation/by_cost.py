"""Which rank gets which sample, if samples cost unequally and ranks are unequally fast.

n samples, sample s with cost c_s; k ranks, rank i with a share x_i of the work. With R_i the samples of rank i::

    minimise max_i F_i,    F_i = (sum_{s in R_i} c_s) / x_i,    |R_i| >= least where x_i > 0, R_i empty where x_i = 0

(scheduling on uniform machines, Q||C_max, NP-hard). No division is better than the bound
max(sum_s c_s / sum_i x_i, max_s c_s / max_i x_i).

1. Costliest first, each sample goes to the rank that lacks most of its part x_i / sum_j x_j of the whole cost. That is
   the rule of longest processing times (Graham 1969) by absolute deficits, so no key depends on the sample.
2. The samples of the latest rank and of one to three others are divided anew, the cheapest ones in the best of all
   ways, until the bound is reached within 1/256, nothing helps, or the tries are used up.

**Padding.** Where a batch is padded to its longest sample, F_i = (sum_{s in R_i} c_s + |R_i| max_{s in R_i} p_s) / x_i,
so samples of similar length belong together. Sorted by p, they are cut into runs, the longest for the largest share,
each as long as F_i <= F allows; bisection finds the least F. Then follows rule 2: runs are best only for many samples.

**Every rank decides alike**: by integers, whose sums are exact, and by single divisions, which all processors round
alike.

Cost: O(n log n + n log k), then at most `_WORK` / n tries of 1,024 sums; ``benchmarks/cost_division.py`` measures it.

Rejected: the differences of Karmarkar and Karp, which are for equal ranks. Arbitrary: the constants, within the time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, islice

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import FloatArray, IntArray

__all__ = ["cut", "divide", "divide_padded", "latest", "needed", "room"]

_NEAR = 1 + 2.0**-8  # costs are known to some per cent
_FREE = {2: 10, 3: 7, 4: 5}  # samples that so many ranks divide anew
_WORK, _TRIES, _LEVELS = 512, 24, 7


def divide(costs: ArrayLike, shares: ArrayLike, *, least: int = 1) -> IntArray:
    """Return the rank of each sample, so that the latest rank is as early as possible; nothing is padded.

    Args:
        costs: c, an integer >= 0 for each sample.
        shares: x, an integer >= 0 for each rank: its part of the work.
        least: Fewest samples of a rank with a positive share.

    Raises:
        ValueError: If samples or positive shares are too few, or costs too large.
        TypeError: If costs or shares are not integers.
    """
    work = _Work.of(costs, 0, shares, least)
    return work.able[work.improved(work.dealt())]


def divide_padded(costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, *, least: int = 1) -> IntArray:
    """Return the same where batches are padded; ``padded`` is p, an integer >= 0 for each sample."""
    work = _Work.of(costs, padded, shares, least)
    order, ranks = np.argsort(-work.p, kind="stable"), np.argsort(-work.x, kind="stable")
    sizes = _runs(work.c[order], work.p[order], work.x[ranks].tolist(), least)
    start = np.empty_like(order)
    start[order] = np.repeat(ranks, sizes)
    return work.able[work.improved(start)]


def latest(costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, ranks: ArrayLike) -> float:
    """Return max_i F_i of a division, to compare it with another; ``padded`` may be 0."""
    c, x = np.asarray(costs), np.maximum(shares, 1)
    return float(_Work(c, np.broadcast_to(padded, c.shape), x, 0, np.arange(x.size)).finish(np.asarray(ranks)).max())


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
    work = _Work.of(costs, padded, np.ones(count, dtype=np.int64), 1)
    return tuple(_runs(work.c, work.p, [1] * count, 1, None if room is None else np.asarray(room).tolist()))


def _runs(c: IntArray, p: IntArray, shares: Sequence[int], least: int, room: Sequence[int] | None = None) -> list[int]:
    """Return the sizes of runs of sorted samples, one for each share."""
    longest, before = [*p.tolist(), 0], [0, *accumulate(c.tolist())]
    alone = [0, *accumulate((c + p).tolist())]  # as if each sample were padded to itself
    n, k, whole = c.size, len(shares), sum(shares)

    def at(level: float) -> tuple[float, float, list[int]]:
        """Return max_i F_i, by how much the last run exceeds its part, and the sizes."""
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
        return (worst, excess, sizes) if stop <= most else (math.inf, max(cost, excess), sizes)

    low, high, level = 0.0, math.inf, alone[-1] / whole
    best = math.inf, math.inf, [0]
    for _ in range(_LEVELS):
        found = at(level)
        best = min(best, found)
        low, high = (level, high) if found[1] > 0 else (low, level)
        level = level + found[1] / whole if high == math.inf else (low + high) / 2
    return best[2] if best[0] < math.inf else at(math.inf)[2]


@dataclass(frozen=True, slots=True)
class _Work:
    """Samples to divide among ranks, by the letters above."""

    c: IntArray
    p: IntArray
    x: IntArray
    least: int
    able: IntArray
    """The ranks of the shares x, all of them positive."""

    @classmethod
    def of(cls, costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, least: int) -> _Work:
        """Return the checked work."""
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
        return cls(c if c.any() or p.any() else np.ones_like(c), p, x[able], least, able)

    def dealt(self) -> IntArray:
        """Return the ranks by rule 1; those with too few samples take the cheapest that others can spare."""
        k, total, unit = self.x.size, int(self.c.sum()), int(self.x.sum()) * self.x.size
        heap = [-x * total * k + i for i, x in enumerate(self.x.tolist())]  # minus the deficit; the rank as last digit
        heapq.heapify(heap)
        order, taken = np.argsort(-self.c, kind="stable"), []
        for cost in self.c[order].tolist():
            taken.append(heap[0] % k)
            heapq.heapreplace(heap, heap[0] + cost * unit)
        ranks = np.empty_like(order)
        ranks[order] = taken
        counts = np.bincount(ranks, minlength=k)
        while (counts < self.least).any():
            spare = np.flatnonzero(counts[ranks] > self.least)
            sample, rank = spare[self.c[spare].argmin()], counts.argmin()
            counts[ranks[sample]] -= 1
            counts[rank] += 1
            ranks[sample] = rank
        return ranks

    def finish(self, ranks: IntArray) -> FloatArray:
        """Return F."""
        load: FloatArray = np.bincount(ranks, weights=self.c, minlength=self.x.size).astype(np.float64)
        if self.p.any():
            longest = np.zeros(self.x.size)
            np.maximum.at(longest, ranks, self.p)
            load = load + np.bincount(ranks, minlength=self.x.size) * longest
        return np.asarray(load / self.x)

    def improved(self, ranks: IntArray) -> IntArray:
        """Return the ranks after rule 2."""
        each = self.c + self.p
        enough = max(int(each.sum()) / int(self.x.sum()), int(each.max()) / int(self.x.max())) * _NEAR
        tries = min(_TRIES, _WORK // ranks.size)
        while (finish := self.finish(ranks)).max() > enough:
            late = int(finish.argmax())
            others = [rank for rank in finish.argsort(kind="stable").tolist() if rank != late]
            groups = chain.from_iterable(combinations(others, size - 1) for size in _FREE)
            for group in islice(groups, tries):
                tries -= 1
                value, found = self.anew(np.array([late, *group]), ranks)
                if value < finish[late]:
                    ranks = found
                    break
            else:
                break
        return ranks

    def anew(self, group: IntArray, ranks: IntArray) -> tuple[float, IntArray]:
        """Return max_i F_i of a group whose cheapest samples are divided in the best way, and the ranks then."""
        g, place = group.size, np.full(self.x.size, -1)
        place[group] = np.arange(g)
        mine = np.flatnonzero(place[ranks] >= 0)
        mine = mine[np.argsort((self.c + self.p)[mine], kind="stable")]
        free, fixed = mine[: _FREE[g]], mine[_FREE[g] :]
        at, load, longest = place[ranks[fixed]], np.zeros_like(group), np.zeros_like(group)
        np.add.at(load, at, self.c[fixed])
        np.maximum.at(longest, at, self.p[fixed])
        count = _every_way(np.bincount(at, minlength=g), np.ones_like(free), np.add)
        sums = _every_way(load, self.c[free], np.add)
        if self.p.any():
            sums += count * _every_way(longest, self.p[free], np.maximum)
        value = (sums / self.x[group, None]).max(axis=0)
        value[(count < self.least).any(axis=0)] = math.inf
        way = int(value.argmin())
        found = ranks.copy()
        found[free] = group[way // g ** np.arange(free.size) % g]
        return float(value[way]), found


def _every_way(start: IntArray, values: IntArray, join: np.ufunc) -> IntArray:
    """Return, by rank and way, what ``start`` becomes when each value joins a rank: the one of digit j for value j."""
    g = start.size
    table = start[:, None]
    for value in values.tolist():
        table = join((value * np.eye(g, dtype=np.int64))[:, :, None], table[:, None, :]).reshape(g, -1)
    return table
