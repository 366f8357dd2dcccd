"""Cuts data into rounds, for every framework: plan in, this rank's micro-batches out, undone samples back.

    begin() ──> cut(), cut(), …                one rank's part of each round, ``rounds_ahead`` of training at most
                  └─> finish(table), …         once for each round that is agreed, in the same order

Every rank has its own cutter, and all cut alike: from the same order, by the same plans. Nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvd_hetero.data.ledger import Ledger
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_order import Cut, EpochEnd, Part, SampleOrder
from hvd_hetero.rounds import MicroBatch, RoundTable, SampleFigures

if TYPE_CHECKING:
    from hvd_hetero.planner import Planner


class Cutter:
    """One rank's rounds. ``drop_last`` leaves out a last one of fewer samples than are planned for it."""

    def __init__(
        self, order: SampleOrder, plans: Planner, rank: int, *, drop_last: bool = False, ledger: Ledger | None = None
    ) -> None:
        if ledger is not None and not isinstance(order, SharedPermutation):
            raise ValueError(
                "Telemetry(ledger=True) is for data with random access, since a replay asks for samples by their "
                "index, and these data are a stream; leave ledger out, or give arrays, or a dataset with __getitem__"
            )
        self.order = order
        self._ledger = ledger
        self.epoch = 0
        """The epoch that begins next."""
        self._plans, self._rank = plans, rank
        self._drop_last = drop_last
        self._goes_on = False
        order.end = EpochEnd.of(plans.policy, plans.room, joins=not drop_last)

    @property
    def epoch_at_hand(self) -> int:
        """The epoch that is to go on in its middle, or else the one that begins next."""
        return self.order.epoch if self._goes_on else self.epoch

    @property
    def more(self) -> bool:
        """True if the epoch holds another round."""
        return self.order.holds(self.least(self.ahead))

    @property
    def ahead(self) -> int:
        """How many rounds the next one to be cut is after the current one (between rounds: after the next one)."""
        return self.order.in_flight

    def rounds_of(self, samples: int) -> int:
        """Return how many rounds these are, of ``global_batch`` samples each, or as many as it is at present."""
        whole, rest = divmod(samples, self._batch())
        joins = whole > 0 and self.order.end.joins_with(self._plans.plan(), rest)
        return whole + (rest >= self.least() and not joins)

    def _batch(self, ahead: int = 0) -> int:
        """Return the samples planned for that round; the global batch, where that is not known beforehand."""
        plans = self._plans
        return plans.plan(ahead).total if plans.policy.keeps_total else plans.global_batch

    def least(self, ahead: int = 0) -> int:
        """Return how many samples the round that many rounds after the present one needs."""
        return self._batch(min(ahead, self._plans.rounds_ahead)) if self._drop_last else 1

    def want(self, epoch: int) -> None:
        """Make that epoch the next one, or continue it if it was stopped in its middle."""
        if not (self._goes_on and epoch == self.order.epoch):
            self.epoch = epoch
            self._goes_on = False

    def begin(self) -> bool:
        """Begin the next epoch, or go on in the middle of one. Return whether it begins."""
        begins, self._goes_on = not self._goes_on, False
        if begins:
            self.order.start(self.epoch)
            self.epoch += 1
        self.order.rounds_ahead = self._plans.rounds_ahead
        return begins

    def stop(self) -> None:
        """Stop here: the next ``begin`` continues the epoch, if anything is left of it."""
        self._goes_on = self.more

    def skip(self, rounds: int) -> None:
        """Skip the first rounds of the epoch, which were done as planned, in the next ``begin``."""
        if self._ledger is not None:
            raise ValueError(
                "Telemetry(ledger=True) needs rounds that are numbered through, and skip() (resuming a Trainer, too) "
                "numbers them from 0 again; leave ledger out"
            )
        self.begin()
        # Whichever rank had a sample, it is done: so costs need not be known.
        costs, self.order.costs = self.order.costs, None
        for _ in range(rounds):
            self.cut()
            self.finish_as_planned()
        self.order.costs = costs
        self.stop()

    def cut(self) -> Cut:
        """Cut the next round by its plan."""
        number = self._plans.rounds + self.ahead
        if self.order.costs is not None:
            self.order.costs.rule = self._plans.rule(self.ahead)
        cut = replace(self.order.take(self._plans.plan(self.ahead), self._rank), round=number)
        if self._ledger is not None and isinstance(self.order, SharedPermutation):
            self._ledger.cut(number, self.order.shares, first=self.ahead == 1)
        return cut

    def micro_batches(self) -> Iterator[tuple[MicroBatch, Part]]:
        """Cut round after round, and yield this rank's micro-batches with their samples, at least one of each round.

        So a loader that draws L of them ahead is at most L rounds ahead. A round that has ended early yields no more.
        """
        while self.more:
            cut = self.cut()
            begin = 0
            for number, work in enumerate(cut.micro_batches()):
                if work.round < self._plans.rounds:
                    break
                yield replace(work, number=number), cut.part[begin : begin + work.samples]
                begin += work.samples

    def finish(self, table: RoundTable) -> None:
        """Note what the ranks have done of the oldest round that is not finished."""
        self.order.finish(table.figures("samples"), table.figures("ended"))
        if self._ledger is not None:
            self._ledger.finish(table.figures("samples"), table.figures("weight"))

    def finish_as_planned(self) -> None:
        """Note that all ranks have done all of the oldest round that is not finished."""
        self.order.finish(())
        if self._ledger is not None:
            self._ledger.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands after the last finished round, as plain data."""
        return {"epoch": self.epoch, "least": self.least(), "order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load that place: the next ``begin`` continues its epoch, if anything was left of it."""
        self.order.load_state_dict(state["order"])
        self.epoch = state["epoch"]
        begun = state["order"]["epoch"] < state["epoch"]
        # By the batch of that time: with a larger one now, an epoch that was not over may hold no round, but still has
        # an end.
        self._goes_on = begun and self.order.holds(state["least"])


class Parts:
    """Hands out the samples of a micro-batch that memory does not hold, at most ``most`` at a time, until all are done.

    Right after a failed attempt (``memory_in_use``) the first part is a small one.
    """

    def __init__(self, work: MicroBatch, samples: list[Any], most: int, *, memory_in_use: bool) -> None:
        self._work = work
        self._waiting = deque([samples])
        self._most = most
        self._part: list[Any] = []
        self.memory_in_use = memory_in_use

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> tuple[MicroBatch, list[Any]]:
        """Take the next part: a micro-batch, the last of its round if the whole one was, and its samples."""
        part = self._waiting.popleft()
        # The names in the user's code still hold the graph of the failed attempt, until the code binds them again. A
        # small part does that before memory runs short again. Two samples, because a batch norm over one is an error.
        size = min(self._most, 2) if self.memory_in_use else -(-len(part) // -(-len(part) // self._most))
        if len(part) > size:
            self._waiting.appendleft(part[size:])
            part = part[:size]
        self._part = part
        last = self._work.last and not self._waiting
        work = self._work
        if work.figures is not None:
            # In proportion, which is nearly right: the lengths of this part alone are not known here.
            of = len(part) / work.samples
            work = replace(work, figures=SampleFigures(*(figure * of for figure in work.figures)))
        return replace(work, samples=len(part), last=last), part

    def again(self, most: int) -> None:
        """Hand out the part just taken once more, in smaller ones: it did not fit either."""
        self._waiting.appendleft(self._part)
        self._most, self.memory_in_use = most, True
