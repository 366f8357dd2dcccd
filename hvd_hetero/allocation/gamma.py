"""Gamma, a device's computing time as a function of its batch (LB-BSP section 3.3), from a few measurements.

LB-BSP's observations on GPUs: below the saturation point x_s the time is almost constant, above it a line, and above
the out-of-memory point x_o a batch does not fit::

    Gamma(x) = m max(x, x_s) + b  for x <= x_o

The fit is robust to outliers, which a neighbour, a page fault or a warm-up made too long. Shapes: B distinct batch
sizes. The median of the repeats stands for each batch size. For every number j of smallest batches that could be the
flat part, j = 0 or 2 <= j <= B - 2,

1. the line is the Theil-Sen estimate on the other B - j points: m the median slope of all pairs, b the median of
   t - m x;
2. the flat level is the median of the j points, and x_s is where it meets the line, beyond the smallest batch and not
   beyond the largest;
3. the cost is the mean relative error |t - Gamma(x)| / t over all points, so no slow outlier weighs more than 1.

The j with the least Bayesian information criterion wins, 2 B log(cost) + parameters log(B), with 2 parameters for a
line (j = 0) and 4 for a bent one: a flat part must pay for itself. Cost O(B^3), for a profile of tens of batch sizes.

Differences from the paper
    The paper profiles offline and reads the four numbers off a plot; it has no outliers and no fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import FloatArray


@dataclass(frozen=True, slots=True)
class Gamma:
    """The computing time of one device."""

    slope_s: float
    """m, seconds per sample above saturation."""
    intercept_s: float
    """b, seconds besides the samples; may be negative."""
    saturation: float
    """x_s, samples below which a smaller batch saves nothing; need not be whole; 1 if no flat part was seen."""
    out_of_memory: int | None
    """x_o, most samples that are known to fit; None if nothing failed."""

    def seconds(self, batch: float) -> float:
        """Return the seconds of computing on `batch` samples: 0 for none, infinite above the out-of-memory point."""
        if not 0 <= batch < math.inf:
            raise ValueError(f"batch must be finite and >= 0, got {batch}; give the samples of one micro-batch")
        if batch == 0:
            return 0.0
        if self.out_of_memory is not None and batch > self.out_of_memory:
            return math.inf
        return self.slope_s * max(batch, self.saturation) + self.intercept_s


def fit_gamma(batch: ArrayLike, seconds: ArrayLike) -> Gamma:
    """Fit Gamma to measurements in any order, repeats welcome.

    Args:
        batch: Samples of each measurement, integers >= 1.
        seconds: Computing time of each, > 0; infinity for a batch that ran out of memory.

    Raises:
        ValueError: If fewer than 3 different batch sizes ran below the first that ran out of memory, if times do not
            rise with the batch, if every possible curve is zero or less at a measured size, or if a number is out of
            range.
        TypeError: If `batch` does not consist of integers.
    """
    t = checks.floats("seconds", seconds)
    x = checks.integers("batch", batch, t.size)
    if x.min() < 1:
        raise ValueError(f"batch[{x.argmin()}] must be at least 1, got {x.min()}; leave out measurements of no samples")
    if not (t > 0).all():
        worst = int(np.argmin(t > 0))
        raise ValueError(f"seconds[{worst}] must be positive, got {t[worst]}; leave out what was not measured")
    fits = np.isfinite(t)
    if not fits.all():
        fits &= x < x[~fits].min()  # a batch that ran although a smaller one failed was lucky
    sizes = np.unique(x[fits])
    if sizes.size < 3:
        raise ValueError(
            f"batch must hold at least 3 different sizes that ran, below the first that ran out of memory, got "
            f"{sizes.tolist()}; with two, an outlier looks like a slope: measure more, or smaller, batches"
        )
    times = np.array([np.median(t[fits & (x == size)]) for size in sizes])
    # The largest batch that ran below the smallest that did not: memory use is not extrapolated, since it need not be
    # linear. A batch beyond the cliff counts, because it ran.
    largest = int(sizes[-1])
    kept = _before_the_cliff(sizes, times)
    sizes, times = sizes[:kept], times[:kept]
    fitted = _fit(sizes.astype(np.float64), times)
    if fitted is None:
        raise ValueError(
            f"seconds must rise with batch along a curve that is positive at every measured size, got times over "
            f"batches {sizes[0]} to {sizes[-1]} whose best line is not: measure each size several times, or more sizes "
            f"near {sizes[0]}"
        )
    slope_s, intercept_s, knee = fitted
    if not slope_s > 0:
        raise ValueError(
            f"seconds must rise with batch, got a slope of {slope_s:g} s per sample over batches {sizes[0]} to "
            f"{sizes[-1]}; the device is not saturated yet: measure larger batches"
        )
    return Gamma(slope_s, intercept_s, max(1.0, knee), None if np.isfinite(t).all() else largest)


def _before_the_cliff(x: npt.NDArray[np.int64], t: FloatArray) -> int:
    """Return how many of the ascending sizes x lie on the curve: half of them, and six, at least."""
    # A batch that hardly fits leaves no room for the fast algorithms, which need memory of their own: on an H200 with a
    # tenth of its memory, a convolutional network took 63 ms for 3,780 images, 161 ms for 3,885, and ran out of memory
    # at 3,937 (benchmarks/results/gpu/curve.md).
    each = t / x
    # A cliff of one size would be an outlier. A device that was slow while the largest batches were measured shows a
    # cliff, too, so nothing else follows from one, and a batch beyond it still fits.
    for kept in range(max(6, x.size // 2), x.size - 1):
        # Half as long again as two batches of half the size: arbitrary, above what noise does to several.
        if (each[kept:] > 1.5 * np.interp(x[kept:] / 2, x[:kept], each[:kept])).all():
            return kept
    return int(x.size)


def _fit(x: FloatArray, t: FloatArray) -> tuple[float, float, float] | None:
    """Return slope, intercept and knee of the best positive split, or None; x ascending and distinct."""
    best, answer = math.inf, None
    # A flat part of one point would look like a slow first batch, the most frequent outlier. Considered instead of
    # trying every part: least squares (one outlier moves everything) and RANSAC (random).
    for flat in (0, *range(2, x.size - 1)):
        slope, intercept = _theil_sen(x[flat:], t[flat:])
        if flat and not slope > 0:
            continue
        knee = (float(np.median(t[:flat])) - intercept) / slope if flat else 0.0
        if knee > x[-1] or (flat and knee <= x[0]):
            continue
        predicted = slope * np.maximum(x, knee) + intercept
        # Noise can make an intercept so negative that the smallest batches would take no time. Considered: forcing
        # b >= 0 (a device may have b < 0 above a flat part), and raising the bad times (a made-up speed, where an
        # error says what to measure). Below the smallest measured size the line may reach zero: nothing is known there.
        if slope > 0 and not predicted.min() > 0:
            continue
        cost = float(np.mean(np.abs(t - predicted) / t))
        # 1e-9 is below what any clock resolves: perfect fits differ by rounding alone, and fewer parameters decide.
        criterion = 2 * x.size * math.log(max(cost, 1e-9)) + (4 if flat else 2) * math.log(x.size)
        if criterion < best:
            best, answer = criterion, (slope, intercept, knee)
    return answer


def _theil_sen(x: FloatArray, t: FloatArray) -> tuple[float, float]:
    """Return the median slope of all pairs, and the median intercept for that slope."""
    # It tolerates 29 % of outliers, and the medians just under half.
    i, j = np.triu_indices(x.size, 1)
    slope = float(np.median((t[j] - t[i]) / (x[j] - x[i])))
    return slope, float(np.median(t - slope * x))
