"""The rounds of this rank's data, between the pipeline, which prefetches batches, and the training, which has plans.

The pipeline asks for batch i of its iteration, ahead of the training by the prefetch at most; the same i gives the same
batch, however often it is asked for. The training takes the batches in the same order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hvd_hetero.balancer import Balancer
from hvd_hetero.data.cutter import Cutter
from hvd_hetero.data.sample_order import Cut, Part, SampleOrder
from hvd_hetero.errors import RoundStateError
from hvd_hetero.rounds import RoundTable

NO_TRAINING = (
    "more than the first batch of resize_batches was read without a training of its LoadBalance. Write "
    "model.fit(batches, callbacks=[balance]), or balance.batches(batches) in a loop of your own. Give predict and "
    "evaluate plain batches"
)

TOO_FAR_AHEAD = (
    "the data pipeline asked for a batch before its size was decided. Leave prefetching to resize_batches(…, "
    "prefetch=…), and put no shuffle, batch or parallel step behind it. Outside of training only the first batch "
    "can be read"
)


class RoundQueue:
    """The rounds of one rank's samples, in order: cut by the plan as soon as that is fixed, and trained on one by one.

    ``batch_of`` makes a batch of this rank's samples, and one to stand in if it has none. ``ends``: whether an epoch
    ends by itself. ``show`` gets the known batches before every round: the number of the first, and the batches.
    ``weight_of`` is the user's. ``has_micro_batches``: a round may have several micro-batches, whatever the policy.
    """

    def __init__(
        self,
        order: SampleOrder,
        balancer: Balancer,
        batch_of: Callable[[Part], Any],
        *,
        ends: bool = True,
        show: Callable[[int, list[Any]], None] = lambda first, batches: None,
        weight_of: Callable[..., Any] | None = None,
        has_micro_batches: bool = False,
    ) -> None:
        self.ends = ends
        """True: an epoch ends by itself, and fit does not need its length."""
        self.weight_of = weight_of
        self.has_micro_batches = has_micro_batches
        self._cutter = Cutter(order, balancer.planner, balancer.rank, ledger=balancer.ledger)
        self.balancer = balancer
        self._batch_of = batch_of
        self._show = show
        self.wanted_epoch = 0
        """The number of the epoch that the next iteration is, unless that is past; counted up otherwise."""
        self._fresh = True
        self._begun = False
        self._known: deque[tuple[Cut, Any]] = deque()  # rounds that are cut and not used yet, and their batches
        self._used = 0  # rounds of this iteration
        self.lock = threading.RLock()
        """Held while plans change, because a stream asks for them from a thread of TensorFlow."""
        self.spec: Any = None
        """Types and shapes of a batch, after the last ``map``."""
        self._cutter.begin()
        # A first look at a batch before training, as Keras takes to build a model, finds one. Fit without the callback
        # fails at the second.
        show(0, [self.part(0)])

    @property
    def traced(self) -> tuple[Callable[..., Any] | None, bool]:
        """The options on which the traced train step depends."""
        return self.weight_of, self.has_micro_batches

    @property
    def rounds(self) -> int | None:
        """Rounds of an epoch, if that is known beforehand."""
        return self._rounds_of(self._cutter.order.size)

    @property
    def rounds_left(self) -> int | None:
        """Rounds of the current epoch that are not cut, if that is known."""
        return self._rounds_of(self._cutter.order.remaining)

    @property
    def survives_resets(self) -> bool:
        """True if other ranks can go on in the middle of an epoch."""
        return self._cutter.order.survives_resets

    @property
    def at_end(self) -> bool:
        """Between rounds: True if all samples of the epoch are done."""
        with self.lock:
            return self.ends and self._used > 0 and not self._known and not self._cutter.more

    def cursor(self) -> dict[str, Any] | None:
        """Return, between rounds, where the epoch stands, for ``go_on``; None at its end, where the next one begins."""
        with self.lock:
            return None if self.at_end else self._cutter.state_dict()

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Make the next iteration begin where another one stood, whatever epoch is wanted."""
        with self.lock:
            self._cutter.load_state_dict(place)
            self._known.clear()
            self._used = 0
            self._fresh = False

    def part(self, index: int) -> Any:
        """Return this rank's part of round ``index`` of the iteration (the pipeline's question)."""
        with self.lock:
            if index == 0 and self._used:
                self._restart()
            if index < self._used:
                raise RoundStateError(
                    f"batch {index} of this iteration has been used already: iterate over the result of resize_batches "
                    "in one loop at a time"
                )
            while self._used + len(self._known) <= index:
                self._cut_next()
            return self._known[index - self._used][1]

    def prepare(self, *, new: bool) -> int:
        """Cut the round that training is about to take; return this rank's samples of it.

        ``new``: the iteration has just begun.
        """
        with self.lock:
            self._begun = True
            # By repeat(), or steps_per_epoch: one iteration of many epochs.
            again = self.at_end
            other = self._fresh and self.wanted_epoch != self._cutter.order.epoch
            if (new or again) and (self._used or other):
                # If the rounds of an epoch are not known beforehand, the pipeline has no end, and counts on.
                self._restart(counting_on=not new and self.rounds is None)
            if new or again:
                self.balancer.planner.note_epoch(self._cutter.order.size)
            self._cut_what_is_known()
            return self._known[0][0].samples

    def take(self) -> Cut:
        """Return the next round, to be trained on now."""
        with self.lock:
            assert self._known, "what trains has asked for the batch by `prepare`"
            cut, _ = self._known.popleft()
            self._used += 1
            self._fresh = False
            return cut

    def ends_after(self, done: int) -> bool:
        """Return whether data that this rank reads alone end with the current round, after ``done`` samples of it."""
        with self.lock:
            return self._cutter.order.ends_after(done)

    def finish(self, table: RoundTable) -> None:
        """Finish the current round, which is agreed; the table shows what every rank has done of it."""
        self._cutter.finish(table)

    def _rounds_of(self, samples: int | None) -> int | None:
        if samples is None or not self.balancer.planner.keeps_total:
            return None
        return self._cutter.rounds_of(samples)

    def _cut_what_is_known(self) -> None:
        """Cut, between rounds, the next batch, and those that follow as far as plans are fixed and the epoch goes."""
        if not self._known:
            self._cut_next()
        while len(self._known) <= self.balancer.planner.rounds_ahead and self._cutter.more:
            self._cut_next()
        # Shown, since the pipeline's own threads must not call Python: an iterator that is given up waits for them with
        # the interpreter locked, and would wait without end for one that waits for the interpreter.
        self._show(self._used, [batch for _, batch in self._known])

    def _cut_next(self) -> None:
        if self._cutter.ahead > self.balancer.planner.rounds_ahead:
            raise RoundStateError(TOO_FAR_AHEAD if self._begun else NO_TRAINING)
        cut = self._cutter.cut()
        self._known.append((cut, self._batch_of(cut.part)))

    def _restart(self, *, counting_on: bool = False) -> None:
        self._cutter.want(self.wanted_epoch if self._fresh else max(self._cutter.epoch, self.wanted_epoch))
        self._cutter.begin()
        self._known.clear()
        if not counting_on:
            self._used = 0
