"""Undoing a micro-batch that ran out of memory, so that it can be done again in parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Attempt"]


class Attempt:
    """A micro-batch that may run out of memory, from its beginning to ``step()``.

    Three kinds of gradient may be there when it fails. One of this micro-batch alone is dropped. One that earlier
    micro-batches of the round have begun is restored from a copy, taken before. One that has left for the other
    ranks cannot be taken back, and need not be: it is that of the whole micro-batch, for the backward pass was done
    with it; only the others are computed again.
    """

    def __init__(self) -> None:
        self.open = False
        self.left: set[torch.Tensor] = set()
        """parameters whose gradients left in a failed attempt of the round at hand"""
        self._touched: list[torch.Tensor] = []
        self._copies: dict[torch.Tensor, torch.Tensor] | None = None

    def begin(self) -> None:
        """A micro-batch begins."""
        self.open = True
        self._touched.clear()
        self._copies = None

    def guard(self, accumulated: Iterable[torch.Tensor]) -> None:
        """Copy the gradients of earlier micro-batches, which these parameters hold and this one will add to."""
        self._copies = {p: p.grad.clone() for p in accumulated if p.grad is not None}

    def touch(self, parameter: torch.Tensor) -> bool:
        """A gradient was added to this parameter. Return False if an earlier one was already sent."""
        if self.left and parameter in self.left:
            parameter.grad = None
            return False
        self._touched.append(parameter)
        return True

    def over(self) -> None:
        """From now on it cannot be undone: what follows changes more than gradients."""
        self.open = False
        self._copies = None

    def round_over(self) -> None:
        """The gradients of the round are all there."""
        self.left.clear()

    def undo(self, parameters: Iterable[torch.Tensor], left: Iterable[torch.Tensor], accumulating: bool) -> bool:
        """Bring the gradients back to where they were, but for those that have ``left``; False if that cannot be."""
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
