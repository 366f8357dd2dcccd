"""Where the layers of a model wait for other ranks: what is between is this rank's own work.

**FSDP2** gathers a layer's parameters in hooks of the module, before its forward and its backward pass, and sums its
gradients behind the backward pass. A rank that is early waits there, so all ranks seem equally slow. With hooks of ours
before (<) and behind (>) each of FSDP2's:

    forward     <  gather  >  layer                                 pre-hooks of the module
    backward    <  gather  >  layer  <  sum  >                      hooks of the tensors that come out and go in

**DistributedDataParallel** waits before the forward pass if the model has buffers.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hvd_hetero.measurement.speed_meter import SpeedMeter


def leave_out_waits(meter: SpeedMeter) -> list[Any]:
    """Exclude from a rank's own time what its layers wait for other ranks; return the handles of the hooks."""
    handles: list[Any] = []
    # Importing FSDP here would cost every training; where the script has not imported it, no model is sharded.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    # All wrapped models of the process, for a gather waits for the other ranks in whatever model it is.
    for each in gc.get_objects():
        # isinstance() would ask an object's own __class__, which may do anything.
        kind = type(each)
        if issubclass(kind, torch.nn.parallel.DistributedDataParallel):
            # There is no module if the constructor has failed, and a ScriptModule takes no such hooks.
            wrapped = vars(each).get("_modules", {}).get("module")
            if wrapped is not None and not isinstance(wrapped, torch.jit.ScriptModule):
                handles.append(each.register_forward_pre_hook(Hook(lambda *_: meter.begin_wait()), prepend=True))
                handles.append(wrapped.register_forward_pre_hook(Hook(lambda *_: meter.end_wait()), prepend=True))
        elif sharded and issubclass(kind, sharded):
            handles += _Sharded(meter).hooks(each)
    return handles


def hides_a_backward_pass(loss: torch.Tensor) -> bool:
    """Return whether a reentrant checkpoint made this loss: a reducer may wait in the pass that it nests."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in _nodes(loss))


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that get gradients of a loss, the nearest first."""
    for node in _nodes(loss):
        if hasattr(node, "variable"):
            yield node.variable


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    seen, rest = set(), deque([loss.grad_fn])
    while rest:
        node = rest.popleft()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            rest += [before for before, _ in node.next_functions]


class _Sharded:
    """Hooks around those of FSDP2 in one sharded module."""

    def __init__(self, meter: SpeedMeter) -> None:
        self._meter = meter
        self._in: list[torch.Tensor] = []
        self._out: list[torch.Tensor] = []

    def hooks(self, module: torch.nn.Module) -> list[Any]:
        """Register all hooks of the module and return their handles; after ``fully_shard`` has registered its own."""
        # Hooks of a module, and of a tensor, run in the order in which they were added, unless one is put first.
        return [
            module.register_forward_pre_hook(Hook(self._before_gather), prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(Hook(self._behind_gather), with_kwargs=True),
            module.register_forward_hook(Hook(self._before_hook_of_output), prepend=True),
            module.register_forward_hook(Hook(self._behind_hook_of_output)),
        ]

    def _before_gather(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._meter.begin_wait()
        self._in = list(_with_gradient((args, kwargs)))

    def _behind_gather(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        inner = list(_with_gradient((args, kwargs)))
        # The same tensors come in where a checkpoint computes the layer again: no sum follows, and a wait that began
        # here would end only with the backward pass of the layer before. So 24 and 64 ms were counted as own time,
        # where sleeps alone took 36 and 108.
        if list(map(id, inner)) != list(map(id, self._in)):
            for tensor in self._in:
                _add(tensor, self._release)
            for tensor in inner:
                _add(tensor, self._hold)
        self._in = []
        self._meter.end_wait()

    def _before_hook_of_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # These very tensors are kept, since FSDP2's hook may hand out others, in another type.
        self._out = list(_with_gradient(output))
        for tensor in self._out:
            _add(tensor, self._hold)

    def _behind_hook_of_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in self._out:
            _add(tensor, self._release)
        self._out = []

    def _hold(self, gradient: torch.Tensor) -> None:
        self._meter.begin_wait()

    def _release(self, gradient: torch.Tensor) -> None:
        self._meter.end_wait()


class Hook:
    """A hook that is neither traced by ``torch.compile`` nor part of copies and files of its module."""

    def __init__(self, hook: Callable[..., None]) -> None:
        # A traced hook would read the clock once, while the compiler runs, and never again.
        self._hook: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> None:
        """Call the function that it wraps."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Else torch.save(model) fails in the middle of a training. What is loaded does nothing and needs no package.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _add(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _with_gradient(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.requires_grad and torch.is_grad_enabled():
            yield values
    elif isinstance(values, Mapping):
        yield from _with_gradient(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _with_gradient(value)
