"""Figures of all rounds and ranks, reduced to what a picture can show: blocks of rounds, quantiles over ranks.

A picture is some hundred points wide. So rounds are averaged in at most ``MOST_BLOCKS`` blocks of equal length. Of more
than ``MOST_LINES`` ranks, quantiles over the ranks are shown, and a heat map has at most ``MOST_ROWS`` rows: each row
stands for several ranks in a row of numbers, and shows the worst of them, because a mean would hide a single slow rank.

Shapes: K rounds, n ranks, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_BLOCKS = 160
MOST_LINES = 8
"""As many as there are colours that people can distinguish."""

MOST_ROWS = 100
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Curves:
    """One figure over time: a row for each rank, or for each of ``QUANTILES`` over the ranks; (rows, B)."""

    rows: Floats
    by_rank: bool

    @property
    def top(self) -> float:
        """The largest value that a scale should hold: a short peak may leave the picture."""
        known = self.rows[np.isfinite(self.rows)]
        if not known.size:
            return 0.0
        return float(min(known.max(), 1.5 * np.percentile(known, 98)))


@dataclass(frozen=True, slots=True)
class Heat:
    """One figure over time, for ranks in groups: the worst of each group; (rows, B)."""

    rows: Floats
    first_rank: tuple[int, ...]
    """The first rank of each row, and behind the last row the number of ranks."""


def starts(rounds: int) -> npt.NDArray[np.int64]:
    """Return where each block begins; (B,)."""
    return np.unique(np.linspace(0, rounds, min(rounds, MOST_BLOCKS), endpoint=False).astype(np.int64))


def block_means(values: Floats, begins: npt.NDArray[np.int64]) -> Floats:
    """Return the mean of the known values of each block, along the first axis; NaN if none is."""
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), begins, axis=0)
    count = np.add.reduceat(known.astype(np.float64), begins, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count)


def series(values: Floats, begins: npt.NDArray[np.int64]) -> Curves:
    """Return a figure (K, n) over time."""
    means = block_means(values, begins)
    if means.shape[1] <= MOST_LINES:
        return Curves(means.T, True)
    known = np.isfinite(means).any(axis=1)
    rows = np.full((len(QUANTILES), len(means)), np.nan)
    if known.any():
        rows[:, known] = np.nanquantile(means[known], QUANTILES, axis=1)
    return Curves(rows, False)


def heat(means: Floats) -> Heat:
    """Return block means (B, n) as a heat map, whose rows show the largest of their ranks; NaN is passed over."""
    workers = means.shape[1]
    first = np.unique(np.linspace(0, workers, min(workers, MOST_ROWS), endpoint=False).astype(np.int64))
    return Heat(np.fmax.reduceat(means.T, first, axis=0), (*first.tolist(), workers))
