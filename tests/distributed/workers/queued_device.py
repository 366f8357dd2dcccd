"""A GPU that a processor plays for Keras: the host only queues the work, and waits where it asks for a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_callbacks.step.device import Device
from tests.support.device_model import DeviceModel

keras = tf.keras


class QueuedDevice(Device):
    """The modelled device behind TensorFlow's; ``update_s``: what it has still to do of an update that is queued."""

    def __init__(self, model: DeviceModel, update_s: float = 0.0, place: str = "CPU:0") -> None:
        super().__init__(place)
        self.model = model
        self.waits = 0
        self._update_s = update_s

    def passed(self, after: Any) -> Any:
        """A number that takes its time."""
        number = super().passed(after)
        return tf.numpy_function(self._arrives, [number], number.dtype)

    def wait(self) -> None:
        """What is left of the update."""
        super().wait()
        self.model.wait()
        self.model.sleep(self._update_s)
        self.waits += 1

    def _arrives(self, number: Any) -> Any:
        self.model.wait()
        return number


class Network(keras.Model):
    """Queues a modelled step with every micro-batch. ``seen``: the samples of the last column of y, batch by batch.

    ``place`` is where it computes: the name of a device of TensorFlow.
    """

    def __init__(self, device: DeviceModel, place: str = "CPU:0") -> None:
        with tf.device(place):
            inputs = keras.layers.Input((4,))
            dense = keras.layers.Dense(6, activation="tanh")(inputs)
            super().__init__(inputs, keras.layers.Dense(1)(dense))
        self.device_model = device
        self.place = place
        self.seen: list[list[int]] = []

    def train_step(self, data: Any) -> Any:
        """The work itself is done at once; that of the device follows."""
        x, y = data
        queued = tf.numpy_function(self._queue, [x, y], x.dtype)
        queued.set_shape(x.shape)
        with tf.device(self.place):
            return super().train_step((queued, y[:, :1]))

    def _queue(self, x: Any, y: Any) -> Any:
        self.device_model.enqueue(len(x))
        self.seen.append(np.asarray(y[:, -1]).astype(int).tolist())
        return x
