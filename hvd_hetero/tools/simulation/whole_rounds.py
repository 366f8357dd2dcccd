"""Production's order of the data, seen from all ranks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.rounds import RoundPlan


class WholeRounds(SharedPermutation):
    """In production each rank holds its own copy and takes its own samples; one copy does for a whole simulation."""

    def take_round(self, plan: RoundPlan) -> tuple[RoundPlan, list[NDArray[np.int64]]]:
        """Return the plan of the next round, and the samples of every rank; begin the next epoch if one has ended."""
        self.ahead()
        plan = self.take(plan, 0).plan
        return plan, np.split(self._open[-1].indices, np.cumsum(plan.samples)[:-1])

    def ahead(self) -> int:
        """Return the samples that the next round can take at most."""
        if not self.holds(1):
            self.start(self.epoch + 1)
        return self.remaining
