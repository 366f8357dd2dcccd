"""What the graph asks of Python in the course of a round, from threads of TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_hetero.balancer import MicroBatch
from hvd_hetero.consistency import settings_of
from hvd_hetero.session import Session
from keras_callbacks import keras_versions
from keras_callbacks.pipeline.queue import RoundQueue, micro_batches

__all__ = ["RoundCalls"]

_WITNESS_NUMBERS = 4096  # of a variable, at its beginning: enough to tell updates apart, and soon read (arbitrary)


class RoundCalls:
    """One rank's balancer as the graph sees it; the base of ``LoadBalance``."""

    def __init__(self, training: Session, local_layers: tuple[Any, ...]) -> None:
        self.policy = training.policy
        self.balancer = training.balancer
        self.prefix = training.prefix
        self.mixing = training.mixing
        self.balancer.meter.rests = (
            False  # the table is there when `agree` is called, and others may wait for this rank
        )
        self.local_layers = local_layers
        self.queue: RoundQueue | None = None
        self.failure: BaseException | None = None
        """what went wrong in a call from the graph, which TensorFlow would tell as text alone"""
        self.stop_agreed = False
        """whether some rank wants to stop, as all know by the table"""
        self.samples = 0
        """of this rank in the latest round"""
        self.asked_at = self.agreed_at = time.perf_counter()
        self._pending: list[MicroBatch] = []
        self._offset = 0
        self._optimizer: Any = None
        self._witnesses: list[tf.Variable] = []
        self._witness = 0.0

    @property
    def wants_to_stop(self) -> bool:
        """Whether this rank would end training after the round at hand."""
        return False

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what it raises kept for the main thread."""

        def guarded(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                self.failure = error
                raise

        return guarded

    def begin_round(self, size: int) -> list[float]:
        """A batch of this size has arrived: the first micro-batch begins."""
        assert self.queue is not None, "the batch came from it"
        with self.queue.lock:
            cut = self.queue.take()
            self._pending = micro_batches(cut, self.balancer.rank)
            planned = sum(work.samples for work in self._pending)
            if size != max(planned, 1):
                if len(self._pending) > 1:
                    raise ValueError(
                        f"a batch of {size} samples came where {planned} were cut; what follows resize_batches must "
                        "leave their number as it is"
                    )
                # Weighted by what is really used. The table tells the others.
                self._pending = [MicroBatch(cut.plan, int(size), True, cut.epoch, cut.place)]
            self._offset = 0
            self.samples = sum(work.samples for work in self._pending)
            return self._begin_next(time.perf_counter() - self.asked_at)

    def proceed(self) -> list[float]:
        """A micro-batch is computed: another one begins, or the round ends, by its plan or because another rank has."""
        if self.balancer.closing or self.balancer.stop_early():
            share = self.share()
            self.samples = int(share[1])
            return [0.0, 0.0, 1.0, False, *share]
        self.balancer.pause()
        return self._begin_next(0.0)

    def share(self) -> list[float]:
        """What this rank has of the round, if the micro-batch at hand is its last: see ``Exchange``."""
        samples = self.balancer.samples_so_far
        planned = 0 if self.policy.weighs_twice else self.balancer.work.plan.total
        return [self.balancer.weight, samples, planned, self.balancer.work.samples / max(samples, 1)]

    def _begin_next(self, input_s: float) -> list[float]:
        work = self._pending.pop(0)
        self.balancer.begin(work, input_s)
        size = max(work.samples, 1)
        begin, self._offset = self._offset, self._offset + size
        return [begin, size, self.balancer.rescale, True, *self.share()]

    def learning_rate(self) -> tf.Tensor:
        """The optimizer's, in the graph; 1 where ranks may have different ones."""
        optimizer = self._optimizer
        # Under local updates ranks make different numbers of updates, by which a schedule goes.
        apart = self.policy.updates_locally and keras_versions.follows_schedule(optimizer)
        return tf.cast(tf.convert_to_tensor(1.0 if optimizer is None or apart else optimizer.learning_rate), tf.float64)

    def report(self, learning_rate: float) -> npt.NDArray[np.float64]:
        """The last gradient is there: this rank's row of the table, and whether it wants to stop."""
        others = {} if self._optimizer is None else keras_versions.hyper_parameters(self._optimizer)
        settings = settings_of([{"lr": learning_rate, **others}])
        ended = self.queue is not None and self.queue.ends_after(int(self.share()[1]))
        row = self.balancer.report(settings=settings, witness=self._witness, ended=ended)
        return np.append(row, float(self.wants_to_stop))

    def agree(self, summed: npt.NDArray[np.float64]) -> float:
        """The sum is there: what to multiply the gradients by, where they have waited for it."""
        assert self.queue is not None, "the round came from it"
        # Not as soon as the row has left: a call for it in every round takes longer than what is done once a second.
        self.balancer.waiting()
        with self.queue.lock:
            correction = self.balancer.agree(summed[:-1])
            assert self.balancer.finished is not None, "the round has just been agreed"
            self.queue.settle(self.balancer.finished.table)
        self.stop_agreed = bool(summed[-1] > 0)
        self.agreed_at = time.perf_counter()
        return correction

    def look(self) -> None:
        """A round is about to begin: note the norm of one trained variable, another one each time, for ``report``.

        0, which agrees with everything, where ranks may hold different ones. From outside the graph, whose threads
        would have to wait for one another to run an operation of ours: that took longer than all else here together.
        """
        if self._witnesses:
            variable = self._witnesses[self.balancer.rounds % len(self._witnesses)]
            value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            numbers = np.frombuffer(
                value, value.dtype.as_numpy_dtype, min(_WITNESS_NUMBERS, value.shape.num_elements())
            )
            self._witness = float(np.linalg.norm(numbers.astype(np.float64)))
