"""The GPU of a rank, and how the host knows that it is done.

TensorFlow counts an operation on a GPU as done once its kernel is queued, so a call into Python behind it reads the
clock too early. Such a call therefore takes a number that the device has computed:

    last gradient queued ─▶ one number of it ─▶ copied to the host ─▶ the call that reads the clock

A GPU works off its queue in order, so that number arrives when all that was queued before it is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf


class Device:
    """One device whose work is queued, by its name in TensorFlow."""

    def __init__(self, name: str) -> None:
        self._name = name
        with tf.device(name):
            self._number = tf.constant(1.0)

    def passed(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a number for a call on the host to take: it arrives once the device has computed these tensors."""
        # One of their own numbers: a constant might be computed beforehand.
        floats = (t for t in reversed(after) if t.dtype.is_floating and t.shape.num_elements() != 0)
        numbers = next(floats, self._number)
        with tf.device(self._name), tf.control_dependencies(after):
            return tf.reshape(numbers, [-1])[:1]

    def wait(self) -> None:
        """Return once the device has done all that was queued on it; not for use in a graph."""
        # Work is timed from an empty queue. A tensor that was copied once is not copied again, so this takes a new one.
        tf.raw_ops.Neg(x=self._number).numpy()


class HostCalls:
    """Calls of a graph into Python. ``timed``: the work of a device must be done when a call reads the clock."""

    def __init__(self, device: Device | None, *, timed: bool) -> None:
        self.device = device
        self.failure: BaseException | None = None
        """The error of a call from the graph, which TensorFlow would pass on only as text."""
        self._timed = device if timed else None

    def ask(
        self, function: Callable[..., Any], numbers: int, *inputs: Any, after: Sequence[Any] = (), timed: bool = False
    ) -> tf.Tensor:
        """Call Python from the graph, after the tensors in ``after`` are there; the answer is so many float64.

        ``timed``: the call reads the clock, so a device must have computed them, too.
        """
        tensors = [t for t in after if isinstance(t, tf.Tensor)]
        passed = [] if self._timed is None or not timed else [self._timed.passed(tensors)]

        # A call costs 25 to 80 microseconds. It may use only Python and NumPy: an operation of TensorFlow in it would
        # wait for the threads that run the graph, a thousandth of a second and more.
        def plainly(*arguments: Any) -> Any:
            return np.asarray(function(*arguments[: len(inputs)]), dtype=np.float64).reshape(numbers)

        with tf.device("CPU:0"), tf.control_dependencies(tensors):
            answer = tf.numpy_function(self.guard(plainly), [*inputs, *passed], tf.float64)
        answer.set_shape([numbers])
        return answer

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which also keeps its error in ``failure`` for the main thread to raise."""

        def guarded(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                self.failure = error
                raise

        return guarded

    def for_batches(self) -> AbstractContextManager[Any]:
        """Return the context in which a batch is kept, and cut into micro-batches."""
        # On the host: a GPU has memory for its current micro-batch, and need not have any for the others.
        return contextlib.nullcontext() if self.device is None else tf.device("CPU:0")

    def wait(self) -> None:
        """Return once a device whose work is timed has done all of it."""
        if self._timed is not None:
            self._timed.wait()


def device_here(policy: str, *, timed: bool) -> Device | None:
    """Return the GPU of this rank, or None if it computes on CPUs; refuse what cannot be ``timed`` for a policy."""
    found = [device for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if not found:
        return None
    # Timing needs one queue: kernels of several devices are not done in order.
    if timed and (len(found) > 1 or found[0].device_type != "GPU"):
        names = ", ".join(device.name for device in found)
        raise ValueError(
            f"policy {policy!r} can time CPUs and one GPU per rank, and this rank sees {names}. Give each rank one "
            "GPU right after hvd.init(): gpus = tf.config.list_physical_devices('GPU'); "
            "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU'). Or use policy='bsp' or "
            "StaticAllocation([…])"
        )
    return Device(found[0].name)
