"""An oracle: the split that a person would set by hand, tuned by training at it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hvd_hetero.allocation import proportional
from hvd_hetero.policies import Policy
from hvd_hetero.rounds import FinishedRound, RoundPlan

PASSES, PASS, LEFT_OUT = 4, 12, 3  # passes, rounds of one, and first rounds whose times do not count


class ByHand(Policy):
    """A split that is tuned in passes of rounds, and kept from then on."""

    name = "by-hand"
    shares_alone = True
    max_micro_batch = None

    def __init__(self) -> None:
        self._times: list[Sequence[float]] = []
        self.passes = 0

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal parts."""
        return RoundPlan.of(list(proportional([1.0] * workers, global_batch)))

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the same split, or at the end of a pass the one that its times ask for."""
        if self.passes == PASSES:
            return plan
        self._times.append(finished.table.busy_s)
        if len(self._times) < PASS:
            return plan
        seconds = [statistics.median(of) for of in zip(*self._times[LEFT_OUT:], strict=True)]
        self._times.clear()
        self.passes += 1
        speeds = [round(x / t, 1) for x, t in zip(plan.samples, seconds, strict=True)]
        return RoundPlan.of(list(proportional(speeds, plan.total, minimum=1)))
