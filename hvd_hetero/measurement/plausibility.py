"""Which of the speeds that ranks tell of themselves are believed.

With v_i the speed that rank i predicts for itself and m_i = samples / (computing + input) what the table says that it
really did (both of a micro-batch of the typical size, where the fixed cost is known),

    s_i <- max(s_i, min(m_i, m_i of the round before))        the fastest that it has kept up for two rounds
    v_i is believed  iff  0 < v_i < ∞  and  v_i <= K s_i

and what is not believed is no speed (NaN): to policies such a rank is one without a prediction, and keeps its share.
Two rounds, as one alone may be a clock that has jumped; a rank that really becomes much faster is believed a round
later. Short rounds, at the end of an epoch, do not count: they tell more of the fixed cost than of the speed. K = 4 is
arbitrary, between what a predictor may foresee and what no machine does. There is no bound below: a rank that was
frozen is slow, and its predictor's affair.

All ranks decide alike, from the same table by correctly rounded operations. What was kept up is not saved: a training
that goes on from a checkpoint has no bound above until it has measured three rounds, as a new one.
"""

from __future__ import annotations

import logging
import math

from hvd_hetero.rounds import RoundTable

__all__ = ["Plausibility"]

logger = logging.getLogger(__name__)

_TIMES = 4.0  # K
_ROUNDS = 3  # measured ones before there is a bound: the first one pays for what no later one pays for


class Plausibility:
    """The memory of one planner. ``logs``: log which speeds are not believed, and until when."""

    __slots__ = ("_bounds", "_doubted", "_known", "_latest", "_logs", "_measured", "_typical_size")

    def __init__(self, workers: int, typical_size: float, *, logs: bool = True) -> None:
        self._typical_size = typical_size
        self._logs = logs
        self._bounds = [math.inf] * workers  # K s, once there is one
        self._latest = [0.0] * workers  # m
        self._measured = [0] * workers
        self._known = [False] * workers
        self._doubted: set[int] = set()

    def __call__(self, round: int, table: RoundTable, *, short: bool = False) -> RoundTable:
        """The table of a round with incredible speeds taken out; the very same, where there are none."""
        if not short:
            self._measure(table)
        told = table.figures("samples_per_s")
        credible = True
        for rank, (v, bound) in enumerate(zip(told, self._bounds, strict=True)):
            if 0.0 < v <= bound and v != math.inf:
                self._known[rank] = True
                if self._doubted and rank in self._doubted:
                    self._believe(round, rank)
            elif self._known[rank] or not math.isnan(v):  # NaN is what a rank says before its first measurement
                credible = False
                self._doubt(round, rank, v)
        if credible:
            return table
        return table.replaced("samples_per_s", [math.nan if r in self._doubted else v for r, v in enumerate(told)])

    def _measure(self, table: RoundTable) -> None:
        names = ("samples", "micro_batches", "compute_s", "input_s", "fixed_samples")
        figures = zip(*(table.figures(name) for name in names), strict=True)
        for rank, (samples, micro_batches, compute_s, input_s, fixed) in enumerate(figures):
            busy_s = compute_s + input_s
            if samples and 0.0 < busy_s < math.inf:
                now, before = samples / busy_s, self._latest[rank]
                if fixed:
                    now *= (1.0 + micro_batches * fixed / samples) / (1.0 + fixed / self._typical_size)
                self._latest[rank] = now
                kept_up = _TIMES * (now if now < before else before)
                count = self._measured[rank] = self._measured[rank] + 1
                if count == _ROUNDS or (count > _ROUNDS and kept_up > self._bounds[rank]):
                    self._bounds[rank] = kept_up

    def _doubt(self, round: int, rank: int, v: float) -> None:
        if rank not in self._doubted:
            self._doubted.add(rank)
            if self._logs:
                cannot_be = "which is no speed"
                if 0.0 < v < math.inf:  # beyond a bound, as it is not believed
                    cannot_be = f"more than {_TIMES:g} times the {self._bounds[rank] / _TIMES:.4g} that it has kept up"
                logger.warning(
                    "round %d: rank %d says that it will do %g samples/s, %s; it keeps its share until it says "
                    "something credible", round, rank, v, cannot_be,
                )  # fmt: skip

    def _believe(self, round: int, rank: int) -> None:
        self._doubted.discard(rank)
        if self._logs:
            logger.warning("round %d: what rank %d says of its speed is credible again", round, rank)
