"""LB-BSP's shares in non-blocking rounds: predicted speeds divide the samples, and the first rank to finish ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.checks import integer
from hvd_hetero.policies.lb_bsp import LBBSP
from hvd_hetero.policies.policy import Policy
from hvd_hetero.policies.trials import Trials
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable


class LBNonBlocking(Policy):
    r"""Shares by predicted speed, in N micro-batches each; when the first rank has done its share, all stop.

    LB-BSP (``LBBSP``) divides X / N samples so that one micro-batch takes all ranks as long: its shares y_i minimise
    ``max_i (y_i + β_i) / u_i``. Rank i is given ``x_i = N y_i`` samples in N micro-batches of y_i. The round ends with
    the first rank, as in ``NonBlocking``. So a rank that is slower than predicted delays the others for part of one
    micro-batch, and not for all of its delay. What it leaves undone returns to the queue. The gradient is the mean over
    all samples done, whichever rank did them.

    **The number of micro-batches.** With more of them ranks wait less for the last one, and each costs its fixed part
    again. Which N is best also depends on how times scatter. So it is measured, not computed: N is the one of

        1, 4, 8, 16, …, at most X / 2n

    at which rounds take the fewest seconds a sample, ``(max_i t_i + transfer) / samples done``, with t_i the seconds
    that rank i was at work. ``policies.trials`` says which N is used when. With N = 1, where it begins, a round is
    LB-BSP's.

    Every micro-batch of a rank has one size. Otherwise the mean size would change with the number of micro-batches
    done, and ``measurement.fixed_cost`` would take each new mean for a new size. So a round has the largest multiple of
    N that ``global_batch`` holds.

    Parameters
    ----------
    predictor, tolerance
        As in ``LBBSP``.
    micro_batches
        N. None: the fastest, found as above.
    """

    name: ClassVar[str] = "lb-non-blocking"
    keeps_total: ClassVar[bool] = False
    weighs_fixed_cost = True
    anticipates = True
    PARTS = ("_trials", "_shares")

    def __init__(
        self,
        predictor: str | Predictor = "mixture",
        *,
        micro_batches: int | None = None,
        tolerance: float = 0.03,
    ) -> None:
        if micro_batches is not None:
            integer("micro_batches", micro_batches, 1, remedy="give the micro-batches of one rank, or None")
        self.micro_batches = micro_batches
        self._shares = LBBSP(predictor, tolerance=tolerance)
        self._workers = self._global_batch = self._number = 1  # n, X, N
        self._trials = Trials((1,))
        self._reference = 1.0  # samples of the micro-batches that speeds refer to

    def predictor(self) -> Predictor:
        """Return LB-BSP's predictor."""
        return self._shares.predictor()

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return equal shares, until speeds are known."""
        if (fixed := self.micro_batches) is not None and global_batch < workers * fixed:
            raise ValueError(
                f"global_batch must be at least {workers * fixed}, a sample for each of the {fixed} micro-batches of "
                f"{workers} ranks; got {global_batch}: raise global_batch or lower micro_batches"
            )
        self._workers, self._global_batch = workers, global_batch
        # A rank's mean micro-batch has two samples at least (arbitrary).
        self._trials = Trials((fixed,) if fixed else _candidates(global_batch // (2 * workers)))
        self._number = self._trials.number
        part = self._shares.first(workers, self._of_a_part)
        self._reference = part.typical_size
        return self._whole(part)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return LB-BSP's next split, in as many micro-batches as make rounds fastest, or in a trial of others."""
        self._learn(finished)
        part = self._part(plan)
        # Each change of N teaches β, and if times scatter, a wrong one at first. So shares keep their proportions in a
        # trial and the two rounds after it.
        if not self._trials.unsettled:
            table = self._of_present_size(finished.table)
            part = self._shares.next(part, replace(finished, table=table))
        if (number := self._trials.number) != self._number:
            self._number = number
            part = self._part(part)
            self._shares.first(self._workers, self._of_a_part)
        return self._whole(part)

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """Return LB-BSP's shares by the known speeds."""
        return self._whole(self._shares.renegotiate(self._part(plan), speeds))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the trials and the shares, and plan with the number of micro-batches that follows from them."""
        self._trials.load_state_dict(state["trials"])
        self._number = self._trials.number
        self._shares.first(self._workers, self._of_a_part)
        self._shares.load_state_dict(state["shares"])

    @property
    def _of_a_part(self) -> int:
        """Samples of one micro-batch of all ranks together."""
        return self._global_batch // self._number

    def _part(self, plan: RoundPlan) -> RoundPlan:
        """Return one micro-batch of each rank, in the proportions of a plan; of a plan with N, exactly its Nth part."""
        return RoundPlan.of(proportional(plan.samples, self._of_a_part, minimum=1))

    def _whole(self, part: RoundPlan) -> RoundPlan:
        """Return the round of N such micro-batches of each rank; the planner cuts them if memory is short."""
        n = self._number
        return RoundPlan(tuple(n * x for x in part.samples), (n,) * part.workers, ends="first")

    def _of_present_size(self, table: RoundTable) -> RoundTable:
        """Return the speeds for micro-batches of the present size; ranks report them for the first one's."""
        fixed, size = table.column("fixed_samples"), self._of_a_part / self._workers
        speeds = table.column("samples_per_s") * ((1.0 + fixed / self._reference) / (1.0 + fixed / size))
        return table.replaced("samples_per_s", speeds.tolist())

    def _learn(self, finished: FinishedRound) -> None:
        """Pass the time of a round to the trials, if it was planned with the present number."""
        plan, table, n = finished.plan, finished.table, self._number
        limits = table.column("limit")
        cut = np.where(limits > 0, np.maximum(-(-plan.shares // np.maximum(limits, 1)), n), n)
        if plan.ends != "first" or (plan.batch_counts != cut).any():
            return  # all had to be done, or the plan is older than the number
        self._trials.same_as(int(cut.min()))  # more than n if no rank's memory holds such large ones
        latest_s, transfer_s = float(table.busy_s.max()), table.transfer_s
        seconds = latest_s + transfer_s if transfer_s > 0.0 else latest_s  # what is not known is left out
        # Considered: N by a model. With φ the fixed part of a step, N costs φ N of it, and waiting (n - 1) / 2nN, so
        # √((n - 1) / 2nφ) would be best (benchmarks/stumbles_bound.py). But times that scatter hide a small φ, and N
        # went to a wrong one. Considered: ending a round when micro-batches are about to end together. It gains 1 % at
        # most, because most waiting is for stumbles that have just begun.
        # Beyond the largest float32, which is no round's time, squares could overflow.
        if 0.0 < seconds < float(np.finfo(np.float32).max) and table.total > 0:
            self._trials.learn(seconds / table.total)


def _candidates(most: int) -> tuple[int, ...]:
    """Return 1, 4, 8, 16, … up to ``most``, or 1 and ``most`` if that is below 4."""
    # 2 is left out, because it waits nearly as long as 1.
    fewest = min(4, max(most, 1))
    return tuple(sorted({1, *(fewest << power for power in range(most.bit_length()) if fewest << power <= most)}))
