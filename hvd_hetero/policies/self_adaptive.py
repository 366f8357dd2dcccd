"""Self-adaptive allocation: micro-batches per rank, re-allocated once an epoch until they stay still."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_hetero.allocation import adapt, proportional, settled
from hvd_hetero.allocation._checks import integer
from hvd_hetero.policies.base import Policy, comparable_speeds
from hvd_hetero.rounds import FinishedRound, RoundPlan

__all__ = ["SelfAdaptive"]

_KEPT = 8  # allocations remembered: more than the stop rule looks at
_NANOSECONDS = 1e9
_FOLLOWED = 0.01  # of the time of an epoch: arbitrary, above what its mean scatters by, and below what is worth a word


class SelfAdaptive(Policy):
    r"""Rank i accumulates ``w_i`` micro-batches per round, ``w_1 + … + w_n = C`` (self-adaptive-allocation, III.B).

    After every epoch, with ``t_i`` the seconds that rank i was at work in it (waiting not counted),

        w_i <- C (w_i / t_i) / sum_j (w_j / t_j)                                                         (Eq. 10)

    in integers that keep their sum, until the allocation stays still; then it is left alone (Algorithm 1). It is taken
    up again when the ranks drift: when the slowest rank of an epoch takes ``drift`` longer, relative to the mean, than
    it did when the allocation came to rest.

    A rank is up to half a micro-batch from its share, which is much where it has few. So once the allocation is at
    rest, Eq. 10 divides the samples as well, by the times of that last epoch, and each rank does its own in
    micro-batches no larger than before: a rank may have one micro-batch more than its count. And the division follows:
    after an epoch whose slowest rank took 1 % longer, relative to the mean, than the division had promised, Eq. 10
    divides the samples anew. Machines are not as steady as an allocation that is left alone would need.

    Parameters
    ----------
    total
        C, the micro-batches of a round over all ranks. None takes ten for each rank: a finer grain costs more calls
        per sample, a coarser one is further from equal times until the allocation is at rest.
    start
        The allocation of the first epoch, one count per rank; equal if not given.
    every
        Re-allocate after so many rounds instead of after every epoch.
    drift
        See above; an arbitrary value between the noise of an epoch and a loss that one would notice.

    Differences from the paper: the sub-data-set of a rank is not cut beforehand, but each round's slice of one shared
    permutation is cut in the ratio, which leaves nothing over either. The paper says "the ratio does not fluctuate";
    the rule is made precise in ``allocation.settled``. The paper never takes a settled allocation up again, leaves it
    at whole micro-batches, and does not follow.
    """

    name: ClassVar[str] = "self-adaptive"

    def __init__(
        self,
        total: int | None = None,
        *,
        start: npt.ArrayLike | None = None,
        every: int | None = None,
        drift: float = 0.15,
    ) -> None:
        way_out = "give the micro-batches of a round over all ranks"
        self.total = None if total is None else integer("total", total, 1, way_out=way_out)
        self.start = None if start is None else [integer(f"start[{i}]", w, 1) for i, w in enumerate(np.asarray(start))]
        self.every = None if every is None else integer("every", every, 1)
        if not 0 < drift < float("inf"):
            raise ValueError(f"drift must be positive and finite, got {drift}")
        self.drift = drift
        if self.start is not None and self.total not in (None, sum(self.start)):
            raise ValueError(f"start must sum to total={self.total}, got {self.start} with a sum of {sum(self.start)}")
        self._weights: list[int] = []
        self._global_batch = 0
        self._history: list[list[int]] = []
        self._rest: float | None = None
        self._shares: list[int] = []
        """samples of each rank, once at rest"""
        self._period = self._rounds = 0
        self._busy_ns: list[int] = []

    @property
    def stable(self) -> bool:
        """Whether the allocation has come to rest."""
        return self._rest is not None

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Equal counts, or those asked for."""
        total = sum(self.start) if self.start is not None else self.total or 10 * workers
        if self.start is not None and len(self.start) != workers:
            raise ValueError(f"start must name one count per rank: got {len(self.start)} for {workers} ranks")
        if total < workers:
            raise ValueError(
                f"total must be at least the number of ranks, {workers}, so that each has a micro-batch; got {total}"
            )
        if global_batch < total:
            raise ValueError(
                f"global_batch must be at least the number of micro-batches of a round, {total}, so that each holds a "
                f"sample; got {global_batch}: raise global_batch or lower total"
            )
        self._global_batch = global_batch
        self._weights = self.start or [int(w) for w in proportional(np.ones(workers), total)]
        self._history = [self._weights]
        self._rest, self._shares = None, []
        self._period, self._rounds, self._busy_ns = 0, 0, [0] * workers
        return self._plan()

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """The same until an epoch is over, then what Eq. 10 says."""
        period = finished.epoch if self.every is None else finished.round // self.every
        if period != self._period:
            self._reallocate()
            self._period = period
            self._busy_ns, self._rounds = [0] * plan.workers, 0
        self._take(finished)
        return self._plan()

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Counts in proportion to the speeds, where all are known; Algorithm 1 goes on from there."""
        comparable = comparable_speeds(np.array(speeds, dtype=np.float64))
        if (comparable > 0).all():
            self._weights = [int(w) for w in proportional(comparable, sum(self._weights), minimum=1)]
            self._history = [self._weights]
        return self._plan()

    def _take(self, finished: FinishedRound) -> None:
        # Whole rounds of the present allocation only, and not the very first, which pays for caches and buffers.
        if finished.round == 0 or finished.plan.samples != self._plan().samples:
            return
        busy_s = finished.table.busy_s
        if np.isfinite(busy_s).all():
            # Integers, whose sum does not depend on the processor that adds them up.
            taken = [round(max(s, 0.0) * _NANOSECONDS) for s in busy_s.tolist()]
            self._busy_ns = [a + b for a, b in zip(self._busy_ns, taken, strict=True)]
            self._rounds += 1

    def _reallocate(self) -> None:
        if self._rounds == 0 or min(self._busy_ns) <= 0:
            return
        spread = max(self._busy_ns) * len(self._busy_ns) / sum(self._busy_ns)
        done = self._plan().samples
        if self._rest is not None and spread <= self._rest * (1 + self.drift):
            if spread > self._rest * (1 + _FOLLOWED):
                self._divide(done)
            return
        if self._rest is not None:
            # The times are of single samples' shares, not of whole micro-batches.
            balanced = proportional(adapt(done, self._busy_ns), sum(self._weights), minimum=1)
            self._rest, self._shares, self._history = None, [], [self._weights]
        else:
            balanced = adapt(self._weights, self._busy_ns)
        self._weights = [int(w) for w in balanced]
        self._history = [*self._history, self._weights][-_KEPT:]
        if settled(self._history):
            self._divide(done)

    def _divide(self, done: Sequence[int]) -> None:
        """At rest: the samples by Eq. 10, where ranks took the latest times for so many."""
        self._shares = [int(x) for x in adapt(done, self._busy_ns)]
        expected = [x * ns / d for x, ns, d in zip(self._shares, self._busy_ns, done, strict=True)]
        self._rest = max(expected) * len(expected) / math.fsum(expected)

    def _plan(self) -> RoundPlan:
        if self._shares:
            total = sum(self._weights)
            counts = tuple(-(-x * total // self._global_batch) for x in self._shares)
            return RoundPlan(tuple(self._shares), counts)
        samples = proportional(self._weights, self._global_batch, minimum=self._weights)
        return RoundPlan(tuple(int(x) for x in samples), tuple(self._weights))

    def state_dict(self) -> dict[str, Any]:
        """The allocation and how it came about."""
        return {
            "weights": self._weights,
            "history": self._history,
            "rest": self._rest,
            "shares": self._shares,
            "period": self._period,
            "rounds": self._rounds,
            "busy_ns": self._busy_ns,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that allocation."""
        if len(state["weights"]) != len(self._weights) or sum(state["weights"]) != sum(self._weights):
            raise ValueError(
                f"the state allocates {state['weights']}, this training {self._weights}; resume with the same total "
                "and number of ranks"
            )
        self._weights = [int(w) for w in state["weights"]]
        self._history = [[int(w) for w in each] for each in state["history"]]
        self._rest = state["rest"]
        self._shares = [int(x) for x in state["shares"]]
        self._period, self._rounds = int(state["period"]), int(state["rounds"])
        self._busy_ns = [int(each) for each in state["busy_ns"]]
