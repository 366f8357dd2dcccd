"""Undoing a micro-batch that ran out of memory, so that it can be done again in parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Attempt"]


class Attempt:
    """A micro-batch that may run out of memory, from its beginning to ``step()``.

    Three kinds of gradient may be there when it fails. One of this micro-batch alone is dropped. One that earlier
    micro-batches of the round have begun is restored from a copy, taken before. One that has left for the other
    ranks cannot be taken back, and need not be: it covers the whole micro-batch, as the backward pass was done
    with it; only the others are computed again.
    """

    def __init__(self) -> None:
        self.open = False
        self.left: set[torch.Tensor] = set()
        """Parameters whose gradients left in a failed attempt of the current round."""
        self._touched: list[torch.Tensor] = []
        self._copies: dict[torch.Tensor, torch.Tensor] | None = None

    def begin(self) -> None:
        """Begin a micro-batch."""
        self.open = True
        self._touched.clear()
        self._copies = None

    def guard(self, accumulated: Iterable[torch.Tensor]) -> None:
        """Copy the gradients of earlier micro-batches, which these parameters hold and this one will add to."""
        self._copies = {p: p.grad.clone() for p in accumulated if p.grad is not None}

    def touch(self, parameter: torch.Tensor) -> bool:
        """Note that a gradient was added to this parameter; return False if an earlier one was already sent."""
        if self.left and parameter in self.left:
            parameter.grad = None
            return False
        self._touched.append(parameter)
        return True

    def over(self) -> None:
        """End the attempt: what follows changes more than gradients, and cannot be undone."""
        self.open = False
        self._copies = None

    def round_over(self) -> None:
        """Note that the gradients of the round are complete."""
        self.left.clear()

    def undo(self, parameters: Iterable[torch.Tensor], left: Iterable[torch.Tensor], accumulating: bool) -> bool:
        """Restore the gradients, but for those that have ``left``; return False if that is impossible."""
        copies, self._copies = self._copies, None
        self.open = False
        self.left.update(left)
        touched = set(self._touched)
        if accumulating and copies is None and touched - self.left:
            return False  # added to, neither gone nor copied
        for parameter in parameters:
            if parameter in self.left:
                parameter.grad = None
            elif copies is not None and parameter in copies:
                parameter.grad = copies[parameter]
            elif not accumulating or parameter in touched:
                parameter.grad = None
        return True
