"""The state that ``hvd.broadcast_optimizer_state`` makes in a fresh optimizer, before it sends the root's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_hooks.gradients.sparse import stored

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def all_gradients_are_zero(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether there are gradients, and all of them are zero: so Horovod's function calls ``step()``."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return bool(gradients) and not any(stored(gradient).any() for gradient in gradients)


class FreshState:
    """State that exists, alike in shape on every rank, and is to be overwritten by the root's."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        parameters = list(parameters)
        values = [p.detach().clone() for p in parameters]
        options = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        # Horovod's function does not ask the root what it has. It calls step() with gradients of zero wherever there is
        # no state, and then broadcasts tensor by tensor. Such a step would decay the weights and run the user's hooks.
        with _without_hooks(optimizer):
            optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        for group, kept in zip(optimizer.param_groups, options, strict=True):
            group.update(kept)
        self._as_made = list(self._sketch())

    def forget_unless_received(self) -> None:
        """Begin without state if it is still as it was made: then no rank had any."""
        # Else the step that made it would count as one of Adam's.
        if list(self._sketch()) == self._as_made:
            self._optimizer.state.clear()

    def _sketch(self) -> Iterator[Any]:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                yield name, float(stored(value).double().norm()) if isinstance(value, torch.Tensor) else value


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    kept = {name: getattr(optimizer, name) for name in _HOOKS}
    for name in _HOOKS:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)
