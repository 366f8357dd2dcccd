"""The gradients that a round accumulates on this rank: whether the user changed them, and how to undo a micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.buckets import shares_memory
from torch_hooks.gradients.sparse import stored

_IN_TURN = (
    "a gradient came after step() of an optimizer whose round is not complete. Optimizers that step in turn need "
    "rounds of one micro-batch, since the first one updates only at the end of the round. Use a policy without "
    "max_micro_batch, such as policy='lb-bsp' or 'bsp', or compute all losses before the first step()"
)
_CLEARED_IN_A_ROUND = (
    "of which this round has gathered a part, was replaced by the loop's body. To clear it, call "
    "optimizer.zero_grad(), which waits for the end of the round, and not model.zero_grad(). With "
    "backward(create_graph=True), which makes a new gradient each time, use a policy with one micro-batch per round"
)
_CHANGED_IN_A_ROUND = (
    "of which this round has gathered a part, was changed by the loop's body. Clip in "
    "optimizer.register_step_pre_hook(…), or after 'if optimizer.synchronize():' (with a GradScaler, 'if "
    "scaler.unscale_(optimizer):')"
)
_BEFORE_THE_SUM = (
    "was changed between backward() and step(), before it was summed over the ranks. Clip or unscale in "
    "optimizer.register_step_pre_hook(…), or write: if optimizer.synchronize(): clip; with "
    "optimizer.skip_synchronize(): optimizer.step(). transformers' Trainer clips even at max_grad_norm=0 "
    "(docs/porting.md)"
)
_AFTER_THE_SUM = (
    "was added to between synchronize() and step(), after it was summed over the ranks, so ranks would part. Do all "
    "backward passes of a batch before synchronize()"
)
_CLEARED = (
    "zero_grad() came after backward(), in a round that keeps the gradients of earlier micro-batches. Call it before "
    "the first backward() of a batch. Let a loss reach only the parameters that it trains: "
    "loss.backward(inputs=[*model.parameters()])"
)


class _SeenGradient:
    """A parameter's gradient, and its version, as of the end of the last backward pass."""

    __slots__ = ("tensor", "version")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.version = 0

    def note(self, gradient: torch.Tensor | None) -> None:
        self.tensor, self.version = gradient, 0 if gradient is None else gradient._version


class Gathered:
    """The gradients of a round from its first micro-batch until they are summed or used.

    ``summed``: they will be summed over the ranks, so the loop's body must not change them before.
    """

    def __init__(self, balancer: Balancer, names: dict[torch.Tensor, str], *, summed: bool) -> None:
        self._balancer = balancer
        self._names = names
        self._summed = summed
        self._left: dict[torch.Tensor, _SeenGradient] = {}
        self._hooks: list[Any] = []
        self._open = self._adds = False
        """Whether a micro-batch has begun, which may be undone; whether it adds to gradients of earlier ones."""
        self._has_added = False
        self.awaits_step = False
        """True: the gradients are sums over the ranks, which the optimizer has still to use."""
        self._copies: dict[torch.Tensor, torch.Tensor] | None = None

    def listen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Register hooks of these parameters, too. A frozen one has none: pass it again once it is trained."""
        # A model may outlive its optimizer, and be trained by another one.
        me = weakref.ref(self)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._left:
                left = self._left[parameter] = _SeenGradient()
                # The hook has this object, as a look into a dictionary by tensor would cost every step.
                hook = _hook(me, left)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks of all parameters."""
        while self._hooks:
            self._hooks.pop().remove()
        self._left.clear()

    def begin(self, *, adds: bool) -> None:
        """Begin a micro-batch, which ``adds`` to those before: in units of its samples (see ``Balancer``)."""
        self._open, self._adds, self._copies = True, adds, None
        self._has_added = self.awaits_step = False
        if not adds:
            # In whatever order the loop calls zero_grad() and step(), and also on a rank without data, where the loop's
            # body, which does so, does not run.
            for parameter in self._names:
                parameter.grad = None
            for left in self._left.values():
                left.note(None)
            return
        gathered = [stored(p.grad) for p in self._names if p.grad is not None]
        if gathered and self._balancer.gradient.rescale != 1.0:
            # Through .data, which leaves versions as they are, since this is no change by the user.
            torch._foreach_mul_([numbers.data for numbers in gathered], self._balancer.gradient.rescale)

    def arrived(self, parameter: torch.Tensor, left: _SeenGradient) -> None:
        """Take a parameter's gradient that a backward pass has completed."""
        gradient = parameter.grad
        assert gradient is not None, "its hook was called"
        if not self._open:
            if self.awaits_step:
                raise RoundStateError(f"the gradient of {self._names[parameter]!r} {_AFTER_THE_SUM}")
            if self._balancer.in_round and not self._balancer.at_work:
                raise RoundStateError(_IN_TURN)
            # Perhaps the loss of another optimizer reaches this parameter, too: the next round clears it.
            return
        adds = self._adds and left.tensor is not None and left.tensor.layout is gradient.layout
        # A backward pass adds in place, which raises the version by one. Any other version, or another tensor, is a
        # change by the user, of a part of the round's gradient: one process would change the whole. What is written
        # through .data or .numpy() raises no version, and is not found out.
        if adds and not (gradient is left.tensor and gradient._version == left.version + 1):
            raise self._changed(parameter, left)
        self._has_added = self._adds
        if left.tensor is None and gradient.layout is torch.strided and shares_memory(gradient):
            # Else adding to one of the tensors that share it, or clipping it, would change the other.
            gradient = parameter.grad = gradient.clone()
        left.note(gradient)

    def keep(self) -> None:
        """Keep the round's gradients, which the loop wants to clear; raise if it means those of this micro-batch."""
        # The pass that the loop throws away would stay in the sum, which was silently wrong.
        if self._open and self._has_added:
            raise RoundStateError(_CLEARED)

    def guard(self) -> None:
        """Copy the gradients of earlier micro-batches, so that the current one can be undone."""
        if self._adds:
            self._copies = {p: p.grad.clone() for p in self._names if p.grad is not None}

    def undo(self) -> bool:
        """Undo the micro-batch, which may be done again in parts; return False if that is impossible."""
        if not self._open or (self._adds and self._copies is None):
            return False
        self._open, copies, self._copies = False, self._copies or {}, None
        for parameter in self._names:
            parameter.grad = copies.get(parameter)
        for parameter, left in self._left.items():
            left.note(parameter.grad)
        return True

    def done(self) -> None:
        """End the micro-batch: what follows changes more than gradients, and cannot be undone."""
        self._open, self._copies = False, None

    def complete(self) -> None:
        """End the last micro-batch of a round: its gradients are about to be summed over the ranks, or used."""
        self.done()
        for parameter, left in self._left.items() if self._summed else ():
            gradient = parameter.grad
            if left.tensor is not None and (gradient is not left.tensor or gradient._version != left.version):
                raise self._changed(parameter, left)

    def _changed(self, parameter: torch.Tensor, left: _SeenGradient) -> RoundStateError:
        in_a_round = _CHANGED_IN_A_ROUND if parameter.grad is left.tensor else _CLEARED_IN_A_ROUND
        gathers = self._adds or self._balancer.between_updates
        why = f", {in_a_round}" if gathers else f" {_BEFORE_THE_SUM}"
        return RoundStateError(f"the gradient of {self._names[parameter]!r}{why}")


def _hook(gathered: weakref.ref[Gathered], left: _SeenGradient) -> Callable[[torch.Tensor], None]:
    def on_gradient(parameter: torch.Tensor) -> None:
        if (who := gathered()) is not None:
            who.arrived(parameter, left)

    return on_gradient
