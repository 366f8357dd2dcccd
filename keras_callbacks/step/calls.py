"""Calls from the graph into Python in the course of a round, from threads of TensorFlow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import WatchedParameter, kernels, norm_and_checksum, piece_of, require_finite, settings_of
from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.gradient_noise import rounds_per_measurement
from hvd_hetero.session import Session
from keras_callbacks.fit_progress import FitProgress
from keras_callbacks.keras_versions import follows_schedule, hyper_parameters, scales_losses
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.step.device import Device, HostCalls
from keras_callbacks.step.micro_batches import MicroBatches


class RoundWeights(IntEnum):
    """The place of each number in a rank's weights of a round, which a graph gets as one tensor."""

    GRADIENT = 0  # the weight of its gathered gradient in the sum over the ranks
    COUNTED = 1  # its samples, or the sum of their weights
    PLANNED = 2  # the same of all ranks as planned; 0 if the sum is not to be corrected by what they did
    OWN_MEAN = 3  # the weight of its gathered gradient in the mean over its own samples
    TAKES_SQUARES = 4  # 1 if the squares of the round's gradients are taken


_TWICE = (
    "weighted_gradients was called twice for one batch, and a round sums gradients once. Call it once for every batch, "
    "with all variables and the sum of the losses; torch_hooks takes several losses, with an optimizer each"
)


