"""What the graph of a train step shows: how it changes each variable, and from which state each figure is computed.

A metric does not say how its variables combine over ranks. So the graph is searched for the assignment to each:
``v + …`` is a sum, ``max(v, …)`` a maximum, ``min(v, …)`` a minimum, and anything else is unknown.

A step may return any figure under any name, such as ``{"loss": self.total_loss_tracker.result()}``. Each figure is
followed back through the graph. If it is made of metrics' variables as they are at the step's end, that part of the
graph is kept, to be run again on the joined state (`figures_in`). Any other figure belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tensorflow as tf

Reduction = Literal["sum", "max", "min", "unknown"]

_ADDED = {"AssignAddVariableOp": 1.0, "AssignSubVariableOp": -1.0}
_SAME_VALUE = {"Cast", "Identity", "Reshape"}
_READ = "ReadVariableOp"
_BY_OPERATION: dict[str, Reduction] = {
    "Add": "sum", "AddV2": "sum", "AddN": "sum", "Sub": "sum", "Maximum": "max", "Minimum": "min"
}  # fmt: skip


@dataclass(slots=True)
class Update:
    """A step's change of one variable."""

    variable: tf.Variable
    kind: Reduction
    last: str
    """The name of the last assignment."""
    values: list[tf.Tensor] = field(default_factory=list)
    """The values that are assigned, or added."""
    increments: list[tuple[float, tf.Tensor]] = field(default_factory=list)
    """The terms that a sum grows by: sign and value."""
    counts_batches: bool = False
    """True if it grows by the same number, whatever the batch."""


def variables_of(graph: Any, known: Iterable[tf.Variable] = ()) -> dict[str, tf.Variable]:
    """Return the variables that a graph touches while it is traced, by the names of their handles in it."""
    inside = {id(outer): inner.name for outer, inner in graph.captures}
    # Not a public name: if it is missing, only the ``known`` ones are found.
    touched = [*known, *getattr(graph, "_watched_variables", ())]
    return {inside[id(v.handle)]: v for v in touched if id(v.handle) in inside}


def updates_in(graph: Any, handles: Mapping[str, tf.Variable]) -> dict[str, Update]:
    """Return what the assignments of a graph do to each of these variables, by the variables' identity."""
    found: dict[str, Update] = {}
    for operation in graph.get_operations():
        variable = handles.get(operation.inputs[0].name) if operation.inputs else None
        if variable is None or not (operation.type in _ADDED or operation.type == "AssignVariableOp"):
            continue
        kind, increments = _change(operation)
        update = found.setdefault(variable._unique_id, Update(variable, kind, operation.name))
        update.kind = kind if update.kind == kind else "unknown"
        update.last = operation.name
        update.values.append(operation.inputs[1])
        update.increments += increments
    for update in found.values():
        # As in a Mean that is updated with a batch's mean loss. One process adds 1 a round, so a rank must add its
        # fraction of the round (`weigh`).
        given = all(depends_on_no_batch(graph, operations_behind(value)) for _, value in update.increments)
        update.counts_batches = update.kind == "sum" and given and bool(update.increments)
    return found


def independent_of_the_batch(
    graph: Any, handles: Mapping[str, tf.Variable], updates: Mapping[str, Update], variables: Iterable[tf.Variable],
    same_on_all_ranks: Iterable[tf.Variable],
) -> list[tf.Variable]:  # fmt: skip
    """Return the variables that a step advances only by variables and constants, so that all ranks do the same.

    What they are made of must be the same on all ranks: one of ``same_on_all_ranks``, unchanged by the step, or one of
    themselves.
    """
    same = {v._unique_id for v in same_on_all_ranks}
    found: dict[str, tuple[tf.Variable, set[str]]] = {}
    for variable in variables:
        update = updates.get(variable._unique_id)
        operations = (
            {} if update is None else {n: o for value in update.values for n, o in operations_behind(value).items()}
        )
        if update is not None and depends_on_no_batch(graph, operations):
            reads = [handles.get(o.inputs[0].name) for o in operations.values() if o.type == _READ]
            found[variable._unique_id] = variable, {v._unique_id for v in reads if v is not None}
    changed = updates.keys() - same
    # Each pass may drop one that others are made of.
    for _ in range(len(found)):
        found = {name: pair for name, pair in found.items() if not pair[1] & (changed - found.keys())}
    return [variable for variable, _ in found.values()]


def weigh(updates: Iterable[Update], weight: tf.Tensor) -> None:
    """Make these sums grow by ``weight`` times what the step has added; part of the step."""
    for update in updates:
        dtype = update.variable.dtype
        less = tf.cast(weight, dtype) - 1
        for sign, value in update.increments:
            update.variable.assign_add(tf.cast(sign, dtype) * less * tf.cast(value, dtype))


