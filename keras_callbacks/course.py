"""The course of a fit: its epochs and steps, and where ranks meet in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import HeteroError
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.tensorflow_wire import TensorFlowWire

EPOCH_IS_OVER = object()
"""The value of ``stop_training``, and as true, at an end of an epoch that fit does not know: its end takes it back."""


class FitCourse:
    """Where this rank is in ``fit``, as far as fit knows; and the meetings at which ranks agree to go on."""

    def __init__(self, wire: TensorFlowWire, prefix: str, callback: tf.keras.callbacks.Callback) -> None:
        self.queue: RoundQueue | None = None
        """Where batches come from: the latest ``resize_batches``, or the data which fit iterates over."""
        self.fitting = False
        self.last_step = False
        """True if the current step is the last of its epoch, as far as fit knows."""
        self.skipped = 0
        """Steps of the current epoch that were done before this fit."""
        self._wire = wire
        self._prefix = prefix
        self._callback = callback
        self._epochs = 0

    def epoch_begins(self, epoch: int) -> None:
        """Begin an epoch on all ranks, or on none."""
        assert self.queue is not None, "it was checked as training began"
        self.want_epoch(self.queue, epoch)
        self._meet(leaving=False)

    def want_epoch(self, queue: RoundQueue, epoch: int = 0) -> None:
        """Make data come in the order of this epoch, or the next: data resized again for each epoch do not repeat."""
        queue.wanted_epoch = max(epoch, self._epochs)
        self._epochs = queue.wanted_epoch + 1

    def step_begins(self, step: int) -> None:
        """Note whether the step is the last of its epoch."""
        self.last_step = step + 1 + self.skipped == self.steps

    def epoch_ends(self) -> None:
        """Stop all ranks, if one of them wants to."""
        self.skipped = 0
        self._callback.model.stop_training = self.evaluated(False, stops=self.wants_to_stop)

    def evaluated(self, batches: bool, *, stops: bool = False) -> bool:
        """Meet the other ranks at the end of an evaluation, which had batches here, or of an epoch.

        Return whether one of them stops.
        """
        stopping, having = self._wire.sum([int(stops), int(batches)], f"{self._prefix}.stop").numpy()
        if 0 < having < self._wire.size:
            raise HeteroError(
                f"{self._wire.size - having} of {self._wire.size} ranks have no batch to validate on, and figures are "
                "joined over all ranks. Give every rank validation_data of a batch at least, or all ranks the same"
            )
        return bool(stopping > 0)

    def ends(self) -> None:
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
        leavers, size = int(self._wire.sum(int(leaving), f"{self._prefix}.meet")), self._wire.size
        if 0 < leavers < size:
            raise HeteroError(
                f"{leavers} of {size} ranks left fit, and the others began another epoch. Give all ranks the "
                "same number of epochs; where a callback of yours stops training on one rank, put balance behind it in "
                "callbacks, which tells the others"
            )
