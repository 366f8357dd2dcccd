"""The state of one training, shared by its parts: the callback, the data, the graph, metrics, the elastic state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import HeteroError
from hvd_hetero.session import Session
from keras_callbacks.fit_progress import FitProgress
from keras_callbacks.keras_versions import build_optimizer, rate_times
from keras_callbacks.metrics.of_all_ranks import Evaluation
from keras_callbacks.refusals import check_layers, check_local, check_rate
from keras_callbacks.start import CommonStart
from keras_callbacks.step.calls import RoundCalls, RoundWeights
from keras_callbacks.step.device import device_here
from keras_callbacks.step.graph_synchroniser import Gradient, GraphAllreduce
from keras_callbacks.tensorflow_wire import TensorFlowWire


class FitSession(Session):
    """One rank's part of one training, in ``fit`` or in a user's own loop; options are ``Session``'s."""

    evaluation: Evaluation
    """The figures of evaluations in ``fit``, once a model is wrapped."""

    def __init__(
        self, policy: Any, global_batch: Any, callback: Any, local_layers: Sequence[Any], **options: Any
    ) -> None:
        self.wire = wire = TensorFlowWire()
        super().__init__(
            policy, wire.rank, wire.size, global_batch, wire=wire, waits_at_the_end_in=("tensorflow.",), **options
        )
        if local_layers and (self.mixing is not None or self.policy.updates_locally):
            raise ValueError(
                "local_layers go with averaged gradients only; use sync='allreduce' and a policy that does not update "
                "locally"
            )
        device = device_here(self.policy.name, timed=self.depends_on_time)
        # Ranks on CPUs follow those with a device, since all must send the same messages in the same order.
        devices = int(wire.sum(int(device is not None), f"{self.prefix}.devices")) if self.depends_on_time else 0
        self.course = FitProgress(wire, self.prefix, callback)
        self.calls = RoundCalls(self, self.course, device, apart=devices > 0)
        self.common_start = CommonStart(wire, self.prefix, tuple(local_layers))
        self.elastic = False
        """Whether an elastic state follows this training."""
        self._all_reduce = GraphAllreduce(self.calls)
        self._undo: list[Callable[[], None]] = []

    @property
    def weighs(self) -> bool:
        """True if each gradient of a round counts by its weight in the sum over all ranks, and by nothing else."""
        return not (self.policy.shrinks_early_steps or self.policy.updates_locally)

    @property
    def gathers(self) -> bool:
        """True if a round may have several micro-batches."""
        return self.policy.accumulates or (self.course.queue is not None and self.course.queue.has_micro_batches)

    @property
    def epoch_is_over(self) -> bool:
        """True, between rounds, if the current epoch has no further step on any rank."""
        return (
            self.calls.stop_agreed
            or self.course.last_step
            or (self.course.queue is not None and self.course.queue.at_end)
        )

    def start(self, model: Any, optimizer: Any) -> None:
        """Check the model, give all ranks rank 0's weights and optimizer state, and prepare the first round."""
        self.trains_here()
        check_layers(model, self.policy.name, gathers=self.gathers)
        check_local(optimizer, self.common_start.local_layers)
        if self.balancer.planner.goodput is not None:
            check_rate(optimizer)
        weights = self.common_start.give(model, optimizer)
        together = self.mixing is None and not self.policy.updates_locally
        self.calls.start(optimizer, [v for v in weights if v.trainable and v.shape.num_elements()] if together else [])

    def train_begins(self, model: Any) -> None:
        """Start all ranks from rank 0's weights."""
        if self.course.queue is None:
            raise ValueError(
                "fit was given data that this LoadBalance does not resize; write "
                "model.fit(resize_batches((x, y), balance), callbacks=[balance]), without batch_size"
            )
        build_optimizer(model.optimizer, model.trainable_variables)
        self.start(model, model.optimizer)
        self.course.fitting = True

    def epoch_ends(self, model: Any) -> None:
        """Check that no layer was built since the start, and stop all ranks if a callback of one has asked for it."""
        if made := self.common_start.lacks(model.trainable_variables):
            raise HeteroError(
                f"{len(made)} variables were made during training, first {made[0].name!r}, so each rank has values of "
                "its own. Make all layers in the model's constructor, or build them before fit"
            )
        self.course.epoch_ends()

    def mean_gradients(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the mean over all samples of the round, for a round of one micro-batch."""
        arrived = tf.nest.flatten(gradients, expand_composites=True)
        weights = self.calls.host.ask(self.calls.weights, len(RoundWeights), after=arrived)
        return self._all_reduce(gradients, weights)

    def adapt_rate(self, optimizer: Any) -> None:
        """If the batch adapts, multiply the learning rate of this optimizer by the round's factor in each update."""
        # A loop with another LoadBalance would otherwise keep the rate that was multiplied for the former one.
        wrapped_by = {value.wrapped_by for value in vars(optimizer).values() if hasattr(value, "wrapped_by")}
        for former in wrapped_by - {self}:
            former.release()
        if self.balancer.planner.goodput is not None and self not in wrapped_by:
            self.on_release(rate_times(optimizer, self.calls.rate_factor, self))

    def on_release(self, undo: Callable[[], None]) -> None:
        """Remember ``undo``, which unwraps a part of the model, or of its optimizer."""
        self._undo.append(undo)

    def release(self) -> None:
        """Unwrap the model and its optimizer, the latest wrapping first."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.calls.end()
