"""Which parameters the losses of a round reach."""

from __future__ import annotations

from itertools import islice

import torch

from torch_hooks.beside.layers import leaves_of
from torch_hooks.beside.trained import Trained, parameters_of

_LOOKED_AT = 2**13  # numbers of a gradient
_LEAVES = 4  # parameters that are looked at, of which some may be without gradient


class Leaves:
    """Those of one rank's round: whether they keep what the round has gathered, and whose they are."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._some: list[torch.Tensor] = []
        """Parameters that get gradients of this batch."""
        self._gathered: torch.Tensor | None = None
        """A parameter with a gradient of this round's former micro-batches."""
        self._abandoned: list[torch.Tensor] = []
        """Parameters that may have a gradient of a round that was left in its middle."""
        self._all: set[int] = set()
        """All that get gradients of this batch, where the loop has another training, too."""

    def note(self, loss: torch.Tensor, *, last: bool, several: bool) -> None:
        """Note what a batch's loss reaches. ``several``: trainings are in this loop."""
        if not last:
            self._some = list(islice((p for p in leaves_of(loss) if isinstance(p, torch.nn.Parameter)), _LEAVES))
        if several:
            self._all = set(map(id, leaves_of(loss)))

    @property
    def left_over(self) -> bool:
        """Whether an abandoned round has left gradients, which would add to those of the next one."""
        if not any(bool(_numbers(p.grad).any()) for p in self._abandoned if p.grad is not None):
            self._abandoned = []
        return bool(self._abandoned)

    @property
    def cleared(self) -> bool:
        """Whether what the round has gathered is there no more."""
        return self._gathered is not None and not _has_gradient(self._gathered)

    def end_batch(self, *, last: bool) -> None:
        """End a batch, after which the round keeps what it has gathered, or is over."""
        some = self._some
        self._some, self._all, self._gathered = [], set(), None
        if not last:
            some += [p for p in self._trained.parameters() if hasattr(p, "placements")]  # whose leaves are others
            self._gathered = next(filter(_has_gradient, some), None)

    def forget(self) -> None:
        """Forget an unfinished round."""
        self._abandoned += [*self._some, *([] if self._gathered is None else [self._gathered])]
        self._some, self._all, self._gathered = [], set(), None

    def belong_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this batch's loss has gradients for what an optimizer changes."""
        return bool(self._all) and any(id(p) in self._all for p in parameters_of(optimizer))


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a gradient is there, and is not zero where looking at some of it waits for nobody."""
    gradient = parameter.grad
    if gradient is None or gradient.device.type != "cpu" or hasattr(gradient, "placements") or gradient.is_sparse:
        return gradient is not None
    return bool(_numbers(gradient)[:_LOOKED_AT].any())


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a gradient."""
    local = getattr(gradient, "to_local", lambda: gradient)().detach()
    return (local._values() if local.is_sparse else local).reshape(-1)
