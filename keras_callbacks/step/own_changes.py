"""Find in a train step's graph what it does with gradients before ranks sum them, and what it trains by them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_callbacks.keras_versions import names_of, tf_variables
from keras_callbacks.metrics.traced_step import variables_of

_TAPE = "gradient_tape/"  # the scope of a tape's operations
# Types of operations. Scaling, centring, penalties and custom gradients are linear, and are not among them.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
_CHOICES = {"Select", "SelectV2"}  # linear, unless the condition depends on the gradient
_NOT_LINEAR = _CHOICES | {
    "Abs", "ClipByValue", "EuclideanNorm", "IsFinite", "IsNan", "L2Loss", "Max", "Maximum", "Min", "Minimum", "Pow",
    "Rsqrt", "Sign", "Sqrt", "Square", "Tanh", "TopKV2",
}  # fmt: skip


def changed_by(gradients: Sequence[Any], variables: Sequence[Any]) -> str | None:
    """Return the first operation found that changes these gradients non-linearly, or variables by them, or None.

    A user's ``tf.function`` is not looked into.
    """
    tensors = [t for t in tf.nest.flatten(gradients, expand_composites=True) if isinstance(t, tf.Tensor)]
    if tf.executing_eagerly() or not tensors:
        return None
    graph = tensors[0].graph
    operations = graph.get_operations()
    of_gradients = _of_gradients(operations)
    # Behind linear operations the sum over ranks is that of one process. With others it was off by 1.5e-2
    # (clip_by_global_norm), and by 5e-4 where a step changes weights by its own gradients (SAM).
    needed = {t.op.name for t in tensors}
    for operation in reversed(operations):
        if operation.name in needed and not operation.name.startswith(_TAPE):
            inputs = [t.op.name for t in operation.inputs]
            needed.update(inputs)
            decides = inputs[:1] if operation.type in _CHOICES else inputs
            if operation.type in _NOT_LINEAR and of_gradients.intersection(decides):
                return str(operation.name)
    trained = set(names_of(known := tf_variables(variables)))
    written = _written(operations, variables_of(graph, known))
    return next((str(o.name) for o, v in written if o.name in of_gradients and v._unique_id in trained), None)


def trained_by(graph: Any, lacks: Callable[[Iterable[Any]], list[Any]]) -> list[tf.Variable]:
    """Return the trainable variables that a traced step changes by gradients, also in its branches and functions.

    ``lacks`` returns those of the given variables that were not broadcast.
    """
    handles, operations = variables_of(graph), graph.get_operations()
    # Such as the momentum of an optimizer that is not wrapped: gradients reach weights through it.
    unknown = set(names_of(lacks(handles.values())))
    of_gradients = _of_gradients(operations, {name for name, v in handles.items() if v._unique_id in unknown})
    written = [(o, v) for o, v in _written(operations, handles) if v.trainable]
    return list({v._unique_id: v for o, v in written if o.name in of_gradients or _has_tape(o)}.values())


def _written(operations: Sequence[Any], handles: dict[str, tf.Variable]) -> Iterator[tuple[Any, tf.Variable]]:
    """Yield each operation that writes one of these variables, with the variable."""
    for operation in operations:
        for number, tensor in enumerate(operation.inputs):
            if tensor.name in handles and _writes(operation, number):
                yield operation, handles[tensor.name]


def _of_gradients(operations: Sequence[Any], through: Container[str] = ()) -> set[str]:
    """Return the names of operations that compute with gradients, of all in the order of tracing.

    ``through``: the handles of variables that hold gradients once something of gradients is written to them.
    """
    found: set[str] = set()
    for operation in operations:
        if operation.name.startswith(_TAPE) or any(t.op.name in found for t in operation.inputs):
            found.add(operation.name)
            found.update(
                t.op.name for i, t in enumerate(operation.inputs) if t.name in through and _writes(operation, i)
            )
    return found


def _writes(operation: Any, number: int) -> bool:
    """Return whether an operation writes this input."""
    try:
        # Only functions and branches have this attribute.
        return number not in operation.get_attr("_read_only_resource_inputs")
    except ValueError:
        return bool(operation.type.startswith(_WRITES))


def _has_tape(operation: Any) -> bool:
    """Return whether a function that an operation calls, or one within it, takes gradients."""
    library = {f.signature.name: f for f in operation.graph.as_graph_def().library.function}
    names = [value.func.name for value in operation.node_def.attr.values() if value.func.name]
    for name in names:  # grows while it is gone through
        nodes = library[name].node_def if name in library else ()
        if any(node.name.startswith(_TAPE) for node in nodes):
            return True
        called = {value.func.name for node in nodes for value in node.attr.values()}
        names += sorted(called & library.keys() - set(names))
    return False
