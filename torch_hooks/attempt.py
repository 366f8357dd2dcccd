"""Undoing a micro-batch that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Attempt"]


class Attempt:
    """A micro-batch that may run out of memory.

    What is on its way to other ranks cannot be taken back, and what a backward pass has added to gradients cannot be
    told from what was there. So a micro-batch larger than any that has gone well is attempted with its gradients held
    back until all are there, and with a copy of those it adds to.
    """

    def __init__(self) -> None:
        self.guarded = False
        self.touched = False
        self._samples = self._proven = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, samples: int) -> None:
        """A micro-batch of this size begins."""
        self.guarded = self.touched = False
        self._samples = samples
        self._copies.clear()

    def guard(self, accumulated: list[torch.Tensor]) -> None:
        """It may fail; these parameters hold gradients of earlier micro-batches."""
        if self._samples > self._proven:
            self.guarded = True
            self._copies = [(p, p.grad.clone()) for p in accumulated if p.grad is not None]

    def succeeded(self) -> None:
        """It is done."""
        self._proven = max(self._proven, self._samples)
        self.guarded = False
        self._copies.clear()

    def undo(self, parameters: Iterable[torch.Tensor], accumulating: bool) -> bool:
        """Bring the gradients back to where they were, if that is possible."""
        if accumulating and self.touched:
            if not self.guarded:
                return False
            for parameter, gradient in self._copies:
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
            kept = {id(p) for p, _ in self._copies}
            for parameter in parameters:
                if id(parameter) not in kept:
                    parameter.grad = None
        elif not accumulating:
            for parameter in parameters:
                parameter.grad = None
        self._copies.clear()
        return True
