"""All ranks start from rank 0's weights and optimizer state, and know that they do."""

from __future__ import annotations

import zlib

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_hetero.errors import HeteroError

__all__ = ["start_alike"]


def start_alike(weights: list[tf.Variable], state: list[tf.Variable], prefix: str) -> None:
    """Give every rank rank 0's values, once it is sure that all ranks mean the same variables in the same order.

    Names are left out of the comparison: Keras numbers layers and models of a process by what was made before.
    """
    variables = [*weights, *state]
    mine = [(tuple(v.shape), v.dtype.name, bool(v.trainable)) for v in variables]
    theirs = hvd.broadcast_object(mine, root_rank=0, name=f"{prefix}.variables")
    other = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    # All ranks stop or none does: a rank that went on alone would wait for the others for ever.
    _everywhere_or_nowhere(
        mine != theirs,
        f"{prefix}.differs",
        "do not train the same variables in the same order",
        f"{len(mine)} here, {len(theirs)} on rank 0"
        if other is None
        else f"this rank has {mine[other][:2]} where rank 0 has {theirs[other][:2]}",
    )
    for i, variable in enumerate(variables):
        variable.assign(hvd.broadcast(variable.read_value(), root_rank=0, name=f"{prefix}.start.{i}"))
    found = fingerprint(weights)
    _everywhere_or_nowhere(
        found != hvd.broadcast_object(found, root_rank=0, name=f"{prefix}.fingerprint"),
        f"{prefix}.unlike",
        "hold other weights than rank 0 after the broadcast",
        "is something else writing them?",
    )


def fingerprint(variables: list[tf.Variable]) -> int:
    """A checksum of all bits."""
    total = 0
    for variable in variables:
        value = variable.numpy()
        if not value.dtype.hasobject:
            total = zlib.crc32(np.ascontiguousarray(value).tobytes(), total)
    return total


def _everywhere_or_nowhere(wrong: bool, name: str, meaning: str, here: str) -> None:
    count = int(hvd.allreduce(tf.constant(int(wrong)), op=hvd.Sum, name=name))
    if count:
        raise HeteroError(f"{count} ranks {meaning} ({here}); build and compile the model alike on every rank")
