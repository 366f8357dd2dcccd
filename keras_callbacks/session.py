"""The state of one training, in which its parts meet: the callback, the data, the graph, metrics, the elastic state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tensorflow as tf

from hvd_hetero.errors import HeteroError
from hvd_hetero.session import Session
from keras_callbacks.keras_versions import build_optimizer, rate_times
from keras_callbacks.metrics.of_all_ranks import Evaluation
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.refusals import check_layers, check_local, check_rate
from keras_callbacks.start import CommonStart
from keras_callbacks.step.calls import SHARE, RoundCalls
from keras_callbacks.step.device import Device
from keras_callbacks.step.graph_synchroniser import Gradient, GraphAllreduce
from keras_callbacks.tensorflow_wire import TensorFlowWire


class _EpochIsOver:
    """Truthy, as ``stop_training`` must be to end the loop over an epoch's steps."""


EPOCH_IS_OVER = _EpochIsOver()
"""The value of ``stop_training`` at an end of an epoch that fit does not know: on_epoch_end takes it back."""


class KerasCallback(Protocol):
    """The attributes that Keras gives every callback."""

    model: Any
    params: dict[str, Any] | None


class FitSession:
    """One rank's part of one training, in ``fit`` or in a user's own loop."""

    def __init__(
        self,
        core: Session,
        wire: TensorFlowWire,
        callback: KerasCallback,
        local_layers: tuple[Any, ...],
        device: Device | None = None,
    ) -> None:
        self.policy = core.policy
        self.balancer = core.balancer
        self.meter = core.meter
        self.prefix = core.prefix
        self.mixing = core.mixing
        self.close = core.close
        self.on_round = core.on_round
        self.note_recovery = core.note_recovery
        self.trains_here = core.trains_here
        self.wire = wire
        self.local_layers = local_layers
        # Ranks on CPUs do as those with a device: all send the same in the same order.
        devices = int(wire.sum(int(device is not None), f"{core.prefix}.devices")) if core.goes_by_time else 0
        self.calls = RoundCalls(core, self, device, apart=devices > 0)
        self.common_start = CommonStart(wire, core.prefix, local_layers)
        self.queue: RoundQueue | None = None
        """Where batches come from: the latest ``resize_batches``, or the data which fit iterates over."""
        self.evaluation: Evaluation | None = None
        self.warned: set[str] = set()
        """Figures for which a warning has said that they do not cover all samples."""
        self.fitting = False
        self.last_step = False
        """True if the current step is the last of its epoch, as far as fit knows."""
        self.skipped = 0
        """Steps of the current epoch that were done before this fit."""
        self.elastic = False
        """Whether an elastic state follows this training."""
        self._all_reduce = GraphAllreduce(self.calls)
        self._core = core
        self._callback = callback
        self._undo: list[Callable[[], None]] = []
        self._epochs = 0

    @property
    def sums_gradients(self) -> bool:
        """True if a round ends only by a sum of gradients over all ranks."""
        return self._core.sums_gradients

    @property
    def weighs(self) -> bool:
        """True if each gradient of a round counts by its weight in the sum over all ranks, and by nothing else."""
        return self.mixing is None and not (self.policy.weighs_twice or self.policy.updates_locally)

    @property
    def gathers(self) -> bool:
        """True if a round may have several micro-batches."""
        return self.policy.accumulates or (self.queue is not None and self.queue.cuts)

    # Before rounds, and after.

    def start(self, model: Any, optimizer: Any) -> None:
        """Give all ranks rank 0's weights and optimizer state; rounds of this optimizer follow."""
        self.trains_here()
        check_layers(model, self.policy.name, gathers=self.gathers)
        check_local(optimizer, self.local_layers)
        if self.balancer.planner.goodput is not None:
            check_rate(optimizer)
        weights = self.common_start.give(model, optimizer)
        together = self.mixing is None and not self.policy.updates_locally
        self.calls.start(optimizer, [v for v in weights if v.trainable and v.shape.num_elements()] if together else [])

    def mean_gradients(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the mean over all samples of the round, for a round of one micro-batch."""
        share = self.calls.ask(self.calls.share, SHARE, after=tf.nest.flatten(gradients, expand_composites=True))
        return self._all_reduce(gradients, share)

    def adapt_rate(self, optimizer: Any) -> None:
        """Where the batch adapts, let the learning rate of this optimizer's updates, and of nothing else, follow it."""
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

    # The course of a fit.

    def train_begins(self) -> None:
        """Start all ranks from rank 0's weights."""
        if self.queue is None:
            raise ValueError(
                "fit was given data that this LoadBalance cannot resize; write "
                "model.fit(resize_batches((x, y), balance), callbacks=[balance]), without batch_size"
            )
        model = self._callback.model
        build_optimizer(model.optimizer, model.trainable_variables)
        self.start(model, model.optimizer)
        self.fitting = True

    def epoch_begins(self, epoch: int) -> None:
        """Begin an epoch on all ranks, or on none."""
        assert self.queue is not None, "train_begins has checked it"
        self.want_epoch(self.queue, epoch)
        self._meet(leaving=False)

    def want_epoch(self, queue: RoundQueue, epoch: int = 0) -> None:
        """Make data come in the order of this epoch, or the next: data resized again for each epoch do not repeat."""
        queue.want_epoch(max(epoch, self._epochs))
        self._epochs = max(epoch, self._epochs) + 1

    def step_begins(self, step: int) -> None:
        """Note whether the step is the last of its epoch."""
        self.last_step = step + 1 + self.skipped == self.steps

    def epoch_ends(self) -> None:
        """Stop all ranks, if one of them wants to."""
        self.skipped = 0
        model = self._callback.model
        if made := self.common_start.lacks(model.trainable_variables):
            raise HeteroError(
                f"{len(made)} variables were made in the course of training, first {made[0].name!r}, so each rank has "
                "values of its own; make all layers in the model's constructor, or build them before fit"
            )
        model.stop_training = self.evaluated(False, stops=self.wants_to_stop)

    def evaluated(self, batches: bool, *, stops: bool = False) -> bool:
        """Meet the other ranks at the end of an evaluation, which had batches here, or of an epoch.

        Return whether one of them stops.
        """
        stopping, having = self.wire.sum([int(stops), int(batches)], f"{self.prefix}.stop").numpy()
        if 0 < having < self.wire.size:
            raise HeteroError(
                f"{self.wire.size - having} of {self.wire.size} ranks have no batch to validate on, and figures are "
                "joined over all ranks. Give every rank validation_data of a batch at least, or all ranks the same"
            )
        return bool(stopping > 0)

    def train_ends(self) -> None:
        """End training, on all ranks."""
        self._meet(leaving=True)
        self.fitting = False

    @property
    def steps(self) -> int | None:
        """Steps of an epoch, as far as fit knows."""
        return (self._callback.params or {}).get("steps")

    @property
    def wants_to_stop(self) -> bool:
        """True if this rank would end training after the current round: a callback has said so."""
        if not self.fitting:
            return False
        stops = self._callback.model.stop_training
        return bool(stops) and stops is not EPOCH_IS_OVER

    @property
    def epoch_is_over(self) -> bool:
        """Between rounds: True if all ranks know that the current epoch has no further step."""
        return self.calls.stop_agreed or self.last_step or (self.queue is not None and self.queue.at_end)

    def go_on(self, place: Mapping[str, Any], steps: int) -> None:
        """Go on, in the fit that begins, in the middle of an epoch, of which so many steps are done."""
        assert self.queue is not None, "resize_batches comes before fit"
        self.queue.go_on(place)
        whole, left = self.queue.rounds, self.queue.rounds_left
        self.skipped = steps
        if whole is not None and left is not None and self.steps == whole:
            self.skipped = whole - left  # it may have been begun in rounds of another size, by other ranks

    def _meet(self, *, leaving: bool) -> None:
        """Check that all ranks begin an epoch, or all leave training: else the rest would wait for one for ever."""
        leavers, size = int(self.wire.sum(int(leaving), f"{self.prefix}.meet")), self.wire.size
        if 0 < leavers < size:
            raise HeteroError(
                f"{leavers} of {size} ranks left fit, and the others began another epoch. Give all ranks the "
                "same number of epochs; where a callback of yours stops training on one rank, put balance behind it in "
                "callbacks, which tells the others"
            )
