"""Which rank gets which sample, if samples cost unequally and ranks are unequally fast.

n samples, sample s with cost c_s; k ranks, rank i with a share x_i of the work. With R_i the samples of rank i::

    minimise max_i F_i,    F_i = (sum_{s in R_i} c_s) / x_i,    |R_i| >= least where x_i > 0, R_i empty where x_i = 0

(scheduling on uniform machines, Q||C_max, NP-hard). No division is better than the bound
max(sum_s c_s / sum_i x_i, max_s c_s / max_i x_i).

1. Costliest first, each sample goes to the rank that lacks most of its part x_i / sum_j x_j of the whole cost. That is
   the rule of longest processing times (Graham 1969) by absolute deficits, so no key depends on the sample.
2. The samples of the latest rank and of one or two others are divided anew, the cheapest ones in the best of all
   ways, until the bound is nearly reached, nothing helps, or the tries are used up.
3. If the bound is not reached, as with few samples, rule 2 is tried from another start: the runs below.

**Padding.** Where a batch is padded to its longest sample, F_i = (sum_{s in R_i} c_s + |R_i| max_{s in R_i} p_s) / x_i,
so samples of similar length belong together. Sorted by p, then c, they are cut into runs, each as long as F_i <= F
allows; bisection finds the least F. The longest run is for the largest share. Rule 2 follows.

Cost: O(n log n + n log k), and the tries of rule 2; ``benchmarks/cost_division.py`` measures it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, combinations, islice
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import FloatArray, IntArray

# How many samples are free in a group of two or of three ranks: 1,024 or 6,561 ways to divide them.
_FREE = {2: 10, 3: 8}
# Tries of rule 2, orders of the ranks and bisections. All are arbitrary, and keep the time within that of the table in
# benchmarks/cost_division.py; the first two fall with the number of samples, whose division alone takes longer then.
_TRIES, _TRIES_TIMES_SAMPLES, _ORDERS_TIMES_SAMPLES, _BISECTIONS = 12, 160, 512, 7


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
    # Considered: the differences of Karmarkar and Karp, which are for equally fast ranks.
    return work.best(work.dealt, work.runs)


def divide_padded(costs: ArrayLike, padded: ArrayLike, shares: ArrayLike, *, least: int = 1) -> IntArray:
    """Return the same where batches are padded; ``padded`` is p, an integer >= 0 for each sample."""
    work = _Work.of(costs, padded, shares, least)
    return work.best(work.runs)


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
    return tuple(_runs(work.c, work.p, [1] * count, 1, None if room is None else np.asarray(room).tolist())[1])


def _runs(
    c: IntArray, p: IntArray, shares: Sequence[int], least: int, room: Sequence[int] | None = None
) -> tuple[float, list[int]]:
    """Return max_i F_i and the sizes of runs of sorted samples, one for each share."""
    longest, before = [*p.tolist(), 0], [0, *accumulate(c.tolist())]
    alone = [0, *accumulate((c + p).tolist())]  # as if each sample were padded to itself
    n, k, whole = c.size, len(shares), sum(shares)

    def runs_at(level: float) -> tuple[float, list[int], float]:
        """Return max_i F_i, the sizes, and by how much the last run, which takes all that is left, exceeds its part."""
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
        # Where the last run has more samples than its room, only a higher level helps, at which others take more. So
        # the excess must be positive, whatever the last run costs.
        return (worst, sizes, excess) if stop <= most else (math.inf, sizes, max(cost, excess))

    low, high, level = 0.0, math.inf, alone[-1] / whole
    best: tuple[float, list[int]] = math.inf, []
    for _ in range(_BISECTIONS):
        worst, sizes, excess = runs_at(level)
        best = min(best, (worst, sizes))
        low, high = (level, high) if excess > 0 else (low, level)
        # Bisection needs both ends. Until some level is enough, the excess is divided among all runs.
        level = level + excess / whole if high == math.inf else (low + high) / 2
    return best if best[1] else runs_at(math.inf)[:2]


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
        # Below, floats hold every sum exactly. Single divisions follow, which all processors round alike, so that all
        # ranks divide alike.
        if n * (int(c.max()) + int(p.max())) >= 2**53:
            raise ValueError(
                f"costs and padding must be below 2**53 / {n} for {n} samples, got {c.max()} and {p.max()}; count "
                "in larger units"
            )
        return cls(c if c.any() or p.any() else np.ones_like(c), p, x[able], least, able)

    def dealt(self) -> IntArray:
        """Return the ranks by rule 1; those with too few samples take the cheapest that others can spare."""
        k, each = self.x.size, self.c + self.p
        total, unit = int(each.sum()), int(self.x.sum()) * k
        # Minus the deficit, with the rank as last digit: ties go to the lower rank, and all keys are integers.
        heap = [-x * total * k + i for i, x in enumerate(self.x.tolist())]
        heapq.heapify(heap)
        order, taken = np.argsort(-each, kind="stable"), []
        for cost in each[order].tolist():
            taken.append(heap[0] % k)
            heapq.heapreplace(heap, heap[0] + cost * unit)
        ranks = np.empty_like(order)
        ranks[order] = taken
        counts = np.bincount(ranks, minlength=k)
        while (counts < self.least).any():
            spare = np.flatnonzero(counts[ranks] > self.least)
            sample, rank = spare[each[spare].argmin()], counts.argmin()
            counts[[ranks[sample], rank]] += [-1, 1]
            ranks[sample] = rank
        return ranks

    def runs(self) -> IntArray:
        """Return the ranks if each has a run of sorted samples, in the best of some orders of the ranks."""
        order, ranks = np.lexsort((-self.c, -self.p)), np.argsort(-self.x, kind="stable")
        # Other orders than by share, too, as far as time allows: one sample more costs a run of few long samples much.
        turns = (np.roll(way, turn) for turn in range(ranks.size) for way in (ranks, ranks[::-1]))
        c, p = self.c[order], self.p[order]
        found = [
            (*_runs(c, p, self.x[turn].tolist(), self.least), turn)
            for turn in islice(turns, max(1, _ORDERS_TIMES_SAMPLES // order.size))
        ]
        _, sizes, ranks = min(found, key=itemgetter(0))
        start = np.empty_like(order)
        start[order] = np.repeat(ranks, sizes)
        return start

    def best(self, *starts: Callable[[], IntArray]) -> IntArray:
        """Return the ranks by the best start."""
        each = self.c + self.p
        # Within 1/256 of the bound: costs are known to some per cent, so a better division would not be faster.
        enough = max(int(each.sum()) / int(self.x.sum()), int(each.max()) / int(self.x.max())) * (1 + 2.0**-8)
        tries = min(_TRIES, _TRIES_TIMES_SAMPLES // each.size)
        found = []
        for start in starts if tries else starts[:1]:
            found.append(self.improved(start(), enough, tries))
            if found[-1][0] <= enough:
                break
        return self.able[min(found, key=itemgetter(0))[1]]

    def finish(self, ranks: IntArray) -> FloatArray:
        """Return each rank's finish time: the cost of its samples, padding included, over its share."""
        load = np.bincount(ranks, weights=self.c, minlength=self.x.size).astype(np.float64)
        if self.p.any():
            longest = np.zeros(self.x.size)
            np.maximum.at(longest, ranks, self.p)
            load = load + np.bincount(ranks, minlength=self.x.size) * longest
        return np.asarray(load / self.x)

    def improved(self, ranks: IntArray, enough: float, tries: int) -> tuple[float, IntArray]:
        """Return max_i F_i and the ranks after rule 2."""
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
        return float(finish.max()), ranks

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
        count = _numbers(g, free.size) + np.bincount(at, minlength=g)[:, None]
        sums = _every_way(load, self.c[free], np.add)
        if self.p.any():
            sums += count * _every_way(longest, self.p[free], np.maximum)
        value = (sums / self.x[group, None]).max(axis=0)
        value[(count < self.least).any(axis=0)] = math.inf
        way = int(value.argmin())
        found = ranks.copy()
        # Digit j of the way is the place in the group of the rank that gets free sample j.
        found[free] = group[way // g ** np.arange(free.size) % g]
        return float(value[way]), found


def _every_way(start: IntArray, values: IntArray, join: np.ufunc) -> IntArray:
    """Return, by rank and way, what ``start`` becomes when each value joins a rank.

    g ranks divide m values in g^m ways. A way's number has m digits in base g: digit j is the rank of value j.
    """
    table, g = start[:, None], start.size
    for alone in values[:, None, None, None] * np.eye(g, dtype=np.int64)[:, :, None]:
        table = join(alone, table[:, None, :]).reshape(g, -1)
    return table


@cache
def _numbers(ranks: int, samples: int) -> IntArray:
    """Return the number of samples, by rank and way."""
    return _every_way(np.zeros(ranks, dtype=np.int64), np.ones(samples, dtype=np.int64), np.add)
