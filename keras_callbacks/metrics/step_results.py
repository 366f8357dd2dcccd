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
        self._handles = handles
        self._order = {operation.name: i for i, operation in enumerate(graph.get_operations())}
        self._updates = updates
        self._apart = {v._unique_id for v in apart}
        self._metrics = {v._unique_id for v in metrics}
        self.state: dict[str, list[tf.Variable]] = {}
        """By figure, the variables that a step changes and the figure is made of."""
        self.partly_of_state: list[str] = []
        """Figures made of state and of something else, too, or of state in a function, which is not looked into."""
        made: dict[str, Any] = {}
        for name, figure in figures.items():
            parts = tf.nest.flatten(figure)
            operations: dict[str, Any] = {}
            for part in parts:
                if isinstance(part, tf.Tensor):
                    operations |= behind(part)
            changed = [u.variable for u in self._read(operations) if u.variable._unique_id not in self._apart]
            if all(isinstance(part, tf.Tensor) for part in parts) and self._is_of_state(graph, operations):
                self.state[name] = changed
                made[name] = figure
            elif changed or self._hides_state(operations):
                self.partly_of_state.append(name)
        self.compute: Callable[[], dict[str, Any]] = _cut(graph, self._handles, made)
        """A function that computes the figures made of state, from the present state."""

    def _read(self, operations: dict[str, Any]) -> list[Update]:
        """Return the step's updates of the variables that these operations read."""
        variables = [self._handles.get(o.inputs[0].name) for o in operations.values() if o.type == "ReadVariableOp"]
        read = dict.fromkeys(v._unique_id for v in variables if v is not None)
        return [self._updates[i] for i in read if i in self._updates]

    def _hides_state(self, operations: dict[str, Any]) -> bool:
        taken = [self._handles.get(t.name) for o in operations.values() if o.type != "ReadVariableOp" for t in o.inputs]
        return any(v._unique_id in self._metrics for v in taken if v is not None)

    def _is_of_state(self, graph: Any, operations: dict[str, Any]) -> bool:
        for operation in operations.values():
            if operation.type == "ReadVariableOp":
                variable = self._handles.get(operation.inputs[0].name)
                if variable is None or variable._unique_id in self._apart:
                    return False
                update = self._updates.get(variable._unique_id)
                if update is not None and self._order[operation.name] < self._order[update.last]:
                    return False  # it is of the state before this step
        return is_given(graph, operations)


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
        if operation.type == "ReadVariableOp":
            given[result] = handles[operation.inputs[0].name]
        elif result in captured:
            given[result] = captured[result]
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
