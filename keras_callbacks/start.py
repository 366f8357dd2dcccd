"""Start all ranks from rank 0's weights and optimizer state, and check that they do."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_hetero.errors import HeteroError
from keras_callbacks.keras_versions import (
    build_model,
    build_optimizer,
    has_call,
    names_of,
    optimizer_variables,
    plain_variables,
    state_like,
    tf_variables,
    weights_of,
)
from keras_callbacks.step.graph_synchroniser import assign, buckets, end_to_end
from keras_callbacks.tensorflow_wire import TensorFlowWire

# Attributes that hold numbers of preprocessing layers: Normalization computes with constants made of its weights, and
# Discretization and tf-idf keep numbers in no weight at all.
_NUMBERS = ("mean", "variance", "input_mean", "input_variance", "bin_boundaries", "idf_weights_const")


class CommonStart:
    """The models and optimizers of a training for which all ranks have rank 0's values."""

    def __init__(self, wire: TensorFlowWire, prefix: str, local_layers: Sequence[Any]) -> None:
        self._wire = wire
        self._prefix = prefix
        self.local_layers = local_layers
        self._given: dict[int, tuple[Any, Any]] = {}
        self._names: set[str] = set()

    def give(self, model: Any, optimizer: Any) -> list[tf.Variable]:
        """Give all ranks rank 0's weights and optimizer state, and return Keras's weights; a collective call."""
        own = names_of([v for layer in self.local_layers for v in weights_of(layer)])
        weights = [v for v in weights_of(model) if v._unique_id not in own]
        its_own = names_of(state_like(optimizer, model.trainable_variables, own)) if own else []
        state = [v for v in optimizer_variables(optimizer) if v._unique_id not in its_own]
        start_from_rank_0(weights, state, self._wire, self._prefix)
        broadcast_adapted_layers(model, self._wire, self._prefix, self.local_layers)
        self._given[id(model)] = model, optimizer
        self._names.update(own, its_own, names_of(weights), names_of(state))
        plain = names_of(plain_variables(model))
        return [v for v in weights if v._unique_id not in plain]

    def new(self, spec: Any) -> list[tuple[Any, Any]]:
        """Build all that a batch of this spec would build; return the models and optimizers with new variables."""
        pairs = list(self._given.values())
        for model, _ in pairs:
            if has_call(model):
                build_model(model, lambda batch: model(batch[0] if isinstance(batch, tuple) else batch), spec)  # noqa: B023
        for _, optimizer in pairs:
            trained = [v for model, its in pairs if its is optimizer for v in model.trainable_variables]
            build_optimizer(optimizer, trained)
        return [pair for pair in pairs if self.lacks([*weights_of(pair[0]), *optimizer_variables(pair[1])])]

    def lacks(self, variables: Iterable[Any]) -> list[Any]:
        """Return those of the variables that were never broadcast."""
        return [v for v in variables if names_of(tf_variables([v]))[0] not in self._names]


def start_from_rank_0(weights: list[tf.Variable], state: list[tf.Variable], wire: TensorFlowWire, prefix: str) -> None:
    """Give every rank rank 0's values, after a check that all ranks have the same variables in the same order."""
    variables = [*weights, *state]
    # Without names: Keras numbers layers and models of a process by what was made before.
    mine = [(tuple(v.shape), v.dtype.name, bool(v.trainable)) for v in variables]
    theirs = wire.broadcast_object(mine, root_rank=0, name=f"{prefix}.variables")
    other = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    # All ranks stop or none does: a rank that went on alone would wait for the others without end.
    _everywhere_or_nowhere(
        wire,
        mine != theirs,
        f"{prefix}.differs",
        "do not train the same variables in the same order",
        f"{len(mine)} here, {len(theirs)} on rank 0"
        if other is None
        else f"this rank has {mine[other][:2]} where rank 0 has {theirs[other][:2]}",
    )
    for i, bucket in enumerate(buckets([v for v in variables if _is_of_numbers(v)])):
        assign(bucket, wire.broadcast(end_to_end(bucket), root_rank=0, name=f"{prefix}.start.{i}"))
    for i, variable in enumerate(v for v in variables if not _is_of_numbers(v)):
        # Such as words, or what a Discretization of tf_keras has seen, as much on each rank as its data had.
        variable.assign(wire.broadcast_object(variable.numpy(), root_rank=0, name=f"{prefix}.start.any.{i}"))
    found = fingerprint(weights)
    _everywhere_or_nowhere(
        wire,
        found != wire.broadcast_object(found, root_rank=0, name=f"{prefix}.fingerprint"),
        f"{prefix}.unlike",
        "hold other weights than rank 0 after the broadcast",
        "is something else writing them?",
    )


