r"""What a run loses by its ranks: how long each holds the others up, how much slower it is, and the transfer.

Let ``T_r`` be the seconds of round r, ``w_ri`` those that rank i of n waited in it. What a rank needed for itself is
``o_ri = T_r - w_ri``: computing, waiting for its own data, and what its loop did between rounds. In the order of
``o_r``, the k fastest ranks wait from ``o_(k)`` to ``o_(k+1)`` for the n - k others, who share that wait equally:

    held_i = 1 / sum_r T_r  sum_r  sum_(k < place of i in r)  k (o_(k+1) - o_(k)) / ((n - k) (n - 1))

Summed over the ranks, times n - 1, that is all waiting for ranks there was. Where shares follow speed no rank waits,
and a slow rank still costs. With ``c_i`` its seconds per sample (a micro-batch's fixed cost counts as the samples it is
worth) and ``c`` those of the fast ranks, which is the lower quartile,

    lag_i = 1 - c / c_i,        cost_i = max(held_i, lag_i).

The first rounds pay for the start and are left out, as is a round whose waiting is not known, such as the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.records import Run

__all__ = ["WARM_UP", "Floats", "Losses", "fast"]

WARM_UP = 3
"""Rounds at the start of a file that pay for buffers, kernels and connections."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Losses:
    """The losses of a run. Arrays have one entry per rank, or (rounds, ranks)."""

    run: Run
    """The rounds that count."""
    own_s: Floats
    """(rounds, ranks): seconds in which the rank did not wait for others."""
    work: Floats
    """(rounds, ranks): samples, and what its micro-batches cost besides, in samples."""
    held: Floats
    """Share of the run for which the rank held the others up."""
    lag: Floats
    """Share of its own time by which the rank is slower than the fast ranks, per sample."""
    transfer: float
    """Share of the run for which all ranks wait: the last one to come waits for the transfer alone."""

    @property
    def cost(self) -> Floats:
        """What each rank costs: the larger of ``held`` and ``lag``."""
        return np.maximum(self.held, self.lag)

    @classmethod
    def of(cls, run: Run) -> Losses:
        """Return the losses of a run; zeros where no round counts."""
        run = run.take(_counting(run))
        own_s = np.clip(run.elapsed_s[:, None] - run.wait_s, 0.0, None)
        work = run.samples + run.fixed_samples * run.micro_batches
        total_s = float(run.elapsed_s.sum())
        if not total_s > 0:
            return cls(run, own_s, work, np.zeros(run.workers), np.zeros(run.workers), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            pace = own_s.sum(axis=0) / work.sum(axis=0)  # of a rank without samples: not finite
            lag = np.where(np.isfinite(pace), np.clip(1.0 - fast(pace) / pace, 0.0, 1.0), 0.0)
        transfer = float(np.clip(run.wait_s.min(axis=1), 0.0, None).sum() / total_s)
        return cls(run, own_s, work, _held_s(own_s) / total_s, np.nan_to_num(lag), transfer)


def fast(figures: Floats) -> float:
    """Return what the fast ranks have: the lower quartile, which for up to four ranks is the least. NaN: no figure."""
    finite = figures[np.isfinite(figures)]
    return float(np.quantile(finite, 0.25, method="lower")) if finite.size else math.nan


def _counting(run: Run) -> npt.NDArray[np.bool_]:
    known = np.isfinite(run.wait_s + run.compute_s + run.input_s).all(axis=1)
    known &= np.isfinite(run.elapsed_s) & (run.elapsed_s > 0)
    known[:WARM_UP] = False
    return known


def _held_s(own_s: Floats) -> Floats:
    """Charge each rank with the seconds that others wait for it, over all rounds."""
    rounds, n = own_s.shape
    order = np.argsort(own_s, axis=1)
    gaps = np.diff(np.take_along_axis(own_s, order, axis=1), axis=1)
    k = np.arange(1, n)
    charged = np.zeros((rounds, n))
    charged[:, 1:] = np.cumsum(gaps * k / ((n - k) * max(n - 1, 1)), axis=1)
    held_s = np.empty_like(charged)
    np.put_along_axis(held_s, order, charged, axis=1)
    return np.asarray(held_s.sum(axis=0))
