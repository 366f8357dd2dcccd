r"""Tables that come late: one for several rounds, read when a later one begins, so that no rank waits for it.

Gradients that another reducer sums carry no table along. So the ranks sum one by itself, beside their work:

    round          r - k … r - 1        r              r + 1
    this rank      works                sends a row    reads the table, decides

A row has the means of the k rounds since the last one. It leaves once a rank's work in them is done, and all ranks read
the table one round later. Until then they have met in the reducer, so the table is there. In between, plans stay as
they are. The table of round r decides the plan of round r + 2, or of the first one after those that a loader has fixed
ahead.

**How often.** Such a sum takes c seconds of a processor, whoever waits for it. With b the seconds of work in a round of
the busiest rank, by the last table,

    k = ceil(c / (0.01 b)),        at most K

keeps it within 1 % of a step. All ranks have the same table, and so the same k.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy.typing as npt

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import require_finite
from hvd_hetero.rounds import FinishedRound, MicroBatch, RoundPlan, RoundReport, RoundTable, checksum

# c: as measured with Gloo on two busy cores, and not measured with Horovod.
_SUM_CPU_S = 1.5e-3


class LateTables:
    """The rows that one rank sends, and what it makes of the tables."""

    def __init__(self, balancer: Balancer) -> None:
        self.every = 1
        """Rounds that one row tells of: k."""
        self.sent = 0
        """Rows sent so far, which says what each shows of the parameters."""
        self._balancer = balancer
        self._rounds: list[MicroBatch] = []
        self._short = False
        self._began_at = balancer.meter.batch.clock()
        self._under_way: tuple[int, int, RoundPlan, float, bool] | None = None

    @property
    def due(self) -> bool:
        """Whether the next row is to leave."""
        return len(self._rounds) >= self.every

    @property
    def unsent(self) -> bool:
        """Whether finished rounds are in no row yet."""
        return bool(self._rounds)

    def close_round(self) -> None:
        """Close the round at hand: the rank's work in it is done."""
        work, short = self._balancer.close_round()
        self._balancer.meter.close(self._planned(work.plan.samples[self._balancer.rank]))
        self._short = short and (self._short or not self._rounds)
        self._rounds.append(work)

    def row(self, **figures: float) -> npt.NDArray[Any]:
        """Return this rank's row of the table: the means of its rounds since the last one.

        ``figures``: of the parameters and their gradients, by the names of their columns.
        """
        # A row teaches no speed if all of its rounds were short. Some short ones do no harm, for their means lie on the
        # same line.
        balancer, meter = self._balancer, self._balancer.meter
        rounds, last = len(self._rounds), self._rounds[-1]
        # The plan of a whole round: at the end of an epoch some are shorter, or longer by a remainder that joins them.
        whole = balancer.plan().total
        plan = max((work.plan for work in reversed(self._rounds)), key=lambda plan: (plan.total <= whole, plan.total))
        meter.learn(short=self._short)
        prints = [work.plan.fingerprint(work.data) for work in self._rounds]
        report = RoundReport(
            fingerprint=checksum(struct.pack(f"<{rounds}q", *prints)),
            kernels=balancer.agreement.kernels,
            contents=sum(work.contents for work in self._rounds) / rounds,
            **figures,
            **meter.row(),
        )
        now = meter.batch.clock()
        self._under_way = balancer.rounds - 1, last.epoch, plan, (now - self._began_at) / rounds, self._short
        self._began_at = now
        self._rounds = []
        self.sent += 1
        meter.end_round(meter.batch.done_at)
        meter.do_deferred_work()
        return report.vector(balancer.rank, balancer.workers)

    def receive_table(self, summed: npt.NDArray[Any]) -> None:
        """Take the table of the latest rows: raise on every rank if one disagrees, else decide the next plan."""
        assert self._under_way is not None, "a row has been sent"
        (round, epoch, plan, elapsed_s, short), self._under_way = self._under_way, None
        balancer, table = self._balancer, RoundTable(summed, self._balancer.workers)
        balancer.agreement.require(round, table, self.sent - 1)
        if not balancer.agreement.allow_nan:
            require_finite(round, table.column("broken"))
        finished = FinishedRound(round, epoch, plan, table, elapsed_s)
        balancer.agree_late(finished, short=short)
        busiest_s = float(table.busy_s.max())
        # Of a step, 1 % is the budget of our own work. K = 64 is arbitrary.
        if 0.0 < busiest_s < math.inf:
            self.every = min(max(math.ceil(_SUM_CPU_S / (0.01 * busiest_s)), 1), 64)

    def _planned(self, samples: float) -> int:
        """Return in how many micro-batches the policy would have this share done: it plans by what one costs."""
        largest = self._balancer.meter.memory.user_bound
        return math.ceil(samples / largest) if largest else 1