class RoundCalls:
    """The calls that a graph makes into one rank's balancer in the course of a round."""

    def __init__(
        self, core: Session, course: FitProgress, device: Device | None = None, *, apart: bool = False
    ) -> None:
        self.balancer = core.balancer
        self.prefix = core.prefix
        self.host = HostCalls(device, timed=core.depends_on_time)
        core.meter.queued = device is not None and not core.depends_on_time
        # Keras has no time in which only others compute: as `agree` is called, the table is there, and they may wait.
        core.meter.defers_work = False
        gathers = core.policy.accumulates and not core.policy.updates_locally
        may_repeat = gathers and (device is not None or core.meter.learner.profile is not None)
        self.micro_batches = MicroBatches(core.balancer, repeats=may_repeat)
        self.squares = SquareNorms(core.balancer)
        self.parameter_norms = ParameterNorms()
        self.apart = apart
        """True if the table travels in a message of its own, so that no gradient waits for a device's clock."""
        self.stop_agreed = False
        """True if the table says that some rank wants to stop."""
        self.samples = 0
        """This rank's samples in the latest round."""
        self.looks = False
        """True if gradients are checked for NaN. Not on a device, for which the host would have to wait."""
        with tf.device("CPU:0"):
            self.rate_factor = tf.Variable(1.0, trainable=False, dtype=tf.float64)
            """The factor of the learning rate in the update of the round that was agreed."""
        self._asked_at = self._agreed_at = time.perf_counter()
        self._course = course
        self._optimizer: Any = None
        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        # Some kernels of a device add in any order, so that ranks with devices may differ in the last bits.
        own = None if device is None else core.balancer.rank
        core.balancer.agreement.kernels = kernels(tf.__version__, threads, os.environ.get("TF_ENABLE_ONEDNN_OPTS"), own)

    def start(self, optimizer: Any, parameter_norms: list[tf.Variable]) -> None:
        """Begin rounds of this optimizer; ``parameter_norms`` are the same on all ranks after each round."""
        self._optimizer = optimizer
        self.parameter_norms = ParameterNorms(parameter_norms)
        agreement = self.balancer.agreement
        agreement.watch(self.parameter_norms.watched)
        self.looks = not (agreement.allow_nan or scales_losses(optimizer) or self.host.device is not None)
        self.squares.forget()
        self.micro_batches.clear()
        self.balancer.discard_round()
        self.host.failure = None
        self.stop_agreed = False

    def end(self) -> None:
        """Drop the reference to the optimizer, so that it can be freed."""
        self._optimizer = None

    def prepare(self) -> None:
        """Note the time before a batch is asked for, and read a piece of one trained variable for ``report``."""
        self.micro_batches.begun = False
        self.parameter_norms.look(self.balancer.rounds, on_device=self.host.device is not None)
        self._asked_at = time.perf_counter()

    def begin_whole_round(self) -> None:
        """Begin a round of one micro-batch, even if several are planned; its batch has arrived."""
        queue = self._queue()
        with queue.lock:
            cut = queue.take()
            self.samples = cut.samples
            parts = cut.micro_batches()
            work = parts[0] if len(parts) == 1 else cut.micro_batch(cut.samples)
            self.balancer.begin(work, time.perf_counter() - self._asked_at)

    def begin_round(self, size: int, *batch: Any) -> list[float]:
        """Begin the first micro-batch of a round, whose batch of this size has arrived; keep what is given of it."""
        queue = self._queue()
        with queue.lock:
            self.samples = self.micro_batches.begin(queue, size, batch)
            return self._begin_next(time.perf_counter() - self._asked_at)

    def begin_again(self) -> bool:
        """Prepare the round to be repeated in smaller micro-batches, as memory is short; False if none has begun."""
        again = self.micro_batches.begin_again()
        self._asked_at = time.perf_counter()
        return again

    def proceed(self, *weight: float) -> list[float]:
        """End a micro-batch, with its weight if that is not its samples; begin another one, or end the round."""
        balancer = self.balancer
        if weight:
            self.weigh(*weight)
        if balancer.closing or balancer.stop_early():
            # By plan, or since another rank has finished. What is gathered is weighted already, so it counts whole.
            _, counts, planned, _, measured = self.weights()
            own = balancer.gradient.planned(balancer.work) / counts if counts else 0.0
            self.samples = balancer.samples_so_far
            self.micro_batches.leaves = True
            return [0.0, 0.0, False, float(counts > 0), counts, planned, own, measured, 0.0]
        balancer.pause()
        return self._begin_next(0.0)

    def _begin_next(self, input_s: float) -> list[float]:
        begin, size = self.micro_batches.begin_next(input_s)
        work = self.balancer.work
        return [begin, size, True, *self.weights(), work.samples / work.plan.total]

    def weights(self) -> list[float]:
        """Return this rank's `RoundWeights`, if the current micro-batch is the round's last."""
        balancer, own = self.balancer, self.balancer.work.gradient_weight
        counts = balancer.meter.round.weight + own
        planned = 0 if balancer.policy.shrinks_early_steps else balancer.gradient.planned(balancer.work)
        own_mean = own / counts if counts else 0.0
        return [balancer.gradient.factor, counts, planned, own_mean, float(self.squares.due)]

    def weigh(self, weight: float) -> list[float]:
        """Set the weight of the current micro-batch; return this rank's `RoundWeights`, if it is the round's last."""
        balancer, work = self.balancer, self.balancer.work
        if not 0.0 <= weight < math.inf:
            raise ValueError(
                f"round {balancer.rounds}: {work.samples} samples of rank {balancer.rank} weigh {weight}, and a weight "
                "must be finite and at least 0. Have weight_of return what the mean loss is over, as a number of tokens"
            )
        balancer.weigh(float(weight) if work.samples else 0.0)
        return self.weights()

    def learning_rate(self) -> tf.Tensor:
        """Return the optimizer's learning rate, in the graph; 1 if ranks may have different ones."""
        optimizer = self._optimizer
        # Under local updates ranks make different numbers of updates, and a schedule follows them.
        apart = self.balancer.policy.updates_locally and follows_schedule(optimizer)
        return tf.cast(tf.convert_to_tensor(1.0 if optimizer is None or apart else optimizer.learning_rate), tf.float64)

    def report(self, learning_rate: float, broken: float = 0.0) -> npt.NDArray[np.float64]:
        """Stop the clock, as the last gradient is ready; return this rank's row, and whether it wants to stop."""
        if not self.balancer.computing:
            raise RoundStateError(_TWICE)
        others = {} if self._optimizer is None else hyper_parameters(self._optimizer)
        settings = settings_of([{"lr": learning_rate, **others}])
        queue = self._course.queue
        ended = queue is not None and queue.ends_after(self.balancer.samples_so_far)
        # In the row, so that a rank without the others' weight_of is found in round 0, and not by its parameters later.
        weighs = int(queue is not None and queue.weight_of is not None)
        parameter_norm, bits = self.parameter_norms.shown
        row = self.balancer.report(
            settings=settings, parameter_norm=parameter_norm, bits=bits, broken=broken, ended=ended, trained=weighs,
            squares=self.squares.latest,
        )  # fmt: skip
        return np.concatenate([row, [float(self._course.wants_to_stop)]])

    def agree(self, summed: npt.NDArray[np.float64], *squares: npt.NDArray[np.float64]) -> tuple[float, float, float]:
        """Take the summed table; return the factors of gradients and learning rate, and done over planned samples.

        ``squares``: those of what this rank has sent, and of the sums, if this round's are taken.
        """
        queue = self._queue()
        # Not as soon as the row has left, which would hide the deferred work: a call for it in every round takes longer
        # than the work, which is done about once a second.
        self.balancer.waiting()
        with queue.lock:
            correction = self.balancer.agree(summed[:-1])
            assert self.balancer.finished is not None, "the round has just been agreed"
            queue.finish(self.balancer.finished.table)
        self.squares.take(correction, *squares)
        self.stop_agreed = bool(summed[-1] > 0)
        self._agreed_at = time.perf_counter()
        self.balancer.require_finite()
        table, plan = self.balancer.finished.table, self.balancer.finished.plan
        return correction, self.balancer.planner.rate_factor, table.total / plan.total

    def refuse(self, broken: npt.NDArray[np.float64]) -> None:
        """Raise the error that these ranks' gradients are not finite, before an update that has no table yet."""
        require_finite(self.balancer.rounds - (not self.balancer.in_round), broken)

    def applied(self) -> None:
        """Note that the round's update is made, or queued, and how long it took; free the batch."""
        self.host.wait()
        self.balancer.meter.applied(time.perf_counter() - self._agreed_at)
        self.micro_batches.batch = ()

    def _queue(self) -> RoundQueue:
        assert self._course.queue is not None, "the batch came from it"
        return self._course.queue


