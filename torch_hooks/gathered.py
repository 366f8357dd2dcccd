"""What a round of several micro-batches has gathered so far, and whether somebody else has changed it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_hetero.errors import RoundStateError

__all__ = ["Gathered"]

_CLEARED = (
    "the gradient that this round has gathered so far is gone: call optimizer.zero_grad(), which keeps it until the "
    "round is complete, and not model.zero_grad(); and without backward(create_graph=True), which makes a new gradient "
    "every time: with it, use a policy with one micro-batch per round"
)
_CHANGED = (
    "the gradient that this round has gathered so far was changed between two micro-batches. To clear it, call "
    "optimizer.zero_grad(), which waits for the end of the round, and not model.zero_grad(). Clip the gradient of the "
    "whole round: in optimizer.register_step_pre_hook(…), or after 'if optimizer.synchronize():' (with a GradScaler, "
    "'if scaler.unscale_(optimizer):')"
)


class Gathered:
    """The gradients that a round's backward passes add to, as each of them left them.

    A backward pass adds in place, which raises the version of the tensor by one; so does our re-scaling, for all of
    them at once. Any other version, or another tensor, is of somebody else. (What is written through ``.data`` raises
    no version, and is not seen.)
    """

    def __init__(self) -> None:
        # By identity: the hash of a tensor is a function of Python. Versions are without those of re-scaling.
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._rescaled = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def forget(self) -> None:
        """A round begins, or is over."""
        self._left.clear()
        self._rescaled = 0

    def added(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to its gradient: raise if that was not all."""
        gradient = parameter.grad
        assert gradient is not None, "its hook was called"
        version = gradient._version - self._rescaled
        former = self._left.get(id(parameter))
        if former is not None and former[0].layout is gradient.layout:  # rows and then a whole tensor make a new one
            _require(gradient is former[0], version == former[1] + 1)
        self._left[id(parameter)] = gradient, version

    def leaves(self, parameter: torch.Tensor) -> None:
        """Its gradient is complete, and another's to watch from now on."""
        self._left.pop(id(parameter), None)

    def require_unchanged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise if a gradient is not as the last backward pass has left it."""
        for parameter in parameters:
            former = self._left.get(id(parameter))
            if former is not None:
                gradient = parameter.grad
                _require(gradient is former[0], former[0]._version - self._rescaled == former[1])

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Bring what has been gathered to other units."""
        torch._foreach_mul_([p.grad for p in parameters if id(p) in self._left and p.grad is not None], factor)
        self._rescaled += 1

    def renew(self, parameters: Iterable[torch.Tensor]) -> None:
        """A micro-batch was undone: watch what is there now."""
        self.forget()
        for parameter in parameters:
            if parameter.grad is not None:
                self._left[id(parameter)] = parameter.grad, parameter.grad._version


def _require(same: bool, unchanged: bool) -> None:
    if not same:
        raise RoundStateError(_CLEARED)
    if not unchanged:
        raise RoundStateError(_CHANGED)
