"""Find what a train step does to this rank's gradients before ranks sum them, in its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_callbacks.keras_versions import names_of, tf_variables
from keras_callbacks.metrics.reductions import updates_in, variables_of

__all__ = ["changed_by"]

_TAPE = "gradient_tape/"  # the scope of a tape's operations
_CHOICES = {"Select", "SelectV2"}  # linear, unless the condition depends on the gradient
_NOT_LINEAR = _CHOICES | {
    "Abs", "ClipByValue", "EuclideanNorm", "IsFinite", "IsNan", "L2Loss", "Max", "Maximum", "Min", "Minimum", "Pow",
    "Rsqrt", "Sign", "Sqrt", "Square", "Tanh", "TopKV2",
}  # fmt: skip


def changed_by(gradients: Sequence[Any], variables: Sequence[Any]) -> str | None:
    """Return the operation that changes these gradients non-linearly, or variables by them; None: there is none.

    The sum over ranks is exact behind linear operations. A user's ``tf.function`` is not looked into.
    """
    tensors = [t for t in tf.nest.flatten(gradients, expand_composites=True) if isinstance(t, tf.Tensor)]
    if tf.executing_eagerly() or not tensors:
        return None
    graph = tensors[0].graph
    operations = graph.get_operations()  # in the order of tracing
    of_gradients: set[str] = set()
    for operation in operations:
        if operation.name.startswith(_TAPE) or any(t.op.name in of_gradients for t in operation.inputs):
            of_gradients.add(operation.name)
    needed = {t.op.name for t in tensors}
    for operation in reversed(operations):
        if operation.name in needed and not operation.name.startswith(_TAPE):
            inputs = [t.op.name for t in operation.inputs]
            needed.update(inputs)
            decides = inputs[:1] if operation.type in _CHOICES else inputs
            if operation.type in _NOT_LINEAR and of_gradients.intersection(decides):
                return str(operation.name)
    trained = set(names_of(known := tf_variables(variables)))
    handles = {name: v for name, v in variables_of(graph, known).items() if v._unique_id in trained}
    assigned = [value.op.name for update in updates_in(graph, handles).values() for value in update.values]
    return next((str(name) for name in assigned if name in of_gradients), None)
