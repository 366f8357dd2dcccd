"""The optimizers that step with the gradients of one training, and what its ranks compare of them.

Users need not name them: every optimizer whose step uses the scaled loss is one.
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
    "global_batch=Goodput(…) needs each rank's own gradient, which fully_shard and hvd.DistributedOptimizer hide. Use "
    "DistributedDataParallel, or torch_hooks.DistributedOptimizer without another reducer"
)
_NUMBERS_PER_HOOK = 2**15  # one parameter's hooks take as long as squaring about so many numbers, or less


class SteppingOptimizers:
    """Knows which optimizers step on this rank, and takes figures of their parameters and settings."""

    def __init__(self, balancer: Balancer, reducer: Reducer) -> None:
        self.every = 0
        """Rounds of which one is measured; 0: none, since gradients cannot be seen before they are reduced."""
        self._balancer, self._reducer = balancer, reducer
        # Weakly: a balance may serve many trainings, one after the other, and must not keep the models of former ones.
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: list[torch.optim.Optimizer] = []
        """Optimizers that have stepped in the current round."""
        self._norm = ParameterNorm({})
        self._settings = 0.0

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that this optimizer has stepped in the current round."""
        if all(optimizer is not each for each in self._stepped):
            self._stepped.append(optimizer)

    def close_round(self) -> None:
        """Add up the settings (learning rates, …) of the optimizers that have stepped in the round, at its end."""
        stepped, known = self._stepped, [each() for each in self._known]
        # A new one begins another training, so all that do not step in its round are forgotten, too.
        if any(all(optimizer is not each for each in known) for optimizer in stepped):
            self._watch(stepped)
        self._settings += sum(settings_of(optimizer.param_groups) for optimizer in stepped)
        self._stepped = []

    def parameters(self) -> list[torch.Tensor]:
        """Return the trained parameters; none before the first step."""
        return [p for each in self._known if (optimizer := each()) is not None for p in parameters_of(optimizer)]

    def figures(self, turn: int) -> dict[str, float]:
        """Return what other ranks compare of this one, for a row of the rounds since the last row."""
        parameter_norm, bits = self._norm.at(turn)
        settings, self._settings = self._settings, 0.0
        return {"settings": settings, "parameter_norm": parameter_norm, "bits": bits}

    def _watch(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._known = [weakref.ref(optimizer) for optimizer in optimizers]
        self._norm = ParameterNorm(_whole(optimizers))
        self._balancer.agreement.watch(self._norm.watched)
        trained, decides = self.parameters(), self._balancer.planner.goodput is not None
        horovods = list(filter(is_horovods, optimizers)) if self._balancer.workers > 1 else []
        for optimizer in horovods:
            _require_reducer(optimizer, self._reducer)
        hidden = bool(horovods) or any(hasattr(p, "placements") for p in trained)
        if hidden and decides:
            raise ValueError(_NO_GRADIENT)
        numbers = sum(p.numel() + _NUMBERS_PER_HOOK for p in trained)
        self.every = 0 if hidden else rounds_per_measurement(numbers, decides=decides)


def is_horovods(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Horovod reduces in this optimizer's ``step()``."""
    return hasattr(optimizer, "skip_synchronize")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _require_reducer(optimizer: torch.optim.Optimizer, expected: Reducer) -> None:
    """Raise if Horovod's optimizer does something else than ``LoadBalance(reducer=…)`` says."""
    # Only this one shows what it does. Guessing it from gradients took enlarged, normalised ones for a sum.
    horovod = sys.modules["horovod.torch"]
    does = {horovod.Average: "mean", horovod.Sum: "sum"}.get(getattr(optimizer, "op", None), "something else")
    if does != expected:
        raise ValueError(
            f"hvd.DistributedOptimizer takes the {does} of the ranks' gradients, and the loss was scaled for a "
            f"{expected}. Use LoadBalance(reducer='sum') with op=hvd.Sum, or leave both out"
        )


def _whole(optimizers: list[torch.optim.Optimizer]) -> dict[torch.Tensor, str]:
    """Return the parameters that each rank holds whole, which ranks can compare."""
    # A plain tensor is a shard that an engine has made of them, as DeepSpeed's ZeRO does: it differs between ranks.
    return {
        parameter: f"optimizer{o}.group{g}.{i}"
        for o, optimizer in enumerate(optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if isinstance(parameter, torch.nn.Parameter) and not hasattr(parameter, "placements")
    }
