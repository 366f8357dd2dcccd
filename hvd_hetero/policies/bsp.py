"""BSP: equal batches for all, whatever the machines are. The do-nothing policy."""

from __future__ import annotations

from typing import ClassVar

from hvd_hetero.bounds import Said
from hvd_hetero.policies.policy import Policy, checked_micro_batch, equal_plan
from hvd_hetero.rounds import RoundPlan


class BSP(Policy):
    """Every rank gets the same share of the global batch in every round (lb-bsp, section 2.2).

    With equal machines no policy is better; with unequal ones every round lasts as long as the slowest rank needs.
    ``max_micro_batch`` is as in ``LBBSP``.
    """

    name: ClassVar[str] = "bsp"
    measures: ClassVar[bool] = False
    shares_alone: ClassVar[bool] = True

    def __init__(self, *, max_micro_batch: Said = None) -> None:
        self.max_micro_batch = checked_micro_batch(max_micro_batch)

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares for all ranks."""
        return equal_plan(workers, global_batch)
