"""The exact minimax of Eq. 3 over devices that saturate and run out of memory, by the curves in the table.

Let c_i Γ_i(x) = m_i max(x, x^s_i) + b_i (``allocation.Gamma``), t^m the predicted seconds of communication, and ℓ_i the
largest micro-batch that fits. A share x takes k = ⌈x / ℓ_i⌉ micro-batches, and

    T_i(x) = k c_i Γ_i(x / k) + t^m  =  m_i x + k b_i + t^m    where x >= k x^s_i.

Minimise max_i T_i(x_i) subject to sum x_i = X and x_i >= x^s_i (lb-bsp, Eq. 3 and 5), in two stages. Bisect the level T
for the k_i that reach X samples by then; solve the linear problem that is left exactly (``allocation.minimax``). If the
x^s_i sum to more than X they shrink together: then the batch is too small for these devices, and no device saturates.
Cost: as ``minimax``, and 52 passes over the ranks if memory bounds a micro-batch.

Differences from the paper: there x^o bounds the share; here it bounds the micro-batch, since a fast device with little
memory may well do two batches while a slow one does one (b_i once more is the price, and it is weighed). There
communication differs between workers, each with its own link to the server; an allreduce ends for all at once, so t^m
is one number. It moves the predicted end of the round, and so what is worth a change of the split, but not the split.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.water_filling import minimax
from hvd_hetero.bounds import bounds_array
from hvd_hetero.rounds import RoundPlan, RoundTable

# How far a rank's share moves from the equal one on the ladder (``policies.device_shares``), relative to it.
LADDER_SWING = 0.9

Shares = npt.NDArray[np.int64]


def shares_by_gamma(
    table: RoundTable, plan: RoundPlan, comm_s: float, minimum: int = 1, multiple_of: int = 1
) -> Shares:
    """Return the best split by the curves in the table; no share exceeds twice what ``plan`` or the ladder has.

    Raises ValueError if no real devices can have such curves.
    """
    total, step = plan.total, multiple_of
    fits = _fits(table, total)
    saturation = np.minimum(np.ceil(table.column("saturation")).astype(np.int64), fits)
    # The bend lies within the sample below.
    lower = _lower(saturation - 1, total, minimum, step)
    # No share is more than twice what its rank has been seen with: beyond, the line may not continue.
    seen = np.maximum(np.asarray(plan.samples), math.ceil((1 + LADDER_SWING) * total / plan.workers))
    most = np.maximum(np.minimum(2 * seen, total), lower)
    # Where not even saturation fits, a micro-batch takes the same time whatever is in it.
    flat = fits < table.column("saturation")
    slope_s, intercept_s = table.column("slope_s"), table.column("intercept_s")
    intercept_s = np.where(flat, intercept_s + slope_s * table.column("saturation"), intercept_s)
    slope_s = np.where(flat, 0.0, slope_s)
    # By noise b may be negative; then a second micro-batch must not look like a gain of time.
    again_s = np.maximum(intercept_s, 0.0)
    counts = np.ones(plan.workers, dtype=np.int64)
    if (fits < most).any():
        device = _Devices(slope_s, intercept_s - again_s, again_s, saturation, fits)
        counts = device.micro_batches(total, lower, most, step)
        kept_busy = np.where(counts > 1, np.maximum(lower, counts * saturation // step * step), lower)
        lower = kept_busy if kept_busy.sum() <= total else lower
    upper = np.maximum(np.minimum(counts * fits // step * step, most), lower)
    intercept_s = intercept_s + (counts - 1) * again_s
    return minimax(slope_s, intercept_s, np.full(plan.workers, comm_s), total, lower, upper, step).shares


def shares_seconds(table: RoundTable, shares: Shares) -> npt.NDArray[np.float64]:
    """Return T_i(x_i) without communication, by the curves in the table."""
    fits = _fits(table, int(shares.sum()))
    counts = -(-shares // fits)
    each = np.maximum(shares / np.maximum(counts, 1), table.column("saturation"))
    seconds: npt.NDArray[np.float64] = counts * (table.column("slope_s") * each + table.column("intercept_s"))
    return seconds


def _fits(table: RoundTable, total: int) -> Shares:
    """Return ℓ: the largest micro-batches."""
    return np.minimum(bounds_array(table.column("limit"), table.workers), total)


def _lower(saturation: Shares, total: int, minimum: int, step: int) -> Shares:
    """Return the saturation in whole steps; less if the round does not hold as much."""
    least = -(-minimum // step) * step
    lower = np.maximum(-(-saturation // step) * step, least)
    if lower.sum() > total:
        lower = np.maximum(lower * total // int(lower.sum()) // step * step, least)
    if lower.sum() > total:  # the minimum does not fit beside what the others saturate with
        lower = np.full(len(saturation), least)
    return lower


@dataclass(frozen=True, slots=True, eq=False)
class _Devices:
    """The time of a share: ``head_s`` once, and for each micro-batch ``again_s`` and the time of its samples."""

    slope_s: npt.NDArray[np.float64]
    head_s: npt.NDArray[np.float64]
    again_s: npt.NDArray[np.float64]
    saturation: Shares
    fits: Shares

    def micro_batches(self, total: int, lower: Shares, most: Shares, step: int) -> Shares:
        """Return k_i by bisecting the level; all operations are correctly rounded, so all ranks find the same."""
        full_s = self.slope_s * self.fits + self.again_s
        early, late = 0.0, float((self.head_s + full_s * (-(-most // self.fits) + 1)).max())
        # As many halvings as a float has bits.
        for _ in range(sys.float_info.mant_dig - 1):
            middle = (early + late) / 2
            if int(self._reached(middle, lower, most, step).sum()) < total:
                early = middle
            else:
                late = middle
        counts: Shares = np.maximum(-(-self._reached(late, lower, most, step) // self.fits), 1)
        return counts

    def _reached(self, level_s: float, lower: Shares, most: Shares, step: int) -> Shares:
        """Return the samples that each device has done by then, within the bounds."""
        left_s = np.maximum(level_s - self.head_s, 0.0)
        whole = np.minimum(np.floor(left_s / (self.slope_s * self.fits + self.again_s)), most)
        # One more that is not full, if there is time for all of them, equally large, above saturation.
        one_more = left_s >= (whole + 1) * (self.slope_s * self.saturation + self.again_s)
        rest_s = left_s - whole * (self.slope_s * self.fits + self.again_s) - self.again_s
        part = np.divide(rest_s, self.slope_s, out=np.zeros_like(rest_s), where=one_more & (self.slope_s > 0))
        samples = whole * self.fits + np.clip(np.floor(part), 0, self.fits)
        done: Shares = np.clip(samples.astype(np.int64) // step * step, lower, most)
        return done


def relaxed_seconds(table: RoundTable, total: int) -> float:
    """Return a time that no split can beat: Eq. 3 over the reals, every device saturated, no bounds."""
    slope_s, intercept_s = table.figures("slope_s"), table.figures("intercept_s")
    if not all(0.0 < m < math.inf for m in slope_s):
        return -math.inf
    # Plain floats: these operations in this order round alike on every processor.
    inverse = [1.0 / m for m in slope_s]
    return float((total + sum(b * v for b, v in zip(intercept_s, inverse, strict=True))) / sum(inverse))
