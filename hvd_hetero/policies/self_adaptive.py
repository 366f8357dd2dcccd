"""Self-adaptive allocation: micro-batches per rank, re-allocated once an epoch until they stay still, then samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation.equal_times import adapt, settled
from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.checks import integer
from hvd_hetero.kept import Figure
from hvd_hetero.policies.costs import Costs
from hvd_hetero.policies.policy import Policy, comparable_speeds
from hvd_hetero.rounds import FinishedRound, RoundPlan

# Arbitrary: machines are not so steady that an allocation could stay for good.
_LATENESS_BEFORE_REDIVISION = 0.01
# Of a share, which may move as far before its count of micro-batches is set again (arbitrary).
_SHARE_MOVE_PER_COUNT = 0.03


class SelfAdaptive(Policy):
    r"""Rank i accumulates ``w_i`` micro-batches per round, ``w_1 + … + w_n = C`` (self-adaptive-allocation, III.B).

    After every epoch, with ``t_i`` the seconds that rank i was at work on ``w_i`` in it (waiting not counted),

        w_i <- C (w_i / t_i) / sum_j (w_j / t_j)                                                         (Eq. 10)

    in integers that keep their sum, until the allocation stays still (Algorithm 1): it is at rest.

    A rank is up to half a micro-batch from its share, which is much if it has few. So at rest Eq. 10 divides the
    samples x_i of a round instead, with ``t_i = c_i x_i``. Each rank does its own in micro-batches no larger than
    before. There are enough of them that its share may move by 3 % before their number does; so all ranks may do a few
    more than C. That division stays as long as the ranks keep their costs. It is made again when, after an epoch, the
    slowest rank would need 1 % longer, relative to the mean, than under the best division. What a sample costs, c_i, is
    the epoch's, averaged with earlier ones while it only scatters (``policies.costs``).

    Differences from the paper: the sub-data-set of a rank is not cut beforehand, but each round's slice of one shared
    permutation is cut in the ratio, which leaves nothing over either. The paper says "the ratio does not fluctuate";
    the rule is made precise in ``allocation.settled``. The paper leaves a settled allocation alone, at whole
    micro-batches.

    Parameters
    ----------
    total
        C, the micro-batches of a round over all ranks. None takes ten for each rank: a finer grain costs more calls
        per sample, a coarser one is further from equal times until the allocation is at rest.
    start
        The allocation of the first epoch, one count per rank; equal if not given.
    every
        Re-allocate after so many rounds instead of after every epoch.
    """

    name: ClassVar[str] = "self-adaptive"
    KEPT = (
        Figure("_weights", whole=True),
        Figure("_shares", whole=True, any_length=True),
        Figure("_counts", whole=True, any_length=True),
        Figure("_stable", whole=True),
        Figure("_period", whole=True),
    )
    PARTS = ("_costs",)

    def __init__(
        self,
        total: int | None = None,
        *,
        start: npt.ArrayLike | None = None,
        every: int | None = None,
    ) -> None:
        remedy = "give the micro-batches of a round over all ranks"
        self.total = None if total is None else integer("total", total, 1, remedy=remedy)
        counts = None if start is None else np.asarray(start)
        if counts is not None and counts.ndim != 1:
            raise ValueError(f"start must hold one count per rank, got {start!r}; give a list, as in start=[9, 1]")
        self.start = None if counts is None else [integer(f"start[{i}]", w, 1) for i, w in enumerate(counts)]
        self.every = None if every is None else integer("every", every, 1)
        if self.start is not None and self.total not in (None, sum(self.start)):
            raise ValueError(
                f"start must sum to total={self.total}, got {self.start} with a sum of {sum(self.start)}: leave total "
                "out"
            )
        self._weights: list[int] = []
        self._global_batch = 0
        self._history: list[list[int]] = []
        self._shares: list[int] = []
        """Samples of each rank, once at rest."""
        self._counts: list[int] = []
        """Micro-batches of each rank, once at rest."""
        self._stable = False
        self._period = 0
        self._costs = Costs(0)

    @property
    def needs_epochs(self) -> bool:
        """True unless ``every`` is given."""
        return self.every is None

    @property
    def stable(self) -> bool:
        """True if the allocation is at rest, and no count of micro-batches changed after the latest epoch."""
        return self._stable

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal counts, or the given ones."""
        total = sum(self.start) if self.start is not None else self.total or 10 * workers
        if self.start is not None and len(self.start) != workers:
            raise ValueError(
                f"start must name one count per rank: got {len(self.start)} for {workers} ranks; launch as many ranks, "
                "or leave start out, for equal counts"
            )
        if total < workers:
            raise ValueError(
                f"total must be at least the number of ranks, {workers}, so that each has a micro-batch; got {total}: "
                "raise total, or launch fewer ranks"
            )
        if global_batch < total:
            raise ValueError(
                f"global_batch must be at least the number of micro-batches of a round, {total}, so that each holds a "
                f"sample; got {global_batch}: raise global_batch or lower total"
            )
        self._global_batch = global_batch
        self._weights = self.start or [int(w) for w in proportional(np.ones(workers), total)]
        self._history = [self._weights]
        self._shares, self._counts, self._stable = [], [], False
        self._period, self._costs = 0, Costs(workers)
        return self._plan()

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the same plan until an epoch is over, then the one by Eq. 10."""
        period = finished.epoch if self.every is None else finished.round // self.every
        if period != self._period:
            self._period = period
            # The scatter of rounds shows whether a cost has moved, and takes some rounds to know: a shorter epoch
            # counts together with the next.
            if self._costs.end_period(least=3 if self._shares else 1):
                self._reallocate()
        self._costs.add_round(finished.table)
        return self._plan()

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Return counts in proportion to the speeds, if all are known; Algorithm 1 goes on from there."""
        comparable = comparable_speeds(np.array(speeds, dtype=np.float64))
        if (comparable > 0).all():
            self._weights = [int(w) for w in proportional(comparable, sum(self._weights), minimum=1)]
            self._history = [self._weights]
        return self._plan()

    def _reallocate(self) -> None:
        plan = self._plan()
        done = plan.samples
        if not self._shares:
            before, self._weights = self._weights, self._balanced(self._weights)
            self._history = [*self._history, self._weights][-3:]  # as many as `settled` compares
            if settled(self._history, window=3):
                self._divide(self._balanced(done))
            elif self._weights != before:
                # A cost has a part that does not shrink with the share, so it does not hold for another one.
                self._costs.restart()
        else:
            wanted = self._balanced(done)
            late, least = _lateness(self._costs.per_sample * done), _lateness(self._costs.per_sample * wanted)
            if late > least * (1 + _LATENESS_BEFORE_REDIVISION):
                self._divide(wanted)
        self._stable = bool(self._shares) and self._plan().micro_batches == plan.micro_batches

    def _divide(self, shares: list[int]) -> None:
        """Divide samples, at rest, and set enough micro-batches that none is larger than before."""
        before = self._counts or [0] * len(shares)
        self._counts = [self._count(x, k) for x, k in zip(shares, before, strict=True)]
        self._shares = shares

    def _count(self, samples: int, before: int) -> int:
        """Return the former count while it is enough and not far too large; else one that is slightly too large.

        From where its count was set, a share may move by ``_SHARE_MOVE_PER_COUNT`` either way before the count does.
        """
        least = samples * sum(self._weights) / self._global_batch
        ample = math.ceil(least * (1 + _SHARE_MOVE_PER_COUNT))
        most = max(math.ceil(least) + 1, math.ceil(least * (1 + _SHARE_MOVE_PER_COUNT) / (1 - _SHARE_MOVE_PER_COUNT)))
        return before if least <= before <= min(most, samples) else min(ample, samples)

    def _balanced(self, counts: Sequence[int]) -> list[int]:
        """Return the counts by Eq. 10."""
        return [int(x) for x in adapt(counts, self._costs.per_sample * counts)]

    def _plan(self) -> RoundPlan:
        if self._shares:
            return RoundPlan(tuple(self._shares), tuple(self._counts))
        samples = proportional(self._weights, self._global_batch, minimum=self._weights)
        return RoundPlan(tuple(int(x) for x in samples), tuple(self._weights))

    def state_dict(self) -> dict[str, Any]:
        """Return the allocation and its history."""
        return super().state_dict() | {"history": self._history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an allocation of as many ranks and micro-batches."""
        if len(state["weights"]) != len(self._weights) or sum(state["weights"]) != sum(self._weights):
            raise ValueError(
                f"the state allocates {state['weights']}, this training {self._weights}; resume with the same total "
                "and number of ranks"
            )
        super().load_state_dict(state)
        self._history = [[int(w) for w in each] for each in state["history"]]


def _lateness(seconds: npt.NDArray[np.float64]) -> float:
    """Return how long the slowest rank takes, relative to the mean."""
    return float(seconds.max()) * len(seconds) / math.fsum(seconds)
