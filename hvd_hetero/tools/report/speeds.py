"""Measured speeds of the ranks.

Rank i does x samples in κ micro-batches in t seconds of work (computing, and waiting for its own data), each of which
costs as much as β samples besides. Its speed refers to a micro-batch of the typical size s, an equal share in
the first plan:

    speed = (x + β κ) / t · s / (s + β)

β comes from ``work``, 0 if it is not known.

The mean is over samples, which is the harmonic mean over rounds: a rank that is slow for a third of the time has lost
time, and a median would not show it.

Shapes: K rounds, n ranks.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.work import Work

Floats = npt.NDArray[np.float64]


def of_typical_size(run: Run, beta: Floats) -> Floats:
    """Return s / (s + β): the part of its samples in what a micro-batch of the typical size costs; (K, n)."""
    typical = float(run.plan[0].sum() / max(int(run.micro_batches[0].sum()), 1)) if len(run.plan) else 0.0
    return typical / (typical + beta) if typical > 0 else np.ones_like(beta)


def speeds(run: Run, done: Work) -> Floats:
    """Return the speed of each rank in each round, NaN if it was not measured; (K, n)."""
    beta = done.fixed_each
    samples = (done.samples + beta * run.micro_batches) * of_typical_size(run, beta)
    return np.where(done.known, samples / np.where(done.known, done.busy_s, 1.0), np.nan)


def mean_speed(speed: Floats) -> Floats:
    """Return each rank's harmonic mean over the rounds in which it is known; (n,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN is the right answer for a rank without figures
        return np.asarray(1.0 / np.nanmean(1.0 / speed, axis=0))
