r"""Whether a reducer makes the mean or the sum of the ranks' gradients, found out in the first rounds.

A sum where a mean was said leaves all ranks alike, with gradients that are n times too large. So each rank tells of one
parameter, with random signs s, what it has itself, g_i, and what the optimizer gets, G:

    r_i = <g_i, s>        R = <G, s>        R / sum_i r_i = 1 / n for a mean, 1 for a sum

Where gradients are clipped or normalised, the quotient is any number, but hardly 1 in several rounds. Horovod's
optimizer says itself what it does.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Reducer", "ReducerCheck", "is_horovods"]

Reducer = Literal["mean", "sum"]

_PIECE = 2**13  # numbers that are looked at
_TABLES = 8  # after which nothing more is looked at: a model may be sharded
_SURE = 0.1  # of the sum of |r_i|: less is rounding, perhaps
_ROUNDING = 1e-2  # in 16 bits, on the way
_ROUNDS = 3  # that say the same


def is_horovods(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Horovod reduces in this optimizer's ``step()``."""
    return hasattr(optimizer, "skip_synchronize")


class ReducerCheck:
    """The check of one rank, which is over after some rounds. ``hooks``: where to put what is to be removed."""

    def __init__(self, said: Reducer, workers: int, hooks: list[Any]) -> None:
        self._said = said
        self._hooks = hooks
        self._workers = workers
        self._parameter: torch.Tensor | None = None
        self._hook: Any = None
        self._own = math.nan  # until its gradient is cleared for the first time
        self._tables = self._sums = 0
        self.open = workers > 1
        """True: there is more to find out; the same on every rank."""
        self.figures = (0.0, 0.0)
        """r_i and R of the latest step; 0: not known."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer has just used."""
        if is_horovods(optimizer):
            self._require_said(optimizer)
            self.open = False
        elif self._parameter is None:
            self._parameter = next((p for g in optimizer.param_groups for p in g["params"] if _shows(p)), None)
            if self._parameter is not None:
                self._hook = self._parameter.register_hook(self._add)
                self._hooks.append(self._hook)
        elif any(self._parameter is p for group in optimizer.param_groups for p in group["params"]):
            gradient = self._parameter.grad
            self.figures = (self._own, 0.0 if gradient is None else _signed(gradient))

    def judge(self, figures: npt.NDArray[np.float64]) -> None:
        """Raise on all ranks, by r_i and R of all ranks, if the reducer sums where a mean was said."""
        own, reduced = figures.reshape(-1, 2).T
        total, alike = float(own.sum()), np.allclose(reduced, reduced[0], rtol=1e-2, atol=0.0)
        sure = alike and abs(total) > _SURE * np.abs(own).sum()
        self._tables += 1
        summed = sure and abs(reduced[0] / total - 1.0) < _ROUNDING
        self._sums += summed
        if (sure and not summed) or self._sums == _ROUNDS or self._tables == _TABLES:
            self.open = False
            if self._hook is not None:
                self._hook.remove()
                self._parameter = None
        if self._sums == _ROUNDS and self._said == "mean":
            raise ValueError(
                "the ranks' gradients are summed, and the loss was scaled for their mean, so that they are "
                f"{self._workers} times too large; divide by the number of ranks, or say LoadBalance(reducer='sum')"
            )

    def _add(self, gradient: torch.Tensor) -> None:
        assert self._parameter is not None, "it has this hook"
        if self._parameter.grad is None or not self._parameter.grad.any():  # else it adds to what is there
            self._own = 0.0
        self._own += _signed(gradient)

    def _require_said(self, optimizer: torch.optim.Optimizer) -> None:
        horovod = sys.modules["horovod.torch"]
        does = {horovod.Average: "mean", horovod.Sum: "sum"}.get(getattr(optimizer, "op", None), "something else")
        if does != self._said:
            raise ValueError(
                f"hvd.DistributedOptimizer makes the {does} of the ranks' gradients, and the loss was scaled for a "
                f"{self._said}; use LoadBalance(reducer='sum') with op=hvd.Sum, or leave both out"
            )


def _shows(parameter: torch.Tensor) -> bool:
    return (
        parameter.grad is not None and parameter.grad.layout is torch.strided and not hasattr(parameter, "placements")
    )


def _signed(gradient: torch.Tensor) -> float:
    piece = gradient.detach().reshape(-1)[:_PIECE].double().cpu().numpy()
    signs = 2.0 * np.random.Generator(np.random.PCG64(21)).integers(0, 2, len(piece)) - 1.0
    return float(piece @ signs)
