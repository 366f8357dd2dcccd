"""The rounds of this rank's data, in order: cut by the plan when the pipeline asks, used up by training one by one.

Two sides meet here. The pipeline asks for batch i of its iteration, ahead of the training by the prefetch at most. The
training takes the batches in the same order, and is what knows the plans. So before each round all batches are cut
whose plans are known, and shown to the pipeline; the same i gives the same batch, however often it is asked for.

Nothing in the pipeline's own threads calls Python: an iterator that is given up waits for its threads, with the
interpreter locked, and would wait for ever for one that waits for the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvd_hetero.balancer import Balancer, MicroBatch
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.errors import RoundStateError
from hvd_hetero.rounds import RoundPlan, RoundTable

__all__ = ["NO_TRAINING", "TOO_FAR_AHEAD", "ArrayOrder", "Cut", "Order", "RoundQueue", "micro_batches"]

NO_TRAINING = (
    "more of resize_batches was asked for than its first batch, and no training with its LoadBalance is on: write "
    "model.fit(batches, callbacks=[balance]), or balance.batches(batches) in a loop of your own"
)

TOO_FAR_AHEAD = (
    "the data pipeline asked for a batch before its size was decided: leave prefetching to "
    "resize_batches(…, prefetch=…), and put no shuffle, batch or parallel step behind it; outside of training only the "
    "first batch can be looked at"
)


@dataclass(slots=True)
class Cut:
    """One round as it was cut."""

    plan: RoundPlan
    """shortened where the epoch ends; the same on every rank"""
    part: Any
    """what this rank has of it: never empty, for a rank without samples gets one to stand in"""
    samples: int
    """of this rank: fewer than planned in the round in which data that it reads alone end"""
    epoch: int
    place: int
    """a checksum of what ranks must have in common to take the same round"""


class Order(Protocol):
    """What rounds are cut from: an epoch's samples, in this rank's view of them."""

    length: int | None
    """samples of an epoch over all ranks; None where that is not known"""
    ends: bool
    """whether an epoch ends by itself"""
    survives_resets: bool
    """whether other ranks can go on where these have stopped in an epoch"""

    def start(self, epoch: int) -> None:
        """Begin an epoch."""

    @property
    def over(self) -> bool:
        """Whether rounds have taken all samples of this epoch, as far as all ranks know."""

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None where that is not known."""

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """The next round, by this plan."""

    def ends_after(self, done: int) -> bool:
        """Whether data that this rank reads alone end with the round at hand, of which it has done so many samples."""

    def settle(self, table: RoundTable) -> None:
        """The oldest round that was taken is agreed; the table tells what every rank has done of it."""

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, as plain data. Rounds that are not agreed count as not done."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where such an epoch stood."""


class ArrayOrder:
    """Rounds as indices into arrays: every sample once per epoch, by one permutation that all ranks share."""

    ends = True
    survives_resets = True

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        self._permutation = SharedPermutation(length, shuffle=shuffle, seed=seed)
        self.length: int | None = length

    def start(self, epoch: int) -> None:
        """Begin an epoch."""
        self._permutation.start(epoch)

    @property
    def over(self) -> bool:
        """Whether rounds have taken all samples of this epoch."""
        return self._permutation.remaining == 0

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken."""
        return self._permutation.remaining

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """The next round, as indices; the first sample stands in where this rank has none."""
        place = self._permutation.place
        plan, indices = self._permutation.take(plan, rank)
        part = indices if len(indices) else np.zeros(1, dtype=np.int64)
        return Cut(plan, part, len(indices), self._permutation.epoch, place)

    def ends_after(self, done: int) -> bool:
        """All ranks share the samples: they end for all."""
        return False

    def settle(self, table: RoundTable) -> None:
        """What was left undone goes back to the front."""
        self._permutation.settle(table.figures("samples"))

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        return self._permutation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where such an epoch stood."""
        self._permutation.load_state_dict(state)


