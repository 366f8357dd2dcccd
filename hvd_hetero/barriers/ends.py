"""Predicted end times of every worker's next R iterations, from its recent ones (elastic-bsp, sections II and III).

Model: the cluster is stable for a short while, so every future interval of worker p equals the typical recent one, a_p:

    e_r^p = e_0^p + r a_p,    r = 1 ... R,    a_p = median of the recent intervals of p

Cost: O(nK + nR) for K recent intervals.

Differences from the paper
- The paper says "based on their most recent intervals" and leaves the statistic open. The median is used: one hiccup
  would otherwise shift all R ends of a worker by up to R / K of it. Considered: the mean (right for a sum of
  independent intervals, but not for the one-off pauses that real ranks have), the last interval alone (noisy; pass a
  single column to have it). The median selects a value, or takes the mean of two; it never sums in an open order, so it
  gives the same bits on every processor.

Shapes: n workers, K recent intervals, R = lookahead.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray


def predict_ends(interval_s: ArrayLike, lookahead: SupportsIndex, last_end_s: ArrayLike = 0.0) -> NDArray[np.float64]:
    """Return the (n, R) matrix of predicted ends.

    ``interval_s`` is (n,) for one interval per worker, such as a predictor's, or (n, K) for recent ones, with NaN for a
    missing measurement. ``last_end_s`` is when each worker's last iteration ended; right after a barrier one number
    serves for all.
    """
    try:
        ahead = operator.index(lookahead)
    except TypeError:
        raise TypeError(
            f"lookahead must be an integer, got {lookahead!r}; it is the number of ends per worker"
        ) from None
    if ahead < 1:
        raise ValueError(f"lookahead must be at least 1, got {ahead}; it is the number of ends to predict per worker")
    recent = np.asarray(interval_s, dtype=np.float64)
    if recent.ndim == 1:
        recent = recent[:, np.newaxis]
    if recent.ndim != 2 or recent.size == 0:
        raise ValueError(f"interval_s must be (workers,) or (workers, recent) and not empty, got shape {recent.shape}")
    measured = ~np.isnan(recent)
    unmeasured = np.flatnonzero(~measured.any(axis=1))
    if unmeasured.size:
        raise ValueError(
            f"interval_s must hold a measurement of every worker, got only NaN for worker {unmeasured[0]}; "
            "end the round when all are done until each worker has been measured once"
        )
    wrong = measured & ~((recent > 0) & np.isfinite(recent))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"interval_s must be positive and finite, got {recent[row, column]} at worker {row}, position {column}; "
            "mark what was not measured by NaN"
        )
    start = np.asarray(last_end_s, dtype=np.float64)
    if start.shape not in ((), recent.shape[:1]) or not np.isfinite(start).all():
        raise ValueError(
            f"last_end_s must be one finite number, or one for each of the {len(recent)} workers, got {last_end_s!r}"
        )
    typical = np.nanmedian(recent, axis=1)[:, np.newaxis]
    return start.reshape(-1, 1) + typical * np.arange(1, ahead + 1)
