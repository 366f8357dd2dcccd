"""How the ranks share an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.balancer import Balancer
from hvd_hetero.rounds import RoundPlan


class EvaluationSpeeds:
    """The speeds by which an evaluation is divided, from figures that all ranks have in common.

    A rank evaluates as fast as in the last evaluation, times the change of its speed in training since then. Before the
    first evaluation the speeds in training count, and the shares of its next round while some rank's is not known.
    """

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        # Samples per second of each rank; 0: not known. In training, now and at the last evaluation, and in that one.
        self._now = self._then = self._evaluated = np.zeros(balancer.workers)

    def plan(self, samples: int) -> RoundPlan:
        """Return which rank evaluates how many samples: one at least, if there are enough."""
        latest, workers = self._balancer.finished, self._balancer.workers
        now = np.zeros(workers) if latest is None else latest.table.column("samples_per_s")
        self._now = now if (np.isfinite(now) & (now > 0.0)).all() else np.zeros(workers)
        speeds = self._evaluated if self._evaluated.any() else self._now
        if self._now.all() and self._then.all():
            speeds = self._evaluated * (self._now / self._then)
        if not speeds.any():
            speeds = self._balancer.plan().shares.astype(np.float64)
        return RoundPlan.of(proportional(speeds, samples, minimum=min(1, samples // workers)))

    def learn(self, plan: RoundPlan, seconds: Sequence[float]) -> None:
        """Learn from the seconds that the ranks took for their shares of this plan."""
        if min(seconds) > 0.0 and plan.shares.all():
            self._evaluated, self._then = plan.shares / np.array(seconds), self._now
