"""`minimax`: the exact integer optimum of LB-BSP Eq. 3 with the linear constraints of Eq. 5 (`problem` states it).

Merge and sort the finishing times t_i(l_i + 1), t_i(l_i + 2), ... of all workers' units. Worker i's sequence never
falls, so the U - sum(l) smallest times are a legal split, and any other split contains a later one. With ::

    cap_i(T) = units that worker i finishes by T = clip(floor((T - c_i) / m_i), l_i, u_i),    N(T) = sum_i cap_i(T)

the last unit finishes at the level theta = min {T : N(T) >= U}. The optimum is max(theta, max_i t_i(l_i)): a worker
whose lower bound alone finishes later than theta decides.

Bisection on T finds theta, down to two neighbouring floats. Cost O(n) for each of some 60 halvings; more, up to a few
thousand, only if workers are many orders of magnitude apart.

**Every rank gets the same bits**, because all operations are single ones that every processor rounds correctly. Times
with few binary digits are solved exactly, others to some units in the last place of theta, b_i and t^m_i.

Differences from the paper
    The paper gives the relaxed problem to "existing mathematical toolboxes" (as `minimax_lp` does) and does not mention
    rounding and ties. Zero slopes, negative intercepts and common multiples are allowed here.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero.allocation.problem import Allocation, Problem, problem
from hvd_hetero.checks import FloatArray, IntArray


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
    # Units that cost nothing are dealt first, lower ranks first.
    flat = p.slope_s == 0
    lower = _dealt(p.units, p.lower, np.where(flat, p.upper, p.lower))
    upper = np.where(flat, lower, p.upper)
    room = upper - lower
    left = p.units - int(lower.sum())
    if left == 0:
        return lower
    # An even spread within the bounds is later than the best split. The margin of a unit exceeds the rounding.
    enough = lower + np.minimum(room, np.ceil(room * (left / int(room.sum()))).astype(np.int64) + 1)
    free = room > 0
    early, late = float(p.finish_s(lower)[free].min()), float(p.finish_s(enough)[free].max())
    unit_s, constant_s = np.where(free, p.slope_s * p.step, 1.0), p.intercept_s + p.comm_s

    def finished_by(time_s: float, slack_s: FloatArray | float = 0.0) -> IntArray:
        """Return cap(T), the units with which each worker finishes by then, or its least."""
        with np.errstate(over="ignore"):
            caps = np.floor((time_s - constant_s + slack_s) / unit_s)
        clipped: IntArray = np.minimum(np.maximum(caps, lower), upper).astype(np.int64)
        return clipped

    # Considered: a heap of next finishing times (exact too, but O(U log n) steps of Python); the level of the relaxed
    # problem by sorting its 2 n break points (it needs a repair in integers afterwards); times as integers on grids of
    # 2^-60 of the latest one, refined where workers are far apart (as good, in twice the code).
    while early < (middle := early / 2 + late / 2) < late:
        if int(finished_by(middle).sum()) < p.units:
            early = middle
        else:
            late = middle
    # What rounding may do to one worker's times; nobody is blurred by another one's. Times within are equal.
    slack_s = 2.0 * np.finfo(np.float64).eps * (abs(late) + np.abs(p.intercept_s) + p.comm_s)
    before, after = finished_by(early, -slack_s), finished_by(late, slack_s)
    # Below theta there is no choice. Of the units that finish exactly at theta, workers of smaller slope get theirs
    # first, then lower ranks. Of all optimal splits this is the one whose second latest worker is earliest, then whose
    # third latest is, and so on. A worker without its unit of theta finishes m_i earlier, so the steepest workers
    # should go without.
    by_slope = np.argsort(p.slope_s, kind="stable")
    units = np.empty_like(before)
    units[by_slope] = _dealt(p.units, before[by_slope], after[by_slope])
    return units


def _dealt(units: int, lower: IntArray, upper: IntArray) -> IntArray:
    """Return ``lower`` raised to ``upper``, one worker after the other, until ``units`` are dealt."""
    room = upper - lower
    dealt: IntArray = lower + np.clip(units - int(lower.sum()) - (np.cumsum(room) - room), 0, room)
    return dealt
