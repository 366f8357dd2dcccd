"""Gradient scaling in rounds: unscale the gradient of the whole round, and take or skip the step on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_hooks.optimizer import DistributedOptimizer


class GradScaler(torch.amp.GradScaler):
    """PyTorch's ``GradScaler`` for a ``DistributedOptimizer``; the loop is the usual one.

        scaler = torch_hooks.GradScaler("cuda", optimizer=optimizer)
        ...
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    Scaled gradients are weighted and summed over the ranks as they are, which is exact, as the scale is the same
    everywhere and changes between rounds only. Then they are unscaled. An infinity on one rank is in the sum of all, so
    all skip the same steps and change the scale alike; the table of each round carries the scale, and so shows ranks
    that do not. Inside a round of several micro-batches ``step`` and ``update`` do nothing; on a rank without
    data they happen inside the loader.

    To clip, use ``optimizer.register_step_pre_hook``, which sees unscaled gradients, or write
    ``if scaler.unscale_(optimizer): clip``: it returns whether the round is complete.

    PyTorch's own class does not know of ranks: it would look for infinities before gradients are summed. It is refused,
    unless ``optimizer.synchronize()`` comes first. With bfloat16, no scaler is needed.

    Parameters
    ----------
    device, and others
        As in ``torch.amp.GradScaler``.
    optimizer
        The optimizer of these steps. One scaler for each optimizer.
    """

    def __init__(self, device: str = "cuda", *, optimizer: DistributedOptimizer, **options: Any) -> None:
        super().__init__(device, **options)
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                f"optimizer must be a torch_hooks.DistributedOptimizer, got {type(optimizer).__name__}; for another "
                "one use torch.amp.GradScaler"
            )
        self._optimizer = optimizer
        if self.is_enabled():
            optimizer._use_scaler(self)
            self._tell_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:  # type: ignore[override]
        """Synchronise and unscale, if the round is complete; return whether it is. This is the place to clip."""
        self._must_be_mine(optimizer)
        if not (self._optimizer._synchronised or self._optimizer.synchronize()):
            return False
        super().unscale_(optimizer)
        return True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, at the end of a round, what is not unscaled, and update unless there is an infinity in it."""
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        self._must_be_mine(optimizer)
        ready = self._optimizer._synchronised or self._optimizer.synchronize()
        # A round that ends early must not end between the two calls.
        with self._optimizer.skip_synchronize():
            if ready:
                return super().step(optimizer, *args, **kwargs)
            self._optimizer.step(*args, **kwargs)
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale after a round; inside one it has to stay."""
        if self.is_enabled():
            if self._optimizer._balancer.between_updates:
                return
            super().update(new_scale)
            self._tell_scale()

    def step_without_data(self) -> None:
        """Take part in the step of the other ranks, without data of this rank's own; the loader calls this."""
        device = self._optimizer.param_groups[0]["params"][0].device
        # The scale exists from its first use on.
        self.scale(torch.zeros((), device=device))
        self.step(self._optimizer)
        self.update()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale; between rounds, on every rank."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._tell_scale()

    def _tell_scale(self) -> None:
        # This waits for the device, as step() has done just now to look for infinities.
        scale = self.get_scale()
        self._optimizer._synchroniser.scale = math.log(scale) if scale > 0 else -math.inf

    def _must_be_mine(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer:
            raise ValueError(
                "this scaler was made for another optimizer, whose rounds decide when the scale may change; make one "
                "with GradScaler(…, optimizer=optimizer) for each"
            )
