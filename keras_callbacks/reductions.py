"""How the states of one metric on several ranks make the state of all: by what its update does, read off the graph.

A metric does not say what its variables are. Nearly all are sums over samples, which add up over ranks; but that of a
maximum is none, and summed it would be a figure that nobody has seen. So the train step, once traced, is searched for
the assignment to each variable: ``v + …`` is a sum, ``max(v, …)`` a maximum, ``min(v, …)`` a minimum, and of anything
else nothing is known. Where an update is hidden in a function or a branch of its own, it counts as a sum.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

__all__ = ["Reduction", "reductions_in"]

Reduction = Literal["sum", "max", "min", "unknown"]

_ADDED = {"AssignAddVariableOp", "AssignSubVariableOp"}
_SAME_VALUE = {"Cast", "Identity", "Reshape"}
_BY_OPERATION: dict[str, Reduction] = {
    "Add": "sum", "AddV2": "sum", "AddN": "sum", "Sub": "sum", "Maximum": "max", "Minimum": "min"
}  # fmt: skip


def reductions_in(graph: Any, variables: list[tf.Variable]) -> dict[str, Reduction]:
    """What the assignments of a graph do to these variables, by the variables' identity; without those it has not."""
    found: dict[str, Reduction] = {}
    inside = {id(outer): inner.name for outer, inner in graph.captures}
    handles = {inside[id(v.handle)]: v._unique_id for v in variables if id(v.handle) in inside}
    for operation in graph.get_operations():
        name = handles.get(operation.inputs[0].name) if operation.inputs else None
        if name is None:
            continue
        if operation.type in _ADDED:
            kind: Reduction = "sum"
        elif operation.type == "AssignVariableOp":
            kind = _reduction_of(operation)
        else:
            continue
        found[name] = kind if found.get(name, kind) == kind else "unknown"
    return found


def _reduction_of(assignment: Any) -> Reduction:
    handle, value = assignment.inputs[0], _origin(assignment.inputs[1])
    operands = map(_origin, value.inputs)
    reads = any(o.type == "ReadVariableOp" and o.inputs[0].name == handle.name for o in operands)
    return _BY_OPERATION.get(value.type, "unknown") if reads else "unknown"


def _origin(tensor: Any) -> Any:
    """The operation that has computed a tensor's value."""
    while tensor.op.type in _SAME_VALUE:
        tensor = tensor.op.inputs[0]
    return tensor.op
