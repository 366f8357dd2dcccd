"""Figures of a loop of the user's own, averaged over the ranks so that samples weigh alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_hetero.averages import averages
from keras_callbacks.wire import TensorFlowWire

__all__ = ["average_by_samples"]


def average_by_samples(values: Any, samples: int) -> Any:
    """Return ``sum_i n_i v_i / sum_i n_i`` over the ranks, where rank i has found the means v_i over its n_i samples.

    One collective, so call it on every rank, with a number, an array or a tensor, or with values of the same names. A
    rank without samples gives ``samples=0``, and whatever values. The result has the form that was given, and the same
    bits on every rank.

        for x, y in balance.batches(data):
            total += balance.samples * float(step(x, y))          # 0 for a batch that only stands in
            seen += balance.samples
        loss = average_by_samples(total / max(seen, 1), seen)
    """
    wire = TensorFlowWire()
    return averages(
        values, samples, lambda sums: wire.sum(sums, "hetero.average_by_samples").numpy(), wire.size,
        numbers=lambda value: np.asarray(value, dtype=np.float64), like=_like,
    )  # fmt: skip


def _like(value: Any, average: Any) -> Any:
    if tf.is_tensor(value):
        return tf.constant(average, value.dtype if value.dtype.is_floating else tf.float64)
    return average if np.ndim(value) else float(average)
