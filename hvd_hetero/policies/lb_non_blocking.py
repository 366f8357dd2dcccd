"""LB-BSP's shares in non-blocking rounds: predicted speeds divide the samples, and the first rank to finish ends it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from hvd_hetero.allocation import proportional
from hvd_hetero.checks import integer
from hvd_hetero.policies.base import Policy
from hvd_hetero.policies.lb_bsp import LBBSP
from hvd_hetero.prediction import Predictor
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable

__all__ = ["LBNonBlocking"]

_FIRST = 2  # micro-batches: few, so that a large fixed cost is found before it is paid often (arbitrary)
_WORTH = 0.005  # of a round, which another number of micro-batches must save (arbitrary)
_LEAST_SIZE = 2  # samples of a rank's mean micro-batch (arbitrary)
_LEAST_COST_S = 0.0005  # of a micro-batch: a loop's body, hooks and small kernels (arbitrary)
_REMEMBERED = 32  # R
_RISES_AFTER, _FALLS_AFTER = 8, 2  # rounds with one number; a fall mends a loss, so it comes sooner (arbitrary)


class LBNonBlocking(Policy):
    r"""Shares by predicted speed, in N micro-batches each; when the first rank has done its share, all stop.

    LB-BSP (``LBBSP``) divides X / N samples so that one micro-batch takes all ranks as long: its shares y_i minimise
    ``max_i (y_i + β_i) / u_i``. Rank i is given ``x_i = N y_i`` samples in N micro-batches of y_i. The round ends with
    the first rank, as in ``NonBlocking``, so a rank that is slower than predicted holds the others up for part of one
    micro-batch, and not for all that it is late. What it leaves undone returns to the queue. The gradient is the mean
    over all samples done, whoever did them.

    **The number of micro-batches.** In samples of X, a round loses

        f(N) = N B + w X / N,        B = sum_i β_i

    N B is what the micro-batches cost besides their samples (``measurement.fixed_cost``). The rest is idle time, w
    micro-batches in the mean over the ranks. It begins as that of ranks that do not stumble: let the last micro-batches
    of all but the first rank end anywhere within half a micro-batch of its end (``measurement.anticipation``), equally
    likely. Then the round ends at ``E max(0, U_1 … U_{n-1})``, U uniform in [-1/2, 1/2], the ranks in the mean at 0:

        w_0 = 1/2 - (1 - 2^-n) / n

    What was measured follows, with t_i the seconds that rank i was at work: over R rounds or fewer, the mean of

        w = N (1 - mean_i t_i / max_i t_i)

    N doubles or halves where that saves half a hundredth of X. It begins at 2, since each change of size tells β, and a
    large β must not be paid for often. Times that scatter hide a small β, so half a millisecond counts at least: with
    the 0 that such ranks tell, N rose to where micro-batches of 3 ms cost 0.5 ms more each. R = 32 is arbitrary.

    Every micro-batch of a rank has one size, so that the mean size of those done says nothing of how many were done:
    ``measurement.fixed_cost`` would take each new mean for a new size. Hence a round has the largest multiple of N that
    ``global_batch`` holds.

    Parameters
    ----------
    predictor, tolerance
        As in ``LBBSP``.
    micro_batches
        N. None: chosen by the measured cost, as above.
    """

    name: ClassVar[str] = "lb-non-blocking"
    keeps_total: ClassVar[bool] = False
    weighs_fixed_cost = True
    anticipates = True

    def __init__(
        self,
        predictor: str | Predictor = "mixture",
        *,
        micro_batches: int | None = None,
        tolerance: float = 0.03,
    ) -> None:
        if micro_batches is not None:
            integer("micro_batches", micro_batches, 1, way_out="give the micro-batches of one rank, or None")
        self.micro_batches = micro_batches
        self._shares = LBBSP(predictor, tolerance=tolerance)
        self._workers = self._global_batch = self._most = self._number = 1  # n, X, the largest N, N
        self._rounds = 0  # done with N micro-batches
        self._idle, self._measured = 0.0, 0  # w, and the rounds that it is the mean of
        self._reference = 1.0  # samples of the micro-batches that speeds are told of

    def predictor(self) -> Predictor:
        """LB-BSP's."""
        return self._shares.predictor()

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Equal shares, until speeds are known."""
        if (fixed := self.micro_batches) is not None and global_batch < workers * fixed:
            raise ValueError(
                f"global_batch must be at least {workers * fixed}, a sample for each of the {fixed} micro-batches of "
                f"{workers} ranks; got {global_batch}: raise global_batch or lower micro_batches"
            )
        self._workers, self._global_batch = workers, global_batch
        self._most = fixed or max(global_batch // (_LEAST_SIZE * workers), 1)
        self._begin(fixed or min(_FIRST, self._most))
        self._idle, self._measured = 0.5 - (1.0 - 0.5**workers) / workers, 0
        part = self._shares.first(workers, self._of_a_part)
        self._reference = part.typical_size
        return self._whole(part)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """LB-BSP's next split of a micro-batch, and as many of them as pay."""
        table = self._of_present_size(finished.table)
        part = self._shares.next(self._part(plan), replace(finished, table=table))
        if finished.plan.ends == "first" and any(k and k % self._number == 0 for k in finished.plan.micro_batches):
            self._rounds += 1
            self._measure_idle(finished.table)
        if self.micro_batches is None and (number := self._better(table)) != self._number:
            self._begin(number)
            part = self._part(part)
            self._shares.first(self._workers, self._of_a_part)
        return self._whole(part)

    def renegotiate(self, plan: RoundPlan, speeds: Sequence[float]) -> RoundPlan:
        """LB-BSP's shares by the speeds that are known."""
        return self._whole(self._shares.renegotiate(self._part(plan), speeds))

    def state_dict(self) -> dict[str, Any]:
        """The number of micro-batches, for how many rounds it has been that, and the idle time."""
        return {"number": self._number, "rounds": self._rounds, "idle": self._idle, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that number."""
        number, rounds = int(state["number"]), int(state["rounds"])
        idle, measured = float(state["idle"]), int(state["measured"])
        own = 1 <= number <= self._most and self.micro_batches in (None, number)
        if not own or min(rounds, measured) < 0 or not 0.0 <= idle < math.inf:
            raise ValueError(
                f"state: number must be in 1 … {self._most}, or what micro_batches says, and the others 0 or more, got "
                f"{dict(state)}; resume with the ranks, global_batch and micro_batches that saved it"
            )
        self._begin(number)
        self._rounds, self._idle, self._measured = rounds, idle, measured
        self._shares.first(self._workers, self._of_a_part)

    @property
    def _of_a_part(self) -> int:
        """Samples of one micro-batch of all ranks together."""
        return self._global_batch // self._number

    def _begin(self, number: int) -> None:
        self._number, self._rounds = number, 0

    def _part(self, plan: RoundPlan) -> RoundPlan:
        """One micro-batch of each rank, in the proportions of a plan; of a plan with N, exactly its Nth part."""
        return RoundPlan.of(proportional(plan.samples, self._of_a_part, minimum=1))

    def _whole(self, part: RoundPlan) -> RoundPlan:
        """The round of N such micro-batches of each rank; the planner cuts those that memory does not hold."""
        n = self._number
        return RoundPlan(tuple(n * x for x in part.samples), (n,) * part.workers, ends="first")

    def _of_present_size(self, table: RoundTable) -> RoundTable:
        """The speeds of micro-batches of the present size, where ranks tell those of the first one."""
        fixed, size = table.column("fixed_samples"), self._of_a_part / self._workers
        speeds = table.column("samples_per_s") * ((1.0 + fixed / self._reference) / (1.0 + fixed / size))
        return table.replaced("samples_per_s", speeds.tolist())

    def _measure_idle(self, table: RoundTable) -> None:
        busy_s = table.busy_s
        if ((busy_s > 0.0) & (busy_s < math.inf)).all():
            idle = self._number * (1.0 - math.fsum(busy_s.tolist()) / len(busy_s) / float(busy_s.max()))
            self._measured = min(self._measured + 1, _REMEMBERED)
            self._idle += (idle - self._idle) / (self._measured + 1)

    def _better(self, table: RoundTable) -> int:
        """N, or twice or half of it where that saves enough. The same bits everywhere, by correctly rounded steps."""
        total, speeds = self._global_batch, table.column("samples_per_s")
        least = np.where(np.isfinite(speeds) & (speeds > 0.0), _LEAST_COST_S * speeds, 0.0)
        fixed = math.fsum(np.maximum(table.column("fixed_samples"), least).tolist())

        def saves(number: int) -> bool:
            now, then = (k * fixed + self._idle * total / k for k in (self._number, number))
            return then < now - _WORTH * total

        more, fewer = 2 * self._number, self._number // 2
        if self._rounds >= _RISES_AFTER and more <= self._most and saves(more):
            return more
        if self._rounds >= _FALLS_AFTER and fewer and saves(fewer):
            return fewer
        return self._number