class ParameterNorms:
    """Variables that are equal on all ranks after each round, one of which is compared in each."""

    def __init__(self, variables: Sequence[tf.Variable] = ()) -> None:
        self.watched = [
            WatchedParameter(v.name.removesuffix(":0"), int(v.shape.num_elements()), v.dtype.size) for v in variables
        ]
        self.shown = 0.0, 0.0
        """Norm and checksum of the latest piece; 0, which agrees with everything, if ranks' variables may differ."""
        self._variables = variables

    def look(self, number: int, *, on_device: bool) -> None:
        """Take norm and checksum of a piece of one variable, another one in each round."""
        if not self._variables:
            return
        which, part = piece_of(number, self.watched)
        variable = self._variables[which]
        # Outside of the graph, whose threads would have to wait for one another to run an operation of ours.
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        if on_device:  # copy the piece alone
            value, part = tf.reshape(value, [-1])[part], slice(None)
        numbers = np.frombuffer(value, variable.dtype.as_numpy_dtype)[part]
        self.shown = norm_and_checksum(numbers, numbers.view(np.uint8))


class SquareNorms:
    """Squared norms of gradients: in which rounds they are taken, and the latest, for the next row of the table."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._every = 0
        self.forget()

    def forget(self) -> None:
        """Drop the latest squares: zeros stand for rounds in which none are taken."""
        self.latest = 0.0, 0.0, 0.0

    def plan(self, numbers: int) -> int:
        """Take the squares of gradients of so many numbers in one of k rounds from now on; return k, or 0 for never."""
        # Only where the batch adapts by them: the branch for one round of 64 made a step of 100 tensors 0.9 % longer.
        measures = self._balancer.planner.goodput is not None and self._balancer.workers > 1
        self._every = rounds_per_measurement(numbers, decides=True) if measures else 0
        return self._every

    @property
    def due(self) -> bool:
        """True if the squares of this round's gradients are taken."""
        return self._every > 0 and self._balancer.measures_noise(self._every)

    def take(self, correction: float, sent: npt.NDArray[Any] | None = None) -> None:
        """Keep the squares of what this rank has sent, and of the sums, for the next row."""
        self.forget()
        if sent is not None and sent[1] > 0.0:
            samples, own, mean = self._balancer.square_factors(correction)
            self.latest = samples, own * sent[0], mean * sent[1]
