"""Shares for devices that saturate: find out their curves in the first rounds, then the exact minimax of Eq. 3.

**The ladder.** To learn Γ every rank must see batches of many sizes; the round keeps its X samples. In step q of Q

    x_i ∝ 1 + A cos(2π (q / Q + i / n)),    A = 0.9,

whose sum over the n >= 2 ranks is the same in every step, since the cosines cancel: each rank climbs from a tenth to
almost twice its equal share and down again, each at another moment. A rank that runs out of memory on the way up says
so in the table, and from then on its micro-batches keep to what fits.

**The split.** With c_i Γ_i(x) = m_i x + b_i above x^s_i (``allocation.Gamma``) and t^m the predicted seconds of
communication, minimise max_i Γ_i(x_i) + t^m subject to sum x_i = X and x^s_i <= x_i <= x^o_i (lb-bsp, Eq. 3 and 5),
exactly (``allocation.minimax``). Where the bounds leave no room they yield: lower bounds shrink together when they sum
to more than X (then the batch is too small for these devices, and nobody saturates), and upper bounds fall away when
they sum to less (then shares are done in several micro-batches, which memory does allow).

Differences from the paper: it profiles each type of device offline and by itself. There communication differs between
workers, each with its own link to the server; an allreduce ends for all at once, so t^m is one number, which moves the
predicted end of the round and not the split.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import minimax, proportional
from hvd_hetero.rounds import RoundTable

__all__ = ["LADDER_STEPS", "ladder", "shares_by_gamma"]

LADDER_STEPS = 16  # the sizes of one turn; nine of them different with two ranks, each seen twice or once
_SWING = 0.9


def ladder(workers: int, total: int, step: int, minimum: int, multiple_of: int) -> npt.NDArray[np.int64]:
    """The shares of one step of the ladder."""
    if workers == 1:
        return np.array([total], dtype=np.int64)
    # Quantised before they are divided: two libraries' cosines may differ in the last bit.
    weights = [
        round(1024 * (1 + _SWING * math.cos(2 * math.pi * (step / LADDER_STEPS + i / workers)))) for i in range(workers)
    ]
    return proportional(weights, total, minimum=minimum, multiple_of=multiple_of)


def shares_by_gamma(
    table: RoundTable, comm_s: float, total: int, minimum: int, multiple_of: int
) -> npt.NDArray[np.int64]:
    """The best split by the curves in the table. Raises ValueError where they cannot be those of real devices."""
    slope_s, intercept_s = table.column("slope_s"), table.column("intercept_s")
    workers = table.workers
    step = multiple_of
    least = -(-minimum // step) * step
    lower = np.maximum(-(-table.column("saturation").astype(np.int64) // step) * step, least)
    if lower.sum() > total:
        lower = np.maximum(lower * total // int(lower.sum()) // step * step, least)
    if lower.sum() > total:  # the floor of a minimum each does not fit beside the others' saturation
        lower = np.full(workers, least)
    limit = table.column("limit").astype(np.int64) // step * step
    upper = np.where(limit > 0, np.maximum(limit, lower), total)
    if upper.sum() < total:
        upper = np.full(workers, total)
    return minimax(slope_s, intercept_s, np.full(workers, comm_s), total, lower, upper, step).shares
