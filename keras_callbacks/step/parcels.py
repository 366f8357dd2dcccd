"""Variables laid end to end, so that they travel in few messages."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

_PARCEL = 2**26  # bytes


def parcels(variables: list[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield variables of one type, up to 64 MiB together: one message for each would cost a round trip for each."""
    for group in by_type(variables):
        parcel: list[tf.Variable] = []
        size = 0
        for variable in group:
            size += size_in_bytes(variable)
            if parcel and size > _PARCEL:
                yield parcel
                parcel, size = [], size_in_bytes(variable)
            parcel.append(variable)
        yield parcel


def by_type(variables: list[tf.Variable]) -> list[list[tf.Variable]]:
    """Return the variables, grouped by type."""
    groups: dict[tf.DType, list[tf.Variable]] = {}
    for variable in variables:
        groups.setdefault(variable.dtype, []).append(variable)
    return list(groups.values())


def end_to_end(variables: list[tf.Variable]) -> tf.Tensor:
    """Return the variables' numbers, as one vector."""
    return tf.concat([tf.reshape(v, [-1]) for v in variables], 0)


def assign(variables: list[tf.Variable], flat: tf.Tensor) -> None:
    """Give the variables these numbers, which lie end to end."""
    parts = tf.split(flat, [v.shape.num_elements() for v in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(tf.reshape(part, variable.shape))


def size_in_bytes(tensor: tf.Tensor | tf.Variable) -> int:
    """Return the memory that its numbers take; 0 if the shape is not known."""
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
