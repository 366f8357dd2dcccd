"""Share what ``adapt`` has found and layers keep beside their weights: numbers become rank 0's, words are compared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_hetero.errors import HeteroError
from keras_callbacks.tensorflow_wire import TensorFlowWire

# Normalization computes with constants made of its weights; Discretization and tf-idf keep numbers in no weight at all.
_NUMBERS = ("mean", "variance", "input_mean", "input_variance", "bin_boundaries", "idf_weights_const")


def share_adapted(model: Any, wire: TensorFlowWire, prefix: str, local_layers: Sequence[Any] = ()) -> None:
    """Give all ranks rank 0's numbers; refuse words that differ from rank 0's. A collective call.

    Words are not handed over, because later layers have been made by their number. Functions that were traced with
    other numbers are forgotten. ``local_layers`` and their parts keep their own.
    """
    own = {id(part) for layer in local_layers for part in layer._flatten_layers()}
    every = list(model._flatten_layers())
    layers = [layer for layer in every if id(layer) not in own]
    kinds = tf.keras.layers
    lookups = [layer for layer in layers if isinstance(layer, (kinds.StringLookup, kinds.IntegerLookup))]
    adapted = [layer for layer in layers if isinstance(layer, (kinds.Normalization, kinds.Discretization))] + lookups
    if not adapted:
        return
    words = [_checksum(layer) for layer in lookups]
    numbers = [_numbers(layer) for layer in adapted]
    first_words, first_numbers = wire.broadcast_object((words, numbers), root_rank=0, name=f"{prefix}.adapted")
    others = [layer.name for layer, a, b in zip(lookups, words, first_words, strict=True) if a != b]
    found = wire.allgather_object(others, name=f"{prefix}.words")
    if any(found):
        rank = next(rank for rank, names in enumerate(found) if names)
        raise HeteroError(
            f"layer {found[rank][0]!r} of rank {rank} has another vocabulary than rank 0's, as adapt finds in other "
            "data; adapt it on the same data on every rank, or give all rank 0's before layers are made by its size: "
            "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), root_rank=0))"
        )
    changed = [_take(*each) for each in zip(adapted, numbers, first_numbers, strict=True)]
    if any(changed):
        for part in every:
            if isinstance(part, tf.keras.Model):
                part.test_function = part.predict_function = None


def _checksum(lookup: Any) -> int:
    words = lookup.get_vocabulary()
    return zlib.crc32("\0".join(map(str, words)).encode("utf-8", "surrogateescape"), len(words))


def _numbers(layer: Any) -> dict[str, Any]:
    found = {name: getattr(layer, name, None) for name in _NUMBERS}
    if any(tf.is_symbolic_tensor(value) for value in found.values()):
        raise ValueError(
            f"layer {layer.name!r} was built in a graph, and Keras 3 cannot use its numbers elsewhere; build the model "
            "before fit: give it an Input, or call it on a batch"
        )
    return {name: np.asarray(value) for name, value in found.items() if value is not None}


def _take(layer: Any, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Give a layer these numbers; return whether it had others."""
    changed = False
    for name, value in theirs.items():
        if name in mine and np.array_equal(mine[name], value):
            continue
        changed = True
        former = getattr(layer, name)
        setattr(layer, name, tf.constant(value) if tf.is_tensor(former) else value.tolist())
    return changed
