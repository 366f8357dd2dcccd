"""The epochs and steps of a fit, and the collectives by which ranks agree to begin, stop and go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import HeteroError
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.tensorflow_wire import TensorFlowWire

EPOCH_IS_OVER = object()
"""The value of ``stop_training`` that ends an epoch whose length fit does not know; ``epoch_ends`` resets it."""


class FitProgress:
    """The place of this rank in ``fit``, as Keras reports it, and the collectives by which ranks agree to go on."""

    def __init__(self, wire: TensorFlowWire, prefix: str, callback: tf.keras.callbacks.Callback) -> None:
        self.queue: RoundQueue | None = None
        """The source of batches: the latest ``resize_batches``, or the data that fit iterates over."""
        self.fitting = False
        self.last_step = False
        """True if the current step is the last of its epoch, by the number of steps that fit reports."""
        self.skipped = 0
        """Steps of the current epoch that were done before this fit, which an elastic job resumes."""
        self._wire = wire
        self._prefix = prefix
        self._callback = callback
        self._epochs = 0

    def epoch_begins(self, epoch: int) -> None:
        """Choose the epoch's order of samples, and check that all ranks begin an epoch."""
        assert self.queue is not None, "it was checked as training began"
        self.follow_epoch(self.queue, epoch)
        self._check_all_begin_or_leave(leaving=False)

    def follow_epoch(self, queue: RoundQueue, epoch: int = 0) -> None:
        """Make data come in the order of this epoch, or of a later one that was not used yet."""
        # Data that are resized again for each fit of one epoch had the order of epoch 0 each time.
        queue.wanted_epoch = max(epoch, self._epochs)
        self._epochs = queue.wanted_epoch + 1

    def step_begins(self, step: int) -> None:
        """Note whether the step is the last of its epoch."""
        self.last_step = step + 1 + self.skipped == self.steps

    def epoch_ends(self) -> None:
        """Stop all ranks, if a callback of one of them has asked for it."""
        self.skipped = 0
        self._callback.model.stop_training = self.evaluated(False, stops=self.wants_to_stop)

    def evaluated(self, batches: bool, *, stops: bool = False) -> bool:
        """Return whether a rank stops, at the end of an epoch, or of an evaluation that had ``batches`` here.

        A collective call.
        """
        # Evaluations and epochs end under one name: a rank that does not evaluate is found out by what others had.
        stopping, having = self._wire.sum([int(stops), int(batches)], f"{self._prefix}.stop").numpy()
        if 0 < having < self._wire.size:
            raise HeteroError(
                f"{self._wire.size - having} of {self._wire.size} ranks have no batch to validate on, and metrics are "
                "computed over all ranks. Give every rank validation_data of at least one batch, or all ranks the same"
            )
        return bool(stopping > 0)

    def ends(self) -> None:
        """Check that all ranks end training."""
        self._check_all_begin_or_leave(leaving=True)
        self.fitting = False

    @property
    def steps(self) -> int | None:
        """Steps of an epoch that fit reports, or None."""
        return (self._callback.params or {}).get("steps")

    @property
    def wants_to_stop(self) -> bool:
        """True if a callback of this rank has asked to end training after the current round."""
        if not self.fitting:
            return False
        stops = self._callback.model.stop_training
        return bool(stops) and stops is not EPOCH_IS_OVER

    def go_on(self, place: Mapping[str, Any], steps: int) -> None:
        """Resume an epoch in the fit that begins: at this place in the data, after so many steps."""
        assert self.queue is not None, "resize_batches comes before fit"
        self.queue.go_on(place)
        whole, left = self.queue.rounds, self.queue.rounds_left
        self.skipped = steps
        if whole is not None and left is not None and self.steps == whole:
            # Other ranks may have begun the epoch in rounds of another size.
            self.skipped = whole - left

    def _check_all_begin_or_leave(self, *, leaving: bool) -> None:
        """Check that all ranks begin an epoch, or all leave training; a collective call."""
        # Else those that go on would wait for one that has left, without end.
        leavers, size = int(self._wire.sum(int(leaving), f"{self._prefix}.meet")), self._wire.size
        if 0 < leavers < size:
            raise HeteroError(
                f"{leavers} of {size} ranks left fit, and the others began another epoch. Give all ranks the same "
                "number of epochs. If a callback stops training on one rank, put balance behind it in callbacks, "
                "which stops the others, too"
            )
