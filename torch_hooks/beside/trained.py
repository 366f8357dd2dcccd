"""The optimizers that step with the gradients of one training, and what its ranks compare of them.

Users need not name them. Between rounds they are referred to weakly: a balance may serve many trainings, one after the
other, and none of them shall keep models, or be taken for another.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Literal

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import settings_of
from hvd_hetero.measurement.gradient_noise import rounds_per_measurement
from torch_hooks.gradients.parameter_norm import ParameterNorm

Reducer = Literal["mean", "sum"]
"""What a reducer makes of the ranks' gradients."""

_NO_GRADIENT = (
    "global_batch=Goodput(…) goes by each rank's own gradient, which fully_shard and hvd.DistributedOptimizer hide; "
    "use DistributedDataParallel, or torch_hooks.DistributedOptimizer without another reducer"
)
_HOOK = 2**15  # numbers whose square takes as long as one parameter's hooks, or longer


class Trained:
    """Those of one rank. Where a new one steps, all that do not step in its round are forgotten."""

    def __init__(self, balancer: Balancer, reducer: Reducer) -> None:
        self.every = 0
        """Rounds of which one is measured; 0: none, since gradients cannot be seen before they are reduced."""
        self._balancer, self._reducer = balancer, reducer
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: list[torch.optim.Optimizer] = []
        """Those of the round at hand."""
        self._norm = ParameterNorm({})
        self._settings = 0.0

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that this one has stepped in the round at hand."""
        if all(optimizer is not each for each in self._stepped):
            self._stepped.append(optimizer)

    def close_round(self) -> None:
        """Take what the optimizers of the round are set to, at its end."""
        stepped, known = self._stepped, [each() for each in self._known]
        if any(all(optimizer is not each for each in known) for optimizer in stepped):
            self._know(stepped)
        self._settings += sum(settings_of(optimizer.param_groups) for optimizer in stepped)
        self._stepped = []

    def parameters(self) -> list[torch.Tensor]:
        """Return what is trained, as far as it is known."""
        return [p for each in self._known if (optimizer := each()) is not None for p in parameters_of(optimizer)]

    def figures(self, turn: int) -> dict[str, float]:
        """Return this rank's figures for a row of the rounds since the last one."""
        witness, bits = self._norm.at(turn)
        settings, self._settings = self._settings, 0.0
        return {"settings": settings, "witness": witness, "bits": bits}

    def _know(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._known = [weakref.ref(optimizer) for optimizer in optimizers]
        self._norm = ParameterNorm(_whole(optimizers))
        self._balancer.agreement.watch(self._norm.watched)
        trained, decides = self.parameters(), self._balancer.planner.goodput is not None
        horovods = list(filter(is_horovods, optimizers)) if self._balancer.workers > 1 else []
        for optimizer in horovods:
            _require_said(optimizer, self._reducer)
        hidden = bool(horovods) or any(hasattr(p, "placements") for p in trained)
        if hidden and decides:
            raise ValueError(_NO_GRADIENT)
        numbers = sum(p.numel() + _HOOK for p in trained)
        self.every = 0 if hidden else rounds_per_measurement(numbers, decides=decides)


def is_horovods(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Horovod reduces in this optimizer's ``step()``."""
    return hasattr(optimizer, "skip_synchronize")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer changes."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _require_said(optimizer: torch.optim.Optimizer, said: Reducer) -> None:
    """Raise if Horovod's optimizer does something else than the user has said."""
    horovod = sys.modules["horovod.torch"]
    does = {horovod.Average: "mean", horovod.Sum: "sum"}.get(getattr(optimizer, "op", None), "something else")
    if does != said:
        raise ValueError(
            f"hvd.DistributedOptimizer makes the {does} of the ranks' gradients, and the loss was scaled for a "
            f"{said}; use LoadBalance(reducer='sum') with op=hvd.Sum, or leave both out"
        )


def _whole(optimizers: list[torch.optim.Optimizer]) -> dict[torch.Tensor, str]:
    """Return the parameters that each rank holds whole, which ranks can compare.

    A plain tensor is a shard that an engine has made of them, as DeepSpeed's ZeRO does.
    """
    return {
        parameter: f"optimizer{o}.group{g}.{i}"
        for o, optimizer in enumerate(optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if isinstance(parameter, torch.nn.Parameter) and not hasattr(parameter, "placements")
    }
