"""A policy that leaves nothing as it was: for trainings of either framework."""

from __future__ import annotations

import numpy as np

from hvd_hetero.policies import Policy
from hvd_hetero.rounds import FinishedRound, RoundPlan


class EveryRoundAnother(Policy):
    """Splits that change every round, and now and then a rank without data; in up to ``most`` micro-batches.

    In the first ``idle`` rounds the last rank has all.
    """

    name = "every-round-another"

    def __init__(self, most: int, idle: int = 0) -> None:
        self.most = most
        self.idle = idle
        self.round = 0

    @property
    def accumulates(self) -> bool:
        return self.most > 1

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        return self._plan(workers, global_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.round += 1
        return self._plan(plan.workers, plan.total)

    def _plan(self, workers: int, total: int) -> RoundPlan:
        rng = np.random.default_rng(self.round)
        cuts = np.sort(rng.integers(0, total + 1, workers - 1)) * (self.round >= self.idle)
        samples = np.diff(cuts, prepend=0, append=total)
        return RoundPlan(
            tuple(int(x) for x in samples),
            tuple(int(rng.integers(1, min(x, self.most) + 1)) if x else 0 for x in samples),
        )
