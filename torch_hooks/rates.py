"""Learning rates of updates whose global batch adapts."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from hvd_hetero.balancer import Balancer

logger = logging.getLogger(__name__)


class Rates:
    """The learning rates of one training. Schedules, and other ranks, see what the user has set."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._warns = balancer.planner.goodput is not None and balancer.rank == 0
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._own: list[tuple[dict[str, Any], Any, Any]] = []
        """Groups, their own rates, and those in use."""

    def multiply(self, optimizer: torch.optim.Optimizer, *around: torch.optim.Optimizer) -> None:
        """Multiply the rates as the round's samples demand, until the optimizer has stepped. ``around``: wrappers."""
        self.restore()
        # Schedules wrap step() of the optimizer that they are made for.
        if self._warns and any(hasattr(each.step, "_wrapped_by_lr_sched") for each in (optimizer, *around)):
            self._warns = False
            logger.warning(
                "the learning-rate schedule may count steps, but Goodput changes the global batch, so steps are not "
                "equal. Step the schedule by balance.progress or by epochs"
            )
        if self._balancer.planner.rate_factor != 1.0:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                hook, hooks = optimizer.register_step_post_hook(self.restore), optimizer._optimizer_step_post_hooks
                hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]  # before a schedule that is a hook
            for group in optimizer.param_groups:
                rate, group["lr"] = group["lr"], group["lr"] * self._balancer.planner.rate_factor
                self._own.append((group, rate, group["lr"]))

    def restore(self, *_: Any) -> None:
        """Set the rates to what they were; a hook."""
        while self._own:
            group, rate, used = self._own.pop()
            # Else a hook has set another rate during the step, which stays.
            if group["lr"] is used:
                group["lr"] = rate
