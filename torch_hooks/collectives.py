"""The few things asked of Horovod that it does not do as needed here: names, waiting, the optimizer's state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["broadcast_optimizer_state", "named_groups", "wait"]

_LONGEST_SLEEP_S = 0.5e-3
_SLEEP_SHARE = 1 / 16


def wait(handle: int) -> None:
    """Wait for a collective without spinning.

    Horovod's own ``synchronize`` spins on the processor until the operation is done, which on shared cores takes time
    from the very ranks that are waited for. Here each sleep is a sixteenth of the time waited so far, half a
    millisecond at most: the wait overshoots by that share, and a short one is still polled finely.
    """
    began = time.perf_counter()
    while not hvd.poll(handle):
        time.sleep(min(_LONGEST_SLEEP_S, (time.perf_counter() - began) * _SLEEP_SHARE))
    hvd.synchronize(handle)


def named_groups(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    """Every parameter of the optimizer with its name, which must be unique and the same on every rank."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"group{g}.{i}" for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"named_parameters must be pairs (name, parameter), got {pair!r}; pass model.named_parameters()"
            )
    if repeated := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(
            f"names in named_parameters must be unique, repeated: {', '.join(repeated)}; "
            "prefix the names of each model when you chain several"
        )
    names: dict[torch.Tensor, str] = {p: name for name, p in pairs}
    if missing := [tuple(p.shape) for p in members if p not in names]:
        raise ValueError(
            f"named_parameters must name every parameter of the optimizer, {len(missing)} are not named (their shapes: "
            f"{missing[:5]}); pass the named_parameters() of every model that the optimizer trains"
        )
    return {p: names[p] for p in members}


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every rank the hyper-parameters and the state that rank 0 has.

    Horovod's function of this name takes a real step to make the state exist on a fresh optimizer. Here rank 0 tells
    what it has first: the tree with a placeholder for each tensor travels as one object, then each tensor by itself.
    """
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    tree = hvd.broadcast_object(_take_out(state, tensors), root_rank=0, name="hetero.state")
    if hvd.rank() != 0:
        tensors = []
        state = _put_in(tree, tensors)
    for i, tensor in enumerate(tensors):
        received = hvd.broadcast(tensor.reshape(-1), root_rank=0, name=f"hetero.state.{i}")
        if hvd.rank() != 0:
            tensor.copy_(received.reshape(tensor.shape))
    if hvd.rank() != 0:
        optimizer.load_state_dict(state)


class _Placeholder:
    """Stands for a tensor in a tree that travels as an object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _take_out(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return _Placeholder(tree)
    if isinstance(tree, dict):
        return {key: _take_out(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_take_out(value, tensors) for value in tree)
    return tree


def _put_in(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, _Placeholder):
        tensors.append(torch.zeros(tree.shape, dtype=tree.dtype))
        return tensors[-1]
    if isinstance(tree, dict):
        return {key: _put_in(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_put_in(value, tensors) for value in tree)
    return tree
