"""What every scheme is: a pure function from the agreed table to the next plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from hvd_hetero.allocation._checks import integer
from hvd_hetero.prediction import Predictor, predictor
from hvd_hetero.rounds import RoundPlan, RoundTable

__all__ = ["Policy", "checked_micro_batch", "equal_plan"]


class Policy(ABC):
    """Decides, from what all ranks know, what each rank does in the next round.

    ``first`` and ``next`` are pure: the same arguments give the same plan on every rank and on every processor. Hence a
    policy decides in integers, quantising measurements before it compares or divides them, and keeps nothing in itself
    that was measured on one rank. What a rank predicts of its own speed reaches the policy through the table alone.
    """

    name: ClassVar[str]
    """how users and reports call the scheme"""

    measures: ClassVar[bool] = True
    """whether plans depend on measured times (if not, a time that cannot be taken does not matter)"""

    @abstractmethod
    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """The plan before anything was measured."""

    @abstractmethod
    def next(self, plan: RoundPlan, table: RoundTable) -> RoundPlan:
        """The plan that follows ``plan``, given the table of the latest finished round."""

    def predictor(self) -> Predictor:
        """A fresh predictor for one rank's speed. Policies that do not predict report the latest measurement."""
        return predictor("memoryless")


def checked_micro_batch(size: int | None) -> int | None:
    """The largest micro-batch allowed, if it is one."""
    if size is None:
        return None
    return integer("max_micro_batch", size, 1, way_out="give a whole number of samples, or None for no limit")


def equal_plan(workers: int, global_batch: int, max_micro_batch: int | None = None) -> RoundPlan:
    """The global batch cut evenly: the first ``global_batch mod workers`` ranks hold one sample more."""
    share, more = divmod(global_batch, workers)
    return RoundPlan.of(np.full(workers, share) + (np.arange(workers) < more), max_micro_batch)