def _is_of_numbers(variable: tf.Variable) -> bool:
    """Return whether Horovod can broadcast a variable: numbers, and equally many on each rank."""
    dtype = variable.dtype
    return bool(variable.shape.is_fully_defined() and (dtype.is_floating or dtype.is_integer or dtype.is_bool))


def fingerprint(variables: list[tf.Variable]) -> int:
    """Return a checksum of all bits."""
    total = 0
    for variable in variables:
        value = variable.numpy()
        if not value.dtype.hasobject:
            total = zlib.crc32(np.ascontiguousarray(value).tobytes(), total)
    return total


def average(variables: list[tf.Variable], wire: TensorFlowWire, prefix: str, *, counts: bool = True) -> None:
    """Give every rank the mean of the variables of all ranks that count, if any does; a collective call."""
    ranks = float(wire.sum(float(counts), f"{prefix}.mean.ranks"))
    if ranks == 0:
        return
    for i, bucket in enumerate(buckets(variables)):
        flat = end_to_end(bucket)
        # Not a product with 0: a new rank's variables may hold anything, NaN included.
        part = flat / ranks if counts else tf.zeros_like(flat)
        assign(bucket, wire.sum(part, f"{prefix}.mean.{i}"))


def _everywhere_or_nowhere(wire: TensorFlowWire, wrong: bool, name: str, meaning: str, here: str) -> None:
    if count := int(wire.sum(int(wrong), name)):
        raise HeteroError(
            f"{count} ranks {meaning} ({here}); build and compile the model in the same way on every rank"
        )


def broadcast_adapted_layers(model: Any, wire: TensorFlowWire, prefix: str, local_layers: Sequence[Any] = ()) -> None:
    """Give all ranks rank 0's numbers of preprocessing layers; refuse vocabularies that differ. A collective call.

    ``local_layers`` and their parts keep their own.
    """
    own = {id(part) for layer in local_layers for part in layer._flatten_layers()}
    every = list(model._flatten_layers())
    layers = [layer for layer in every if id(layer) not in own]
    kinds = tf.keras.layers
    lookups = [layer for layer in layers if isinstance(layer, (kinds.StringLookup, kinds.IntegerLookup))]
    adapted = [layer for layer in layers if isinstance(layer, (kinds.Normalization, kinds.Discretization))] + lookups
    if not adapted:
        return
    # Not broadcast, because later layers have been made by the size of a vocabulary.
    words = wire.allgather_object([_checksum(layer) for layer in lookups], name=f"{prefix}.words")
    if (rank := next((rank for rank, its in enumerate(words) if its != words[0]), None)) is not None:
        layer = next(layer for layer, a, b in zip(lookups, words[rank], words[0], strict=True) if a != b)
        raise HeteroError(
            f"layer {layer.name!r} of rank {rank} has another vocabulary than rank 0's. Adapt it on the same data on "
            "every rank, or give all ranks rank 0's before layers are made by its size: "
            "layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), root_rank=0))"
        )
    mine = [_numbers(layer) for layer in adapted]
    numbers = wire.broadcast_object(mine, root_rank=0, name=f"{prefix}.adapted")
    if any([_take(*each) for each in zip(adapted, mine, numbers, strict=True)]):  # noqa: C419 - all take theirs
        for part in every:
            # Functions that were traced with other numbers.
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
    """Set a layer's numbers to ``theirs``; return whether it had others."""
    changed = False
    for name, value in theirs.items():
        if name in mine and np.array_equal(mine[name], value):
            continue
        changed = True
        former = getattr(layer, name)
        setattr(layer, name, tf.constant(value) if tf.is_tensor(former) else value.tolist())
    return changed
