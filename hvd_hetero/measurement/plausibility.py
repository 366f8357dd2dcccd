"""Which of the speeds that ranks report are believed.

Rank i predicts the speed v_i for itself, and by the table it had the speed m_i = samples / (computing + input). Both
are of a micro-batch of the typical size, if the fixed cost is known.

    s_i <- max(s_i, min(m_i, m_i of the round before))        the fastest that it has kept up for two rounds
    v_i is believed  iff  0 < v_i < ∞  and  v_i <= K s_i

and a speed that is not believed is replaced by NaN: to policies such a rank has no prediction, and keeps its share.
There is no bound below: a frozen rank is slow, and its predictor follows. The bound is not saved: a training that
continues from a checkpoint has none until it has measured three rounds, as a new one.

Cost: some 20 operations on arrays of n.
"""

from __future__ import annotations

import logging
import math
import sys

import numpy as np

from hvd_hetero.rounds import RoundTable

logger = logging.getLogger(__name__)

# K, arbitrary between what a predictor may foresee and what no machine does.
_BELIEVED_PER_KEPT_UP = 4.0
# The first round pays for the start; two more show a speed that was kept up.
_ROUNDS_BEFORE_BOUND = 3


class Plausibility:
    """The memory of one planner. ``logs``: log which speeds are not believed, and until when."""

    __slots__ = ("_bounds", "_doubted", "_known", "_latest", "_logs", "_measured", "_typical_size", "_young")

    def __init__(self, workers: int, typical_size: float, *, logs: bool = True) -> None:
        self._typical_size = typical_size
        self._logs = logs
        self._bounds = np.full(workers, sys.float_info.max)  # K s, once there is one
        self._latest = np.zeros(workers)  # m
        self._measured = np.zeros(workers, dtype=np.int64)  # rounds, counted while a rank is young
        self._young = True  # whether a rank has no bound yet
        self._known = np.zeros(workers, dtype=np.bool_)  # has been believed before
        self._doubted = np.zeros(workers, dtype=np.bool_)

    def __call__(self, round: int, table: RoundTable, *, short: bool = False) -> RoundTable:
        """Return the table of a round without incredible speeds; the very same, if there are none."""
        # Short rounds, at the end of an epoch, show more of the fixed cost than of the speed.
        if not short:
            self._measure(table)
        reported = table.column("samples_per_s")
        credible = (reported > 0.0) & (reported <= self._bounds)
        if np.count_nonzero(credible) == len(reported) and not np.count_nonzero(self._doubted):
            self._known = credible
            return table
        # NaN is the speed of a rank before its first measurement.
        doubtful = ~credible & (self._known | ~np.isnan(reported))
        before, self._doubted = self._doubted, (self._doubted & ~credible) | doubtful
        self._known |= credible
        if self._logs:
            for rank in np.flatnonzero(before & ~self._doubted).tolist():
                logger.warning("round %d: rank %d forecasts a credible speed again", round, rank)
            for rank in np.flatnonzero(self._doubted & ~before).tolist():
                self._say(round, rank, float(reported[rank]))
        if not doubtful.any():
            return table
        return table.replaced("samples_per_s", np.where(self._doubted, math.nan, reported))

    def _measure(self, table: RoundTable) -> None:
        work, busy_s, fixed = table.work, table.busy_s, table.column("fixed_samples")
        if np.count_nonzero(fixed):
            work = (work + table.column("micro_batches") * fixed) / (1.0 + fixed / self._typical_size)
        # Times travel as float32. Of smaller ones, speeds could overflow.
        measured = (work > 0.0) & (busy_s > np.finfo(np.float32).tiny) & (busy_s < math.inf)
        now = np.divide(work, busy_s, out=self._latest.copy(), where=measured)
        # Of two rounds, because one alone may be a clock that has jumped; a rank that does become much faster is
        # believed a round later.
        kept_up = _BELIEVED_PER_KEPT_UP * np.minimum(now, self._latest)
        self._latest = now
        if self._young:
            self._measured += measured
            self._young = int(self._measured.min()) < _ROUNDS_BEFORE_BOUND
            np.copyto(self._bounds, 0.0, where=measured & (self._measured == _ROUNDS_BEFORE_BOUND))
            measured &= self._measured >= _ROUNDS_BEFORE_BOUND
        np.maximum(self._bounds, kept_up, out=self._bounds, where=measured)

    def _say(self, round: int, rank: int, v: float) -> None:
        cannot_be = "which is no speed"
        if 0.0 < v < math.inf:  # beyond a bound, as it is not believed
            kept_up = self._bounds[rank] / _BELIEVED_PER_KEPT_UP
            cannot_be = f"more than {_BELIEVED_PER_KEPT_UP:g} times the {kept_up:.4g} that it has kept up"
        logger.warning(
            "round %d: rank %d forecasts %g samples/s, %s; it keeps its share until its forecast is credible",
            round, rank, v, cannot_be,
        )  # fmt: skip
