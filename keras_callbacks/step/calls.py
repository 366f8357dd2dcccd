"""Calls from the graph into Python in the course of a round, from threads of TensorFlow."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_hetero.consistency import WatchedParameter, kernels, piece_of, require_finite, settings_of, shown
from hvd_hetero.data.sample_order import Cut
from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.gradient_noise import rounds_per_measurement
from hvd_hetero.measurement.memory_errors import DONE_IN_PARTS, not_done_again
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.session import Session
from keras_callbacks.keras_versions import follows_schedule, hyper_parameters, scales_losses
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.step.device import Device

logger = logging.getLogger(__name__)

SHARE = 5
"""Numbers in a rank's share of a round: the weight of its gathered gradient in the sum; its samples, or what else they
count; what all ranks were to count, or 0 if the sum is not to be corrected by what they did; the weight of the gathered
gradient in the mean over the rank's own samples; 1 if the squares of the round's gradients are taken."""
_NOT_MEASURED = (0.0, 0.0, 0.0)

_TWICE = (
    "weighted_gradients was called twice for one batch, and a round sums gradients once. Call it once for every batch, "
    "with all variables and the sum of the losses; torch_hooks takes several losses, with an optimizer each"
)


class Fit(Protocol):
    """The training that the rounds belong to."""

    @property
    def queue(self) -> RoundQueue | None:
        """Where its batches come from, once ``resize_batches`` has said so."""

    @property
    def wants_to_stop(self) -> bool:
        """True if this rank would end it after the current round."""


class RoundCalls:
    """One rank's balancer as the graph sees it."""

    def __init__(self, core: Session, fit: Fit, device: Device | None = None, *, apart: bool = False) -> None:
        self.policy = core.policy
        self.balancer = core.balancer
        self.prefix = core.prefix
        self.apart = apart
        """True if the table of a round travels by itself, so that no gradient waits for a device's clock."""
        self.failure: BaseException | None = None
        """The error of a call from the graph, which TensorFlow would pass on only as text."""
        self.stop_agreed = False
        """True if some rank wants to stop, as all know by the table."""
        self.samples = 0
        """This rank's samples in the latest round."""
        self._asked_at = self._agreed_at = time.perf_counter()
        core.meter.rests = False  # the table is there when `agree` is called, and others may wait for this rank
        self._device = device
        self._timed = device if core.goes_by_time else None
        core.meter.queued = device is not None and self._timed is None
        gathers = core.policy.accumulates and not core.policy.updates_locally
        self.repeats = gathers and (device is not None or core.meter.learner.profile is not None)
        """True if a round that runs out of memory is done again, until its gathered gradient leaves."""
        self.batch: tuple[Any, ...] = ()
        """The batch of the current round, part by part, if it is kept to be done again."""
        self._cut: Cut | None = None
        self._most = 0  # of a micro-batch, in a round that is done again
        self._begun = False  # whether the current step's round has
        self._leaves = False  # whether the gathered gradient does
        self._fit = fit
        self._pending: list[MicroBatch] = []
        self._offset = 0
        self._optimizer: Any = None
        self._witnesses: list[tf.Variable] = []
        self._watched: list[WatchedParameter] = []
        self._shown = 0.0, 0.0
        self._every = 0
        self._squares = _NOT_MEASURED
        with tf.device("CPU:0"):
            self.rate_factor = tf.Variable(1.0, trainable=False, dtype=tf.float64)
            """The factor of the learning rate in the update of the round that was agreed."""
        self.looks = False
        """True if gradients are checked for NaN. Not on a device, for which the host would have to wait."""
        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        own = None if device is None else core.balancer.rank  # some kernels of a device add in any order
        core.balancer.agreement.kernels = kernels(tf.__version__, threads, os.environ.get("TF_ENABLE_ONEDNN_OPTS"), own)

    def start(self, optimizer: Any, witnesses: list[tf.Variable]) -> None:
        """Begin rounds of this optimizer, whatever was before; ``witnesses`` are the same on all ranks after each."""
        self._optimizer = optimizer
        self._witnesses = witnesses
        self._watched = [
            WatchedParameter(v.name.removesuffix(":0"), int(v.shape.num_elements()), v.dtype.size) for v in witnesses
        ]
        self._shown = 0.0, 0.0
        self.balancer.agreement.watch(self._watched)
        self.looks = not (self.balancer.agreement.allow_nan or scales_losses(optimizer) or self._device is not None)
        self._squares = _NOT_MEASURED
        self._pending.clear()
        self.balancer.abandon()
        self._most = 0
        self.failure = None
        self.stop_agreed = False

    def end(self) -> None:
        """Let go of the optimizer."""
        self._optimizer = None

    def ask(
        self, function: Callable[..., Any], numbers: int, *inputs: Any, after: Sequence[Any] = (), timed: bool = False
    ) -> tf.Tensor:
        """Call Python from the graph, after the tensors in ``after`` are there; the answer is so many float64.

        ``timed``: the call reads the clock, so a device must have computed them, too.
        """
        tensors = [t for t in after if isinstance(t, tf.Tensor)]
        passed = [] if self._timed is None or not timed else [self._timed.passed(tensors)]

        def plainly(*arguments: Any) -> Any:
            return np.asarray(function(*arguments[: len(inputs)]), dtype=np.float64).reshape(numbers)

        with tf.device("CPU:0"), tf.control_dependencies(tensors):
            answer = tf.numpy_function(self.guard(plainly), [*inputs, *passed], tf.float64)
        answer.set_shape([numbers])
        return answer

    def host(self) -> AbstractContextManager[Any]:
        """Return the device for a batch: a GPU holds only its current micro-batch, and has no memory for more."""
        return contextlib.nullcontext() if self._device is None else tf.device("CPU:0")

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with what it raises kept for the main thread."""

        def guarded(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                self.failure = error
                raise

        return guarded

    def prepare(self) -> None:
        """Note the time before a batch is asked for, and a piece of one trained variable, for ``report``.

        Another variable each time. 0, which agrees with everything, if ranks may hold different ones. From outside
        the graph, whose threads would have to wait for one another to run an operation of ours: that took longer than
        all else here together.
        """
        self._begun = False
        if self._witnesses:
            which, part = piece_of(self.balancer.rounds, self._watched)
            variable = self._witnesses[which]
            value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            if self._device is not None:  # what is not looked at stays there
                value, part = tf.reshape(value, [-1])[part], slice(None)
            numbers = np.frombuffer(value, variable.dtype.as_numpy_dtype)[part]
            self._shown = shown(numbers, numbers.view(np.uint8))
        self._asked_at = time.perf_counter()

    def begin_whole_round(self) -> None:
        """Begin a round of one micro-batch, whatever the plan; the batch has arrived."""
        queue = self._fit.queue
        assert queue is not None, "the batch came from it"
        with queue.lock:
            cut = queue.take()
            self.samples = cut.samples
            parts = cut.micro_batches()
            work = parts[0] if len(parts) == 1 else cut.micro_batch(cut.samples)
            self.balancer.begin(work, time.perf_counter() - self._asked_at)

    def begin_round(self, size: int, *batch: Any) -> list[float]:
        """Begin the first micro-batch of a round; a batch of this size has arrived, and is kept, to be done again."""
        queue = self._fit.queue
        assert queue is not None, "the batch came from it"
        with queue.lock:
            most, self._most = self._most, 0
            if not most:
                self._cut = queue.take()
            cut = self._cut
            assert cut is not None, "it has just been taken, or is done again"
            self.batch = batch
            self._begun, self._leaves = True, False
            # A round that was planned before the limit was known keeps to it, too.
            self._pending = cut.micro_batches(most or (self.balancer.meter.limit if self.repeats else 0))
            planned = sum(work.samples for work in self._pending)
            if size != max(planned, 1):
                if len(self._pending) > 1:
                    raise ValueError(
                        f"a batch of {size} samples came where {planned} were cut; what follows resize_batches must "
                        "leave their number as it is"
                    )
                # Weighted by the actual size. The others see it in the table.
                self._pending = [cut.micro_batch(int(size))]
            self._offset = 0
            self.samples = sum(work.samples for work in self._pending)
            return self._begin_next(time.perf_counter() - self._asked_at)

    def proceed(self, *weight: float) -> list[float]:
        """End a micro-batch; begin another one, or end the round, by its plan or because another rank has.

        With the micro-batch's weight, what is gathered is weighted.
        """
        if weight:
            self.weigh(*weight)
        if self.balancer.closing or self.balancer.stop_early():
            share = self.share()
            if weight:
                _, counts, planned, _, measured = share
                share = [float(counts > 0), counts, planned, planned / counts if counts else 0.0, measured]
            self.samples = self.balancer.samples_so_far
            self._leaves = True
            return [0.0, 0.0, 1.0, False, *share, 0.0]
        self.balancer.pause()
        return self._begin_next(0.0)

    def begin_again(self) -> bool:
        """Have all of the round done again, in smaller micro-batches, as memory is short; False if none has begun."""
        balancer, work = self.balancer, self.balancer.work
        if not self._begun:
            return False
        if not self.repeats or self._leaves or not balancer.computing:
            when = "where gradients may have left for other ranks, or been applied, which is not done again"
            raise not_done_again(balancer.rounds - (not balancer.in_round), balancer.rank, work.samples, when)
        self._most = balancer.out_of_memory(again=True)
        logger.warning(DONE_IN_PARTS, balancer.rounds, balancer.rank, work.samples, self._most, balancer.meter.limit)
        self._asked_at = time.perf_counter()
        return True

    def share(self) -> list[float]:
        """Return this rank's share of the round, if the current micro-batch is its last: `SHARE` numbers."""
        own = self.balancer.work.counts
        counts = self.balancer.meter.round.weight + own
        planned = 0 if self.policy.weighs_twice else self.balancer.gradient.planned(self.balancer.work)
        measured = self._every > 0 and self.balancer.measures(self._every)
        return [self.balancer.gradient.factor, counts, planned, own / counts if counts else 0.0, float(measured)]

    def measure(self, numbers: int) -> int:
        """Take the squares of gradients of so many numbers in one of k rounds from now on; return k, or 0: never.

        Only where the batch goes by them: with the branch for one round of 64 in its graph, a step of 100 tensors took
        0.9 % longer (error 0.4 %), measured in turns with the same training without it.
        """
        measures = self.balancer.planner.goodput is not None and self.balancer.workers > 1
        self._every = rounds_per_measurement(numbers, decides=True) if measures else 0
        return self._every

    def weigh(self, weight: float) -> list[float]:
        """Let the current micro-batch count so much; return this rank's share, if it is the last: `SHARE` numbers."""
        balancer, work = self.balancer, self.balancer.work
        if not 0.0 <= weight < math.inf:
            raise ValueError(
                f"round {balancer.rounds}: {work.samples} samples of rank {balancer.rank} weigh {weight}, and a weight "
                "must be finite and at least 0. Have weight_of return what the mean loss is over, as a number of tokens"
            )
        balancer.weigh(float(weight) if work.samples else 0.0)
        return self.share()

    def _begin_next(self, input_s: float) -> list[float]:
        work = self._pending.pop(0)
        self.balancer.begin(work, input_s)
        size = max(work.samples, 1)
        begin, self._offset = self._offset, self._offset + size
        return [begin, size, self.balancer.gradient.rescale, True, *self.share(), work.samples / work.plan.total]

    def learning_rate(self) -> tf.Tensor:
        """Return the optimizer's learning rate, in the graph; 1 if ranks may have different ones."""
        optimizer = self._optimizer
        # Under local updates ranks make different numbers of updates, and a schedule follows them.
        apart = self.policy.updates_locally and follows_schedule(optimizer)
        return tf.cast(tf.convert_to_tensor(1.0 if optimizer is None or apart else optimizer.learning_rate), tf.float64)

    def report(self, learning_rate: float, broken: float = 0.0) -> npt.NDArray[np.float64]:
        """Return this rank's row of the table, and whether it wants to stop; the last gradient is ready."""
        if not self.balancer.computing:
            raise RoundStateError(_TWICE)
        others = {} if self._optimizer is None else hyper_parameters(self._optimizer)
        settings = settings_of([{"lr": learning_rate, **others}])
        queue = self._fit.queue
        ended = queue is not None and queue.ends_after(self.balancer.samples_so_far)
        weighs = int(queue is not None and queue.weight_of is not None)  # as all ranks must, or none
        witness, bits = self._shown
        row = self.balancer.report(
            settings=settings, witness=witness, bits=bits, broken=broken, ended=ended, trained=weighs,
            squares=self._squares,
        )  # fmt: skip
        return np.concatenate([row, [float(self._fit.wants_to_stop)]])

    def agree(self, summed: npt.NDArray[np.float64], *squares: npt.NDArray[np.float64]) -> tuple[float, float, float]:
        """Take the sum; return the factors for the gradients, if they have waited for it, and for the learning rate.

        Also all ranks' samples over those that were planned.
        ``squares``: those of what this rank has sent, and of the sums, if this round's are taken.
        """
        queue = self._fit.queue
        assert queue is not None, "the round came from it"
        # Not as soon as the row has left: a call for it in every round takes longer than the work done once a second.
        self.balancer.waiting()
        with queue.lock:
            correction = self.balancer.agree(summed[:-1])
            assert self.balancer.finished is not None, "the round has just been agreed"
            queue.finish(self.balancer.finished.table)
        self._squares = _NOT_MEASURED
        if squares and squares[0][1] > 0.0:  # zeros stand for those that were not taken
            samples, own, mean = self.balancer.square_factors(correction)
            self._squares = samples, own * squares[0][0], mean * squares[0][1]
        self.stop_agreed = bool(summed[-1] > 0)
        self._agreed_at = time.perf_counter()
        self.balancer.require_finite()
        table, plan = self.balancer.finished.table, self.balancer.finished.plan
        return correction, self.balancer.planner.rate_factor, table.total / plan.total

    def refuse(self, broken: npt.NDArray[np.float64]) -> None:
        """Raise before the update, which does not wait for the table: these ranks' gradients are not finite."""
        require_finite(self.balancer.rounds - (not self.balancer.in_round), broken)

    def applied(self) -> None:
        """Note that the update of the round has been made, or is queued."""
        if self._timed is not None:
            self._timed.wait()
        self.balancer.meter.applied(time.perf_counter() - self._agreed_at)
        self.batch = ()