@dataclass(slots=True)
class Figures:
    """The figures of one traced step, by name: those made of state, and those of the batch."""

    of_state: dict[str, list[tf.Variable]] = field(default_factory=dict)
    """By figure, the variables that a step changes and the figure is made of."""
    partly_of_state: list[str] = field(default_factory=list)
    """Figures made of state and of something else, too, or of state in a function, which is not looked into."""
    compute: Callable[[], dict[str, Any]] = dict
    """A function that computes the figures made of state, from the present state."""


def figures_in(
    graph: Any,
    figures: dict[str, Any],
    handles: Mapping[str, tf.Variable],
    updates: dict[str, Update],
    apart: Iterable[tf.Variable],
    metrics: Iterable[tf.Variable] = (),
) -> Figures:
    """Return what the figures of a step are made of.

    ``apart`` are variables that are no state of metrics, though steps change them: weights, the optimizer's.
    ``metrics`` are known to be state: a user's function or branch that takes one may do anything with it.
    """
    found = Figures()
    order = {operation.name: i for i, operation in enumerate(graph.get_operations())}
    no_state, known = {v._unique_id for v in apart}, {v._unique_id for v in metrics}
    for name, figure in figures.items():
        parts = tf.nest.flatten(figure)
        tensors = [part for part in parts if isinstance(part, tf.Tensor)]
        operations = {n: o for tensor in tensors for n, o in operations_behind(tensor).items()}
        taken = [(o, handles.get(tensor.name)) for o in operations.values() for tensor in o.inputs]
        read = [(o, v) for o, v in taken if o.type == _READ]
        changed = {v._unique_id: v for _, v in read if v is not None and v._unique_id in updates.keys() - no_state}
        at_the_end = all(
            v is not None
            and v._unique_id not in no_state
            and (v._unique_id not in changed or order[o.name] > order[updates[v._unique_id].last])
            for o, v in read
        )
        if len(tensors) == len(parts) and at_the_end and depends_on_no_batch(graph, operations):
            found.of_state[name] = list(changed.values())
        elif changed or any(v._unique_id in known for o, v in taken if v is not None and o.type != _READ):
            found.partly_of_state.append(name)
    found.compute = _subgraph(graph, handles, {name: figures[name] for name in found.of_state})
    return found


def _subgraph(graph: Any, handles: Mapping[str, tf.Variable], figures: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that computes these tensors of a graph from the variables that they read."""
    tensors = tf.nest.flatten(figures)
    if not tensors:
        return dict
    names = [tensor.name for tensor in tensors]
    operations = {name: o for tensor in tensors for name, o in operations_behind(tensor).items()}
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


def operations_behind(tensor: tf.Tensor) -> dict[str, Any]:
    """Return the operations that compute a tensor, back to where variables are read."""
    found: dict[str, Any] = {}
    open_ = [tensor.op]
    while open_:
        operation = open_.pop()
        if operation.name not in found:
            found[operation.name] = operation
            if operation.type != _READ:
                open_ += [t.op for t in operation.inputs]
    return found


def depends_on_no_batch(graph: Any, operations: dict[str, Any]) -> bool:
    """Return whether these depend on no batch: only on variables and constants."""
    constants = {inner.op.name for outer, inner in graph.captures if isinstance(outer, tf.__internal__.EagerTensor)}
    return all(
        o.type == _READ or name in constants or not (o.type == "Placeholder" or o.op_def.is_stateful)
        for name, o in operations.items()
    )


def _change(assignment: Any) -> tuple[Reduction, list[tuple[float, tf.Tensor]]]:
    handle, value = assignment.inputs[0], assignment.inputs[1]
    if assignment.type in _ADDED:
        return "sum", [(_ADDED[assignment.type], value)]
    operation = _origin(value)
    rest = [t for t in operation.inputs if not _reads(_origin(t), handle)]
    if len(rest) == len(operation.inputs):
        return "unknown", []
    kind = _BY_OPERATION.get(operation.type, "unknown")
    sign = -1.0 if operation.type == "Sub" else 1.0
    return kind, [(sign, t) for t in rest] if kind == "sum" else []


def _reads(operation: Any, handle: tf.Tensor) -> bool:
    return bool(operation.type == _READ and operation.inputs[0].name == handle.name)


def _origin(tensor: Any) -> Any:
    """Return the operation that has computed a tensor's value."""
    while tensor.op.type in _SAME_VALUE:
        tensor = tensor.op.inputs[0]
    return tensor.op
