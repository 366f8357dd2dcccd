"""The GPU of a rank, and how the host knows that it is done.

TensorFlow counts an operation on a GPU as done once its kernel is queued. A call into Python that waits for it by a
control dependency then runs at once, and the host's clock says nothing about the work. The host waits for the work
when it asks for a number that the device has computed:

    last gradient queued ─▶ one number of it ─▶ copied to the host ─▶ the call that reads the clock

A GPU works off its queue in order, so that number arrives when all that was queued before it is done. Each stretch of
work is timed from a moment at which the queue is empty: ``wait`` sees to that after each update, and the copy behind
the gradients of each micro-batch. So the times of a round are known in the round, as on a processor.

Gradients wait for no copy: they leave as they arise, and the table of the round travels by itself
(``graph_synchroniser``).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Device:
    """One device whose work is queued, by its name in TensorFlow."""

    def __init__(self, name: str) -> None:
        self._name = name
        with tf.device(name):
            self._number = tf.constant(1.0)

    def passed(self, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a number for a call on the host to take: it arrives once the device has computed these tensors.

        It is one of their numbers and no constant, which TensorFlow might compute beforehand.
        """
        floats = (t for t in reversed(after) if t.dtype.is_floating and t.shape.num_elements() != 0)
        numbers = next(floats, self._number)
        with tf.device(self._name), tf.control_dependencies(after):
            return tf.reshape(numbers, [-1])[:1]

    def wait(self) -> None:
        """Return once the device has done all that was queued on it; not for use in a graph."""
        # A tensor that was copied once is not copied again, so this takes a new one.
        tf.raw_ops.Neg(x=self._number).numpy()


def device_here(policy: str, *, timed: bool) -> Device | None:
    """Return the GPU of this rank, or None if it computes on CPUs; refuse what cannot be ``timed`` for a policy.

    Timing needs one queue: kernels of several devices are not done in order.
    """
    found = [device for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if not found:
        return None
    if timed and (len(found) > 1 or found[0].device_type != "GPU"):
        names = ", ".join(device.name for device in found)
        raise ValueError(
            f"policy {policy!r} can time CPUs and one GPU per rank, and this rank sees {names}; give each rank its "
            "own right after hvd.init(), tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') with the gpus of "
            "tf.config.list_physical_devices('GPU'), or use policy='bsp' or StaticAllocation([…])"
        )
    return Device(found[0].name)
