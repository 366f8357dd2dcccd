r"""Measured speeds, the ranks' forecasts, and scores.

Rank i does x samples in κ micro-batches in t seconds of work (computing, and waiting for its own data), each of which
costs as much as β samples besides. Its speed refers to a micro-batch of the typical size s, an equal share in
the first plan:

    speed = (x + β κ) / t · s / (s + β)

β comes from ``work``, 0 if it is not known. Forecasts (``docs/telemetry.md``) know only ``fixed_samples``, and are
judged by speeds with it.

The forecast in the line of round k is for round k + 1. Its error is |forecast / speed - 1|. The naive forecast is the
speed of round k; a forecast that is no better than that has earned nothing.

**Scores**, each from 0 to 1:

    against the best rank    mean speed over the largest mean speed of all ranks
    against its own best     mean speed over the 95th percentile of its speed: 1 for a rank that never changes

The mean is over samples, which is the harmonic mean over rounds: a rank that is slow for a third of the time has lost
time, and a median would not show it.

Shapes: K rounds, n ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.work import Work

__all__ = ["forecast_errors", "mean_speed", "median_of_rounds", "of_typical_size", "own_best", "speeds"]

Floats = npt.NDArray[np.float64]

_BEST = 95.0  # percentile: the very fastest round is an accident of the clock


def of_typical_size(run: Run, beta: Floats) -> Floats:
    """Return s / (s + β): the part of its samples in what a micro-batch of the typical size costs; (K, n)."""
    typical = float(run.plan[0].sum() / max(int(run.micro_batches[0].sum()), 1)) if len(run.plan) else 0.0
    return typical / (typical + beta) if typical > 0 else np.ones_like(beta)


def speeds(run: Run, done: Work, *, as_forecast: bool = False) -> Floats:
    """Return the speed of each rank in each round, NaN if it was not measured; (K, n)."""
    beta = np.where(run.fixed_samples > 0, run.fixed_samples, 0.0) if as_forecast else done.fixed_each
    samples = (done.samples + beta * run.micro_batches) * of_typical_size(run, beta)
    return np.where(done.known, samples / np.where(done.known, done.busy_s, 1.0), np.nan)


def forecast_errors(run: Run, speed: Floats, counts: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return each rank's median error, of its forecasts and of naive ones; (n,) each, NaN if nothing is known."""
    pairs = np.flatnonzero((np.diff(run.round) == 1) & counts[1:])
    measured = speed[pairs + 1]
    found = []
    for told in (run.samples_per_s[pairs], speed[pairs]):
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append(np.abs(np.where(told > 0, told, np.nan) / measured - 1.0))
    both = np.isfinite(found[0]) & np.isfinite(found[1])  # the same rounds, or the comparison is unfair
    forecast, naive = (median_of_rounds(np.where(both, errors, np.nan)) for errors in found)
    return forecast, naive


def mean_speed(speed: Floats) -> Floats:
    """Return each rank's harmonic mean over the rounds in which it is known; (n,)."""
    with _empty():
        return np.asarray(1.0 / np.nanmean(1.0 / speed, axis=0))


def own_best(speed: Floats) -> Floats:
    """Return each rank's best speed; (n,)."""
    with _empty():
        return np.asarray(np.nanpercentile(speed, _BEST, axis=0)) if len(speed) else np.full(speed.shape[1], np.nan)


def median_of_rounds(values: Floats) -> Floats:
    """Return each rank's median over the rounds; NaN if nothing is known; (n,)."""
    with _empty():
        return np.asarray(np.nanmedian(values, axis=0)) if len(values) else np.full(values.shape[1], np.nan)


@contextmanager
def _empty() -> Iterator[None]:
    """Silence warnings: NaN is the right answer for a rank without figures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
