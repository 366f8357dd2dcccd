"""Shares in proportion to speeds: the optimum of LB-BSP Eq. 3 if time is proportional to the batch.

n workers, v_i samples per second, X samples, l_i the least share of worker i. Real-valued problem::

    minimise max_i x_i / v_i    subject to    sum_i x_i = X,  x_i >= l_i

Without the bounds the solution is x_i = X v_i / sum_j v_j (LB-BSP section 3.2: Eq. 3 with Gamma(x) = x / v). With them
it is a water level, x_i = max(l_i, tau v_i), where tau makes the sum X. A worker that the level leaves below its bound
is set to the bound, and the rest is divided again among the others. Fixing a worker at more than its share only lowers
tau, so no worker is ever released. There are at most n passes, usually one or two.

Integers come from the largest remainder. Every free worker gets floor(tau v_i). The missing units (fewer than there are
free workers) go one each to the largest fractional parts, ties to the lower rank. The floor of a real share above an
integer bound is not below that bound, so the bounds hold. Every share is within one unit of tau v_i.

**Every rank gets the same bits.** Speeds become integers first, by a power of two that gives the fastest 30 bits.
Speeds that are integers of up to 30 bits lose nothing; others move the real-valued shares by less than n X / 2^29.

Cost: O(n) a pass.

Differences from the paper
    The paper divides real numbers and does not say how it rounds; it has no bounds and no multiples.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import FloatArray, IntArray

# Arbitrary: 20 are finer than any measured speed, and with more than 30 fewer units could be divided in int64.
_WEIGHT_BITS = 30


def quantise(speeds: FloatArray) -> IntArray:
    """Return non-negative finite speeds as integers in the same proportion, the largest of 30 bits (or all zero)."""
    # The scaling and the floor are exact, so all processors agree. A worker 2^30 times slower than the fastest gets 0.
    _, exponent = np.frexp(speeds.max())
    return np.floor(np.ldexp(speeds, _WEIGHT_BITS - int(exponent))).astype(np.int64)


def proportional(
    speeds: ArrayLike, total: SupportsIndex, minimum: ArrayLike = 1, multiple_of: SupportsIndex = 1
) -> IntArray:
    """Return integers in proportion to `speeds` that sum to `total`, identical on ranks that hold the same speeds.

    Args:
        speeds: Samples per second of each worker, or any other weights, finite and >= 0. A worker of speed zero gets
            its minimum.
        total: Samples to divide.
        minimum: Least share, one for all or one per worker; 0 is allowed. It is rounded up to `multiple_of`.
        multiple_of: Divisor of every share; `total` must be a multiple, too.

    Returns:
        One share per worker, int64, shape (n,).

    Raises:
        ValueError: If a speed is negative, NaN or infinite, if there are no speeds, if all are zero and the minimum
            does not use up `total`, or if `total` is below the sum of the minimum or not a multiple.
        TypeError: If `total`, `minimum` or `multiple_of` does not consist of integers.
    """
    v = checks.finite("speeds", speeds, least=0, remedy="plan a rank without a measurement by its last share")
    step = checks.integer("multiple_of", multiple_of, least=1)
    units = checks.total_in_units(checks.integer("total", total, least=0), step)
    lower = -(-checks.integers("minimum", minimum, v.size) // step)
    needed = _sum(lower)
    if units < needed:
        raise ValueError(
            f"total must be at least the sum of minimum over the {v.size} workers, which is {needed * step}"
            f"{f' in multiples of {step}' if step > 1 else ''}, got total={units * step}; "
            f"raise total, lower minimum (0 is allowed), or use fewer workers"
        )
    if not v.any() and units > needed:
        raise ValueError(
            f"speeds must have a positive sum, since total={units * step} is more than the minimum of all workers "
            f"({needed * step}), got {v.size} zeros; keep the last plan, or give equal speeds"
        )
    return _divide(quantise(v), units, lower) * step


def _sum(counts: IntArray) -> int:
    """Return the sum; in Python's integers, which take ten times as long, if int64 could overflow."""
    return int(counts.sum()) if counts.size * int(counts.max(initial=0)) < 2**63 else sum(counts.tolist())


def _divide(weights: IntArray, units: int, lower: IntArray) -> IntArray:
    """Divide `units` in proportion to `weights`, at least `lower`, by the two rules at the top of this file."""
    # With more units, weight x units could overflow int64. Python's integers (object) are slower and cannot.
    exact = np.int64 if units < 2 ** (63 - _WEIGHT_BITS) else object
    shares = lower.copy()
    free = np.flatnonzero(weights)  # ranks, always ascending
    if not free.size:
        return shares
    left = units if free.size == lower.size else units - _sum(np.delete(lower, free))
    while True:
        weight = weights[free].astype(exact)
        whole = weight.sum()
        floor = weight * left // whole
        below = floor < lower[free]
        if not below.any():
            break
        # Never all of them: their real shares sum to `left`, which is at least the sum of their bounds.
        left -= _sum(lower[free[below]])
        free = free[~below]
    missing = left - int(floor.sum())
    if missing:
        # Considered: rounding each share and repairing the sum, which depends on the order of ranks; and giving a unit
        # to the worker that would finish earliest with it, as `minimax` does. That may move a share more than one unit
        # from the real-valued one, and LB-BSP changes batches in every round, where small changes are worth more.
        # A worker without a remainder gets no unit, because more workers have one than units are missing.
        remainder = weight * left - floor * whole
        # Selection instead of sorting, in O(n).
        threshold = np.partition(remainder, free.size - missing)[free.size - missing]
        above = remainder > threshold
        ties = np.flatnonzero(remainder == threshold)[: missing - np.count_nonzero(above)]
        floor[above] += 1
        floor[ties] += 1
    shares[free] = floor.astype(np.int64)
    return shares
