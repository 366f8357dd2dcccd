"""The base of an optimizer that wraps another one and looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer by composition: groups, state, defaults, hooks and flags are the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # No super().__init__(): all that it would set up is the wrapped optimizer's, and is reached through it.
        self._inner = optimizer
        self._hooks: list[RemovableHandle] = []

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook while this optimizer serves: elastic training wraps the inner one again, with new hooks."""
        self._hooks.append(super().register_step_pre_hook(hook))
        return self._hooks[-1]

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook while this optimizer serves."""
        self._hooks.append(super().register_step_post_hook(hook))
        return self._hooks[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self._inner.state_dict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, the very objects."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, the very object."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        # Hooks, flags of fused optimizers and whatever else a subclass has: all of it lives in the wrapped one.
        if name == "_inner":  # not there yet: a lookup before __init__ (copy, pickle) must not recurse
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled, being tied to the parameters and ranks of this job; "
            "save optimizer.state_dict() and load it into a new one"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"