class RoundQueue:
    """The rounds of one rank, from the order to the training."""

    def __init__(
        self, order: Order, balancer: Balancer, show: Callable[[int, list[Any]], None] = lambda first, parts: None
    ) -> None:
        self._order = order
        self._balancer = balancer
        self._show = show
        self._epoch = 0
        self._wanted_epoch = 0
        self._fresh = True
        self._begun = False
        self._cuts: dict[int, Cut] = {}
        self._next = 0
        self._taken = 0
        self.lock = threading.RLock()
        """held while plans change: a stream asks for them from a thread of TensorFlow"""
        self.spec: Any = None
        """types and shapes of a batch, behind whatever was mapped last"""
        order.start(0)
        # Who looks at a batch before training, as Keras does to build a model, finds one. Fit without the callback
        # fails at the second.
        show(0, [self._ensure(0).part])

    def serves(self, balancer: Balancer) -> bool:
        """Whether its rounds are cut by the plans of this one."""
        return self._balancer is balancer

    @property
    def wanted_epoch(self) -> int:
        """The number of the epoch that the next iteration is, if that is not past already; counted up otherwise."""
        return self._wanted_epoch

    @property
    def rounds(self) -> int | None:
        """Rounds of an epoch, where that is known beforehand."""
        return self._rounds_of(self._order.length)

    @property
    def rounds_left(self) -> int | None:
        """Rounds of the epoch at hand that are not cut, where that is known."""
        return self._rounds_of(self._order.remaining)

    @property
    def survives_resets(self) -> bool:
        """Whether other ranks can go on in the middle of an epoch."""
        return self._order.survives_resets

    @property
    def ends(self) -> bool:
        """Whether an epoch ends by itself, and fit need not be told how long it is."""
        return self._order.ends

    @property
    def at_end(self) -> bool:
        """Between rounds: whether all samples of the epoch are done."""
        with self.lock:
            return self.ends and self._next == self._taken > 0 and self._order.over

    def want_epoch(self, epoch: int) -> None:
        """Have the next iteration be the epoch of that number."""
        self._wanted_epoch = epoch

    def place(self) -> dict[str, Any] | None:
        """Between rounds: where the epoch stands, for ``go_on``; None at its end, where the next one begins."""
        with self.lock:
            return None if self.at_end else {"epoch": self._epoch, "order": self._order.state_dict()}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Have the next iteration begin where another one stood, whatever epoch is wanted."""
        with self.lock:
            self._order.load_state_dict(place["order"])
            self._epoch = place["epoch"]
            self._cuts.clear()
            self._next = self._taken = 0
            self._fresh = False

    def part(self, index: int) -> Any:
        """What this rank has of round ``index`` of the iteration (the pipeline's question)."""
        with self.lock:
            if index == 0 and self._taken:
                self._restart()
            return self._ensure(index).part

    def prepare(self, *, new: bool) -> int:
        """Cut the round that training is about to take; returns this rank's samples of it.

        ``new`` says that the iteration has just begun.
        """
        with self.lock:
            self._begun = True
            again = self.at_end  # by repeat(), or steps_per_epoch: one iteration of many epochs
            if (new or again) and (self._taken or (self._fresh and self._wanted_epoch != self._epoch)):
                # Where nobody knew the rounds of an epoch beforehand, the pipeline has no end, and counts on.
                self._restart(counting_on=not new and self.rounds is None)
            self._ensure(self._taken)
            self._cut_what_is_known()
            return self._cuts[self._taken].samples

    def take(self) -> Cut:
        """The next round, to be trained on now."""
        with self.lock:
            cut = self._cuts.pop(self._taken, None)
            if cut is None:
                raise RoundStateError(
                    "a batch came that was not cut: train by model.fit(resize_batches((x, y), balance), "
                    "callbacks=[balance])"
                )
            self._taken += 1
            self._fresh = False
            return cut

    def ends_after(self, done: int) -> bool:
        """Whether data that this rank reads alone end with the round at hand, of which it has done so many samples."""
        with self.lock:
            return self._order.ends_after(done)

    def settle(self, table: RoundTable) -> None:
        """The round at hand is agreed; the table tells what every rank has done of it."""
        self._order.settle(table)

    def _rounds_of(self, samples: int | None) -> int | None:
        if samples is None or not self._balancer.policy.keeps_total:
            return None
        return -(-samples // self._balancer.global_batch)

    def _cut_what_is_known(self) -> None:
        """Between rounds: the next batch, and those that follow as far as plans are fixed and the epoch goes."""
        last = self._taken + self._balancer.lead
        while self._next <= last and not self._order.over:
            self._ensure(self._next)
        self._show(self._taken, [self._cuts[i].part for i in range(self._taken, self._next)])

    def _restart(self, *, counting_on: bool = False) -> None:
        self._epoch = self._wanted_epoch if self._fresh else max(self._epoch + 1, self._wanted_epoch)
        self._order.start(self._epoch)
        self._cuts.clear()
        self._next = self._taken = self._taken if counting_on else 0

    def _ensure(self, index: int) -> Cut:
        while self._next <= index:
            # Between rounds all that was taken is agreed; during one, the last that was taken is not.
            number = self._balancer.rounds + self._next - self._taken + self._balancer.in_round
            ahead = number - self._balancer.rounds
            if ahead > self._balancer.lead:
                raise RoundStateError(TOO_FAR_AHEAD if self._begun else NO_TRAINING)
            self._cuts[self._next] = self._order.take(self._balancer.plan(ahead), self._balancer.rank)
            self._next += 1
        if index not in self._cuts:
            raise RoundStateError(
                f"batch {index} of this iteration has been used already: iterate over the result of resize_batches in "
                "one place at a time"
            )
        return self._cuts[index]


def micro_batches(cut: Cut, rank: int) -> list[MicroBatch]:
    """What this rank does in a round, one micro-batch after the other."""
    sizes = cut.plan.sizes(rank, cut.samples) or (0,)
    return [MicroBatch(cut.plan, size, j == len(sizes), cut.epoch, cut.place) for j, size in enumerate(sizes, start=1)]
