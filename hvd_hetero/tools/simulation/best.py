r"""The best possible split of a round: the one to choose if its speeds were known before it began.

    T* = min { τ : sum_i cap_i(τ) >= X },    cap_i(τ) = max { x : f_i Γ_i(x) <= A_i(T, T + τ) }

cap_i counts the samples that worker i can finish within τ seconds at its future pace. T* is found by
bisection over τ. It minimises the round's computing over all splits, and includes saturation, memory limits and
changes of pace in the middle of the round: no policy that ends a round when all are done can be sooner. With a server
the same holds but for the queue at the server. If every batch varies by itself (``per="batch"``), f_i is the mean of
the draws that a share will meet, and the split is the best one with one micro-batch a worker; accumulation over many
averages the draws, and may be sooner there. It sees the future, so it is no policy of production.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.policies import Policy
from hvd_hetero.policies.policy import equal_plan
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.tools.simulation.cluster import Machines

# The number of micro-batches stays the same after two or three.
_REPEATS = 8
# Beyond what any description or run allows (arbitrary).
_LONGEST_S = 1e60


class BestSplit(Policy):
    """The oracle of the tables."""

    name: ClassVar[str] = "best split"
    measures: ClassVar[bool] = False
    shares_alone: ClassVar[bool] = True

    def __init__(self) -> None:
        self._span_s = 1e-6  # T* of the round before

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares: they set the samples of a round, and ``foresee`` divides them."""
        return equal_plan(workers, global_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return a plan of as many samples."""
        return plan

    def foresee(self, machines: Machines, begin_s: float, factors: NDArray[np.float64], total: int) -> RoundPlan:
        """Return the split of the round that begins now.

        It is the best at the mean of the draws that each share will meet, which is repeated until their number stays.
        """
        count = np.ones(machines.count, dtype=np.int64)
        for _ in range(_REPEATS):
            draws = machines.per_batch.following(count)
            mean = np.sum(draws, axis=1, where=np.arange(draws.shape[1]) < count[:, None]) / count
            plan = self._split(machines, begin_s, factors * mean, total)
            before, count = count, np.maximum(machines.devices.pieces(plan.shares, plan.batch_counts).count, 1)
            if (before == count).all() or not machines.per_batch.any:
                break
        return plan

    def _split(self, machines: Machines, begin_s: float, factors: NDArray[np.float64], total: int) -> RoundPlan:
        message_s = np.zeros(machines.count)
        if machines.network.kind == "server":
            message_s = machines.network.message_s(machines.bandwidth(begin_s))
        start_s = begin_s + message_s

        def capacity(span_s: float) -> NDArray[np.int64]:
            end_s = np.maximum(begin_s + span_s - message_s, start_s)
            return np.minimum(
                machines.devices.within(machines.availability.work_between(start_s, end_s) / factors), total
            )

        # From the T* of the round before, which is near.
        early_s, late_s = 0.0, self._span_s
        while int((shares := capacity(late_s)).sum()) < total:
            early_s, late_s = late_s, 2.0 * late_s
            if not late_s < _LONGEST_S:
                raise ValueError(
                    f"speeds must let {total} samples end within {_LONGEST_S:g} s, and rank "
                    f"{int(np.argmax(factors))} takes {factors.max():g} times its time; correct the speeds of the "
                    "description or of the run"
                )
        # Caps that sum to the batch are those of T*. If several workers end a sample at T* itself, they never do, and
        # a relative 1e-9 ends the search.
        while (spare := int(shares.sum()) - total) and late_s - early_s > 1e-9 * late_s:
            middle_s = 0.5 * (early_s + late_s)
            fewer = capacity(middle_s)
            if int(fewer.sum()) < total:
                early_s = middle_s
            else:
                late_s, shares = middle_s, fewer
        self._span_s = late_s
        # Taken from the workers that end most samples at T* itself.
        if spare:
            ended = np.maximum(shares - capacity(early_s), 0)
            for i in np.argsort(-ended, kind="stable").tolist():
                cut = min(spare, int(ended[i]))
                shares[i] -= cut
                spare -= cut
        return RoundPlan.of(shares)
