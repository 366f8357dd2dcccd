"""Checks of what is trained: its names, whether it can be synchronised, and whether every rank has the same."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hvd_hetero.errors import HeteroError
from torch_hooks.wires.choice import TorchWire


def suitable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer, after checking that it can be wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "skip_synchronize"):
        raise TypeError(
            "optimizer is a DistributedOptimizer already, of this package or of Horovod; wrap the plain optimizer once"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} may evaluate its closure a different number of times on each rank; use an "
            "optimizer that evaluates the loss once, such as SGD or Adam"
        )
    return optimizer


def refuse_synchronised(optimizer: torch.optim.Optimizer) -> None:
    """Raise if something else sums the gradients of this optimizer, or keeps its parameters or state in parts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            "optimizer is a ZeroRedundancyOptimizer, which keeps a part of the state on each rank; give the optimizer "
            "that it wraps, such as torch.optim.AdamW(model.parameters())"
        )
    for mark, kind in (("_fsdp_flattened", "FullyShardedDataParallel"), ("placements", "fully_shard or a DTensor")):
        if any(hasattr(p, mark) for p in parameters):
            raise TypeError(
                f"the optimizer's parameters are sharded by {kind}, and DistributedOptimizer sums whole gradients; "
                "give it a plain model that each rank holds whole, or train with FSDP alone"
            )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # A wrapper that is no longer used does no harm.
        gc.collect()
        mine, ddp = set(map(id, parameters)), torch.nn.parallel.DistributedDataParallel
        # It leaves no mark on a parameter, so live wrappers are looked for: once, and only where a group exists.
        wrapped = (each for each in gc.get_objects() if issubclass(type(each), ddp))
        if any(id(p) in mine for each in wrapped for p in each.parameters()):
            raise TypeError(
                "the optimizer's model is wrapped by DistributedDataParallel, and both would sum its gradients; leave "
                "DistributedDataParallel out, since DistributedOptimizer sums them"
            )


def named_groups(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    """Return every parameter of the optimizer with its name, which must be unique and the same on every rank."""
    by_position = {
        p: f"group{g}.{i}" for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    if named_parameters is None:
        return by_position
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
    if missing := [tuple(p.shape) for p in by_position if p not in names]:
        raise ValueError(
            f"named_parameters must name every parameter of the optimizer, {len(missing)} are not named (their shapes: "
            f"{missing[:5]}); pass the named_parameters() of every model that the optimizer trains"
        )
    return {p: names[p] for p in by_position}


_TENSORS_ON_THEIR_WAY = 32  # of a state


def broadcast_parameters(wire: TorchWire, names: dict[torch.Tensor, str], prefix: str, *options: str) -> None:
    """Give every rank rank 0's values, after comparing names, shapes and ``options`` over the ranks."""
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad, _order_in_memory(p)) for p, name in names.items()]
    mine = [*options, *tensors]
    for parameter, name in names.items():
        if parameter.dtype in wire.cannot_sum:
            raise ValueError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, which Horovod cannot sum; keep "
                "the parameters in float32 and compute under torch.autocast(dtype=torch.bfloat16)"
            )
    theirs = wire.broadcast_object(mine, root_rank=0, name=f"{prefix}.names")
    # All ranks raise, or none does: one that went on alone would wait for the others for ever.
    differs = torch.tensor(int(mine != theirs), device="cpu")
    if differ := int(wire.result(wire.start_sum(differs, f"{prefix}.names.differ"))):
        other = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), None)
        here = f"{len(mine)} here, {len(theirs)} on rank 0"
        if other is not None:
            here = f"this rank has {other[0]} where rank 0 has {other[1]}"
        raise HeteroError(
            f"{differ} ranks differ from rank 0 in the parameters that they train, in their order, or in the "
            f"arguments of DistributedOptimizer ({here}). Build the model and the optimizer in the same way on "
            "every rank"
        )
    # All at once: one after the other, each would take a round trip.
    under_way = []
    for parameter, name in names.items():
        sent = parameter.detach().contiguous()
        under_way.append((parameter, sent, wire.start_broadcast(sent, f"{prefix}.start.{name}")))
    for parameter, sent, handle in under_way:
        wire.result(handle)
        if wire.rank != 0 and sent.data_ptr() != parameter.data_ptr():
            parameter.data.copy_(sent)


def _order_in_memory(parameter: torch.Tensor) -> str:
    """Return the order in which gradients of a parameter are summed."""
    if parameter.is_contiguous():
        return "contiguous"
    sizes = zip(parameter.shape, torch.empty_like(parameter, device="meta").stride(), strict=True)
    return f"strides {tuple(stride for size, stride in sizes if size > 1)}"


def broadcast_state(wire: TorchWire, holder: Any, prefix: str) -> None:
    """Give every rank rank 0's state, of an optimizer or of anything else with a ``state_dict``."""
    # Horovod's function for optimizers takes a real step to make the state exist on a fresh optimizer. Here rank 0
    # first sends what it has: the tree, with tensors that hold no numbers, as one object; then each tensor by itself.
    state = holder.state_dict()
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> torch.Tensor:
        # A sparse one travels within the tree.
        if tensor.layout is not torch.strided:
            return tensor
        tensors.append(tensor)
        return torch.empty_like(tensor, device="meta")

    def put_in(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        tensors.append(torch.empty_like(tensor, device="cpu"))
        return tensors[-1]

    tree = tree_map_only(torch.Tensor, take_out, state) if wire.rank == 0 else None
    tree = wire.broadcast_object(tree, root_rank=0, name=f"{prefix}.state")
    if wire.rank != 0:
        state = tree_map_only(torch.Tensor, put_in, tree)
    # Some at a time: one after the other each would take a round trip, all at once a second copy of the whole state.
    for first in range(0, len(tensors), _TENSORS_ON_THEIR_WAY):
        some = tensors[first : first + _TENSORS_ON_THEIR_WAY]
        # From host memory, as the others receive it: Horovod refuses to mix devices. load_state_dict() moves it back.
        handles = [
            wire.start_broadcast(
                tensor.detach().reshape(-1).to("cpu", copy=wire.rank == 0), f"{prefix}.state.{first + i}"
            )
            for i, tensor in enumerate(some)
        ]
        for tensor, handle in zip(some, handles, strict=True):
            received = wire.result(handle)
            if wire.rank != 0:
                tensor.copy_(received.reshape(tensor.shape))
    if wire.rank != 0:
        holder.load_state_dict(state)
