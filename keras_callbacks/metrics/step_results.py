"""A step's figures as a function of the state of metrics, cut out of the step's graph.

A train step may return any figure under any name: ``{"loss": self.total_loss_tracker.result()}``. Ranks join the
state of the metrics; the figures of all samples are then what the step itself makes of the joined state. So each figure
is followed back through the traced step. If it is made of metrics' variables as they are at the step's end, that
part of the graph is kept, to be run again on the joined state. Any other figure belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from keras_callbacks.metrics.reductions import Update, behind, is_given

_READ = "ReadVariableOp"


class Told:
    """The figures of one traced step, by name: those made of state, and those of the batch."""

    def __init__(
        self,
        graph: Any,
        figures: dict[str, Any],
        handles: Mapping[str, tf.Variable],
        updates: dict[str, Update],
        apart: Iterable[tf.Variable],
        metrics: Iterable[tf.Variable] = (),
    ) -> None:
        """``apart`` are variables that are no state of metrics, though steps change them: weights, the optimizer's.

        ``metrics`` are known to be state: a user's function or branch that takes one may do anything with it.
        """
        self.state: dict[str, list[tf.Variable]] = {}
        """By figure, the variables that a step changes and the figure is made of."""
        self.partly_of_state: list[str] = []
        """Figures made of state and of something else, too, or of state in a function, which is not looked into."""
        order = {operation.name: i for i, operation in enumerate(graph.get_operations())}
        no_state, known = {v._unique_id for v in apart}, {v._unique_id for v in metrics}
        made: dict[str, Any] = {}
        for name, figure in figures.items():
            parts = tf.nest.flatten(figure)
            tensors = [part for part in parts if isinstance(part, tf.Tensor)]
            operations = {n: o for tensor in tensors for n, o in behind(tensor).items()}
            taken = [(o, handles.get(tensor.name)) for o in operations.values() for tensor in o.inputs]
            read = [(o, v) for o, v in taken if o.type == _READ]
            changed = {v._unique_id: v for _, v in read if v is not None and v._unique_id in updates.keys() - no_state}
            at_the_end = all(
                v is not None
                and v._unique_id not in no_state
                and (v._unique_id not in changed or order[o.name] > order[updates[v._unique_id].last])
                for o, v in read
            )
            if len(tensors) == len(parts) and at_the_end and is_given(graph, operations):
                self.state[name] = list(changed.values())
                made[name] = figure
            elif changed or any(v._unique_id in known for o, v in taken if v is not None and o.type != _READ):
                self.partly_of_state.append(name)
        self.compute: Callable[[], dict[str, Any]] = _cut(graph, handles, made)
        """A function that computes the figures made of state, from the present state."""


def _cut(graph: Any, handles: Mapping[str, tf.Variable], figures: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that computes these tensors of a graph from the variables that they read."""
    tensors = tf.nest.flatten(figures)
    if not tensors:
        return dict
    names = [tensor.name for tensor in tensors]
    operations = {name: o for tensor in tensors for name, o in behind(tensor).items()}
    captured = {inner.name: outer for outer, inner in graph.captures}
    given: dict[str, Any] = {}
    whole = graph.as_graph_def()
    definition = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        operation = operations.get(node.name)
        if operation is None:
            continue
        result = operation.outputs[0].name
        source = handles[operation.inputs[0].name] if operation.type == _READ else captured.get(result)
        if source is not None:
            given[result] = source
        else:
            copied = definition.node.add()
            copied.CopyFrom(node)
            copied.input[:] = [i for i in node.input if not i.startswith("^")]
            copied.attr.pop("_class", None)

    @tf.function  # type: ignore[untyped-decorator]
    def of(values: list[tf.Tensor]) -> list[tf.Tensor]:
        found: list[tf.Tensor] = tf.graph_util.import_graph_def(
            definition, input_map=dict(zip(given, values, strict=True)), return_elements=names, name=""
        )
        return found

    def compute() -> dict[str, Any]:
        values = [v.read_value() if isinstance(v, tf.Variable) else v for v in given.values()]
        found: dict[str, Any] = tf.nest.pack_sequence_as(figures, of(values))
        return found

    return compute
