"""The gradients that a round of several micro-batches has gathered so far, and whether the user has changed them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from hvd_hetero.errors import RoundStateError

__all__ = ["Gathered", "norm_of"]

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


_BY_VALUE = 2  # rounds of several micro-batches: what a loop's body does in these it does in all


class Gathered:
    """The gradients that a round's backward passes add to, as each of them left them.

    A backward pass adds in place, which raises the version of the tensor by one; so does our re-scaling, for all of
    them at once. Any other version, or another tensor, is a change by the user. What is written through ``.data`` or
    ``.numpy()`` raises no version: in the first rounds norms are compared, too, right before a backward pass adds.
    """

    def __init__(self) -> None:
        # By identity: the hash of a tensor is a function of Python. Versions leave out re-scaling.
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._rescaled = 0
        self._norms: dict[int, float] = {}
        self._rounds = 0
        self._hooks: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def forget(self) -> None:
        """Forget everything: a round begins, or is over."""
        if self._left or self._norms:
            self._left.clear()
            self._norms.clear()
        self._rescaled = 0
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Prepare to add a micro-batch to what earlier ones have left, in units that are ``factor`` times as large."""
        parameters = list(parameters)
        self.require_unchanged(parameters)
        if factor != 1.0:
            self._rescale(parameters, factor)
        if self._norms and not self._hooks:
            self._rounds += 1
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = partial(self._about_to_add, parameter)
                    self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def added(self, parameter: torch.Tensor, *, complete: bool) -> None:
        """Raise if a gradient was changed besides the addition of a backward pass; a ``complete`` one gets no more."""
        gradient = parameter.grad
        assert gradient is not None, "its hook was called"
        version = gradient._version - self._rescaled
        former = self._left.get(id(parameter))
        if former is not None and former[0].layout is gradient.layout:  # rows and then a whole tensor make a new one
            _require(gradient is former[0], version == former[1] + 1)
        if complete:
            self._left.pop(id(parameter), None)
            self._norms.pop(id(parameter), None)
            return
        self._left[id(parameter)] = gradient, version
        if self._rounds < _BY_VALUE or self._hooks:
            self._norms[id(parameter)] = norm_of(gradient)

    def require_unchanged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise if a gradient is not as the last backward pass has left it."""
        if not self._left:
            return
        for parameter in parameters:
            former = self._left.get(id(parameter))
            if former is not None:
                gradient = parameter.grad
                _require(gradient is former[0], former[0]._version - self._rescaled == former[1])
                self._require_value(parameter)

    def renew(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch what is there now, after a micro-batch was undone."""
        self.forget()
        for parameter in parameters:
            if parameter.grad is not None:
                self._left[id(parameter)] = parameter.grad, parameter.grad._version

    def _rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        gathered = {id(p): p.grad for p in parameters if id(p) in self._left and p.grad is not None}
        torch._foreach_mul_(list(gathered.values()), factor)
        self._rescaled += 1
        self._norms.update({number: norm_of(gathered[number]) for number in self._norms if number in gathered})

    def _about_to_add(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        if id(parameter) in self._norms and parameter.grad is not None:
            self._require_value(parameter)

    def _require_value(self, parameter: torch.Tensor) -> None:
        noted = self._norms.get(id(parameter))
        if noted is not None and parameter.grad is not None:
            now = norm_of(parameter.grad)
            _require(True, now == noted or now != now)


def norm_of(gradient: torch.Tensor) -> float:
    """Return the norm of a gradient's numbers, as they are stored."""
    numbers = gradient.detach()
    return float((numbers if numbers.layout is torch.strided else numbers._values()).norm())


def _require(same: bool, unchanged: bool) -> None:
    if not same:
        raise RoundStateError(_CLEARED)
    if not unchanged:
        raise RoundStateError(_CHANGED)
