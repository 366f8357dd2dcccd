"""`minimax`: the exact integer optimum of LB-BSP Eq. 3 with the linear constraints of Eq. 5 (`problem` states it).

Merge and sort the finishing times t_i(l_i + 1), t_i(l_i + 2), ... of all workers' units. Worker i's sequence never
falls, so the U - sum(l) smallest times are a legal split, and any other split contains a later one. With ::

    cap_i(T) = units that worker i finishes by T = clip(floor((T - c_i) / m_i), l_i, u_i),    N(T) = sum_i cap_i(T)

the last unit finishes at the level theta = min {T : N(T) >= U}. The optimum is max(theta, max_i t_i(l_i)): a worker
whose lower bound alone finishes later than theta decides.

Bisection on T finds theta: once the bracket holds at most 4 n unit times, these are written out and the right one is
selected. Cost O(n log(U / n)) for times of the same order; at most 63 halvings a grid for any times, and usually one
grid.

**Ties.** Units that cost nothing (slope zero) are dealt first, lower ranks first. Below theta there is no choice. Of
the units that finish exactly at theta, workers of smaller slope get theirs first, then lower ranks. Among all optimal
splits this is the one whose second latest worker is earliest, then whose third latest is, and so on. Any other split
moves a unit from a time at or before theta to one at or after it. A worker without its unit of theta finishes m_i
earlier, so the steepest workers should go without.

**Every rank gets the same bits.** Times become integers, rounded to nearest on a grid of 2^-60 of the latest time of an
even spread within the bounds; the rest is exact. A worker a million times slower than the others would use up 20 of the
60 bits. So each split bounds the next: units that finish later than its theta are out of reach. If leaving them out
makes the grid finer by 4 bits or more, the instance is solved again on the finer grid. Data on the grid (anything with
few binary digits) are solved exactly. Others are solved as if t_i(x_i) were off by at most x_i + 1 grid steps, each at
most 2^-54 of the largest of theta, b_i and t^m_i: 1e-13 of it at a thousand samples.

Differences from the paper
    The paper gives the relaxed problem to "existing mathematical toolboxes" (as `minimax_lp` does) and does not mention
    rounding and ties. Zero slopes, negative intercepts and common multiples are allowed here.

Rejected: a heap of next finishing times (exact too, but O(U log n) steps of Python); the level of the relaxed problem
by sorting its 2 n break points (in floats, so it needs a repair in integers afterwards); a twin in Python's integers
for few workers, which takes 0.04 ms instead of 0.22 for two of them: no more than 2 rounds of 100 ask for a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero.allocation.problem import Allocation, Problem, problem
from hvd_hetero.checks import FloatArray, IntArray

_TIME_BITS = 60  # a product and two constants of this size add up to less than 2^62
_WORTH_BITS = 4  # arbitrary: most clusters need fewer, and 56 bits are finer than any measured time
_WRITTEN_OUT = 4  # unit times per worker; from 1 to 16 it makes no measurable difference


def minimax(
    slope: ArrayLike,
    intercept: ArrayLike,
    comm: ArrayLike,
    total: SupportsIndex,
    lower: ArrayLike,
    upper: ArrayLike,
    multiple_of: SupportsIndex = 1,
) -> Allocation:
    """Return the integer split of `total` whose latest worker is as early as possible, identical on every rank.

    Args:
        slope: m, seconds per sample, >= 0; one per worker, which sets the number of workers.
        intercept: b, seconds of a batch besides its samples; one for all or one per worker.
        comm: t^m, predicted seconds of communication, >= 0; one for all or one per worker.
        total: X, the samples to divide.
        lower: x^s, the least samples (below the saturation point a smaller batch saves nothing); one or per worker.
        upper: x^o, the most samples (that fit in memory); one or per worker. Use `total` where there is no bound.
        multiple_of: Divisor of every share; `total` must be a multiple, bounds are tightened to the next one.

    Returns:
        The shares, when each worker finishes, and `bound_s`, which is the optimum itself.

    Raises:
        ValueError: If no split keeps the bounds (it names the rank, the bounds and X), or a number is not finite.
        TypeError: If `total`, `lower`, `upper` or `multiple_of` does not consist of integers.
    """
    instance = problem(slope, intercept, comm, total, lower, upper, multiple_of)
    units = split(instance)
    finish_s = instance.finish_s(units)
    return Allocation(units * instance.step, finish_s, float(finish_s.max()))


def split(p: Problem) -> IntArray:
    """Return the units of each worker, of an instance that is known to be feasible."""
    units, most = _deal_flat(p)
    return _fill(p, units, most) if p.units > int(units.sum()) else units


def _deal_flat(p: Problem) -> tuple[IntArray, IntArray]:
    """Return the bounds after workers of slope zero have taken all they can and are fixed there."""
    flat = p.slope_s == 0
    room = np.where(flat, p.upper - p.lower, 0)
    left = p.units - int(p.lower.sum())
    lower = p.lower + np.clip(left - (np.cumsum(room) - room), 0, room)
    return lower, np.where(flat, lower, p.upper)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """The instance with times in integers: worker i finishes x units at constant_i + slope_i x grid steps."""

    slope: IntArray  # >= 1
    constant: IntArray
    lower: IntArray
    upper: IntArray
    latest: int  # time by which all workers together have finished enough
    shift: int  # a second is 2^shift grid steps

    @classmethod
    def of(cls, p: Problem, lower: IntArray, upper: IntArray) -> _Grid:
        room = upper - lower
        # Spread slightly more than all units, in proportion to each worker's room. The margins exceed the rounding.
        spread = (p.units - int(lower.sum())) / int(room.sum()) * (1 + 2.0**-40)
        enough = lower + np.minimum(room, (room * spread).astype(np.int64) + 2)
        # A worker without a choice would only coarsen the grid.
        slope_s, intercept_s, comm_s = (np.where(room > 0, a, 0.0) for a in (p.slope_s, p.intercept_s, p.comm_s))
        with np.errstate(over="ignore"):
            longest_s = max(float(a.max()) for a in (slope_s * (enough * p.step), np.abs(intercept_s), comm_s))
        if longest_s == np.inf:
            raise ValueError(f"slope times samples must be a finite number of seconds, got slope {slope_s.max():g}")
        shift = _TIME_BITS - int(np.frexp(longest_s)[1])

        def steps(seconds: FloatArray) -> IntArray:
            return np.rint(np.ldexp(seconds, shift)).astype(np.int64)

        slope = np.maximum(steps(slope_s), 1) * p.step
        constant = steps(intercept_s) + steps(comm_s)
        return cls(slope, constant, lower, upper, int((constant + slope * enough).max()), shift)

    def finished_by(self, time: int) -> IntArray:
        """Return cap(T), the units with which each worker finishes by `time`, or its least."""
        cap: IntArray = np.minimum(np.maximum((time - self.constant) // self.slope, self.lower), self.upper)
        return cap


def _fill(p: Problem, lower: IntArray, upper: IntArray) -> IntArray:
    """Return the split of all units within these bounds, on a grid as fine as the answer needs."""
    grid = _Grid.of(p, lower, upper)
    while True:
        units = _split(grid, p.units)
        finer = _Grid.of(p, lower, _within_reach(p, lower, upper, units))
        if finer.shift < grid.shift + _WORTH_BITS:
            return units
        grid = finer


def _within_reach(p: Problem, lower: IntArray, upper: IntArray, units: IntArray) -> IntArray:
    """Return upper bounds without units that finish later than the last dealt of `units`, a legal split.

    This works in floats, by single operations that every processor rounds correctly, so ranks agree.
    """
    free = upper > lower
    spare_s = p.finish_s(units)[units > lower].max() - p.finish_s(lower)[free]
    with np.errstate(over="ignore"):  # an infinity serves as any other number above the bound
        room = np.floor(spare_s * (1 + 2.0**-40) / (p.slope_s[free] * p.step))
    reach = lower.copy()
    reach[free] += np.clip(room, (units - lower)[free], (upper - lower)[free]).astype(np.int64)
    return reach


def _split(grid: _Grid, units: int) -> IntArray:
    """Return the split of `units` by level and ties."""
    level = _level(grid, units)
    shares = grid.finished_by(level - 1)
    at_level = np.flatnonzero(grid.finished_by(level) - shares)  # one unit each, since no slope is zero
    by_slope = at_level[np.argsort(grid.slope[at_level], kind="stable")]
    shares[by_slope[: units - int(shares.sum())]] += 1
    return shares


def _level(grid: _Grid, units: int) -> int:
    """Return theta, the earliest time by which `units` are finished; `units` exceeds the sum of the lower bounds."""
    early, late = int((grid.constant + grid.slope * grid.lower).min()), grid.latest
    before, after = grid.finished_by(early), grid.finished_by(late)
    while int((after - before).sum()) > _WRITTEN_OUT * before.size:
        middle = (early + late) // 2
        cap = grid.finished_by(middle)
        if int(cap.sum()) < units:
            early, before = middle, cap
        else:
            late, after = middle, cap
    count = after - before
    rank = np.repeat(np.arange(count.size), count)
    nth = np.arange(1, rank.size + 1) - np.repeat(np.cumsum(count) - count, count)
    times = grid.constant[rank] + grid.slope[rank] * (before[rank] + nth)
    missing = units - int(before.sum())
    return int(np.partition(times, missing - 1)[missing - 1])
