"""Which parameters get gradients from the losses of a round, and whether those gradients are still there."""

from __future__ import annotations

from itertools import islice

import torch

from torch_hooks.beside.layers import leaves_of
from torch_hooks.beside.stepping_optimizers import SteppingOptimizers, parameters_of
from torch_hooks.gradients.sparse import some_numbers

_CHECKED_LEAVES = 4  # parameters of a loss: the nearest one may be without gradient, and walking the graph costs time


class Leaves:
    """Finds out whether gradients were cleared inside of a round, left over from another, and whose they are."""

    def __init__(self, trained: SteppingOptimizers) -> None:
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
        """Note which parameters a batch's loss reaches. ``several``: this loop has several trainings."""
        # Behind the last micro-batch, clearing gradients is what a loop should do.
        if not last:
            parameters = (p for p in leaves_of(loss) if isinstance(p, torch.nn.Parameter))
            self._some = list(islice(parameters, _CHECKED_LEAVES))
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
        """Whether the gradients that this round has accumulated were cleared."""
        return self._gathered is not None and not _has_gradient(self._gathered)

    def keep_watch(self) -> None:
        """End a batch that others of its round follow: what they have accumulated must stay."""
        # A loss reaches the gathered copies of sharded parameters, not the parameters themselves.
        some = self._some + [p for p in self._trained.parameters() if hasattr(p, "placements")]
        self.stop_watching()
        self._gathered = next(filter(_has_gradient, some), None)

    def stop_watching(self) -> None:
        """Let gradients be cleared or moved: the round is over, or done again from a copy of them."""
        self._some, self._all, self._gathered = [], set(), None

    def forget(self) -> None:
        """Forget an unfinished round."""
        # Its gradients may be found in .grad by the next round, whose gradient was then wrong by 4.4e-3 without a word.
        self._abandoned += [*self._some, *([] if self._gathered is None else [self._gathered])]
        self.stop_watching()

    def belong_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this batch's loss has gradients for what an optimizer changes."""
        return bool(self._all) and any(id(p) in self._all for p in parameters_of(optimizer))


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether there is a gradient, and, on a CPU, whether it is other than zero."""
    gradient = parameter.grad
    # Looking at an accelerator's or a sharded gradient would wait for the device, or for other ranks.
    if gradient is None or gradient.device.type != "cpu" or hasattr(gradient, "placements") or gradient.is_sparse:
        return gradient is not None
    return bool(some_numbers(gradient).any())


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient that this rank holds."""
    local = getattr(gradient, "to_local", lambda: gradient)().detach()
    return (local._values() if local.is_sparse else local).reshape(-1)
