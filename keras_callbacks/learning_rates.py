"""Learning rates that follow the epoch, for large batches. Horovod's own need what Keras 3 has removed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_callbacks.tensorflow_wire import TensorFlowWire


class LearningRateSchedule(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Sets ``initial_lr * multiplier(epoch)`` from ``start_epoch`` on, before ``end_epoch``; several make a schedule.

    Parameters
    ----------
    initial_lr
        The rate to multiply.
    multiplier
        A number, or a function of the epoch.
    start_epoch, end_epoch
        Counted from 0; None: for good.
    staircase
        Change the rate once per epoch. Otherwise before every step, by the epoch and the part of it that is done.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        *,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
    ) -> None:
        super().__init__()
        if not initial_lr > 0:
            raise ValueError(f"initial_lr must be positive, got {initial_lr!r}")
        if start_epoch < 0 or (end_epoch is not None and end_epoch <= start_epoch):
            raise ValueError(f"epochs must be 0 <= start_epoch < end_epoch, got {start_epoch} and {end_epoch}")
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch: float | None = end_epoch
        self.staircase = staircase
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the rate of this epoch, or of its first step."""
        self._epoch = epoch
        self._adjust(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this step."""
        if not self.staircase and batch:
            self._adjust(self._epoch + batch / self._steps())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the rate to the logs."""
        if logs is not None:
            logs["learning_rate"] = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        steps = (self.params or {}).get("steps")
        if not steps:
            raise ValueError(
                "staircase=False needs the number of steps of an epoch, and fit does not know it. Give fit "
                "steps_per_epoch, or, where the global batch adapts, set the rate by balance.progress"
            )
        return int(steps)

    def _adjust(self, epoch: float) -> None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        factor = self.multiplier(epoch) if callable(self.multiplier) else self.multiplier
        self.model.optimizer.learning_rate = self.initial_lr * factor


class LearningRateWarmup(LearningRateSchedule):
    """Raises the rate step by step from ``initial_lr / ranks`` to ``initial_lr``, linearly over the first epochs.

    ``initial_lr`` is the rate for the global batch, usually one rank's rate times the number of ranks; a network
    that is still random bears only the small one (Goyal et al., Accurate, Large Minibatch SGD, section 2.2).
    """

    def __init__(self, initial_lr: float, *, warmup_epochs: int = 5) -> None:
        if warmup_epochs < 1:
            raise ValueError(f"warmup_epochs must be 1 or more, got {warmup_epochs}")
        small = 1.0 / TensorFlowWire().size
        super().__init__(
            initial_lr,
            lambda epoch: small + (1.0 - small) * min(epoch / warmup_epochs, 1.0),
            staircase=False,
        )
        # So that the full rate is set by the first step after the warm-up.
        self.end_epoch = math.nextafter(warmup_epochs, math.inf)
