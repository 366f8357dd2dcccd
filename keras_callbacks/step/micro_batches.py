"""The micro-batches of a round, begun one by one; and all of them again, smaller, if memory runs short."""

from __future__ import annotations

from typing import Any

from hvd_hetero.balancer import Balancer
from hvd_hetero.data.sample_order import Cut
from hvd_hetero.rounds import MicroBatch
from keras_callbacks.pipeline.queue import RoundQueue


class MicroBatches:
    """Micro-batches of this rank in a round. ``repeats``: a round that runs out of memory may be done again."""

    def __init__(self, balancer: Balancer, *, repeats: bool) -> None:
        self.repeats = repeats
        self.batch: tuple[Any, ...] = ()
        """The batch of the current round, part by part, if it is kept to be done again."""
        self.begun = False
        """True if the current step's round has begun."""
        self.leaves = False
        """True if the gathered gradient is on its way to other ranks, so that the round cannot be done again."""
        self._balancer = balancer
        self._cut: Cut | None = None
        self._most = 0  # samples of a micro-batch, in a round that is done again
        self._pending: list[MicroBatch] = []
        self._offset = 0

    def clear(self) -> None:
        """Forget a round that is not finished."""
        self._pending.clear()
        self._most = 0

    def begin(self, queue: RoundQueue, size: int, batch: tuple[Any, ...]) -> int:
        """Begin a round, for which a batch of this size has arrived; return its samples."""
        most, self._most = self._most, 0
        if not most:
            self._cut = queue.take()
        cut = self._cut
        assert cut is not None, "it has just been taken, or is done again"
        self.batch, self.begun, self.leaves, self._offset = batch, True, False, 0
        # A round that was planned before the limit was known keeps to it, too.
        self._pending = cut.micro_batches(most or (self._balancer.meter.limit if self.repeats else 0))
        planned = sum(work.samples for work in self._pending)
        if size != max(planned, 1):
            if len(self._pending) > 1:
                raise ValueError(
                    f"a batch has {size} samples, and {planned} were planned; steps behind resize_batches must "
                    "leave the number of samples as it is"
                )
            # A user's map has changed the size. The batch is weighted by what it holds, and the table says so to all.
            self._pending = [cut.micro_batch(int(size))]
        return sum(work.samples for work in self._pending)

    def begin_next(self, input_s: float) -> tuple[int, int]:
        """Begin the next micro-batch; return where its rows of the batch begin, and how many they are."""
        work = self._pending.pop(0)
        self._balancer.begin(work, input_s)
        size = max(work.samples, 1)
        begin, self._offset = self._offset, self._offset + size
        return begin, size

    def begin_again(self) -> bool:
        """Prepare the round to be repeated in smaller micro-batches, as memory is short; False if none has begun."""
        balancer = self._balancer
        if not self.begun:
            return False
        if not self.repeats or self.leaves or not balancer.computing:
            when = "where gradients may have left for other ranks, or been applied, which is not done again"
            raise balancer.out_of_memory_error(when)
        self._most = balancer.out_of_memory(again=True)
        return True
