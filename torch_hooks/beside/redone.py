"""Micro-batches beside a reducer that are done again in parts, since memory was short.

Where the round's gradients are, from call to call:

    guard()                    .grad: earlier micro-batches'   _kept: a copy, for a backward pass that fails
    the body fails             .grad: some of this one's, too  ``Shortage.survived`` catches it, and calls undo()
    undo()                     .grad: none                     _kept: earlier micro-batches'
    guard()                                                    of a part: the reducer leaves out its pass
    backward_ends()            .grad: none                     _kept: the part's, too; ``survived`` catches PartDone
    begin(more_parts=False)                                    the last part, which is reduced as the whole would be
    backward_begins()          .grad: all that was kept        _kept: a copy, if this pass is not reduced and may fail
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torch_hooks.beside.layers import Hook, leaves_of


class PartDone(Exception):  # noqa: N818 - no error: it ends the loop's body
    """A part of a micro-batch is done; what follows in the loop's body is for the whole."""


class Redone:
    """A micro-batch beside a reducer that did not fit: only the last of its parts is reduced, with what others brought.

    Gradients are kept here from part to part, since the body may begin with ``zero_grad()``.
    """

    def __init__(self) -> None:
        self.possible = False
        """True: the loop survives, and no layer waits for other ranks in it."""
        self.copies = True
        """Whether earlier gradients of the round are copied, so that a backward pass which adds to them can fail."""
        self.more_parts = False
        """Whether the batch is a part that others follow, which is not reduced."""
        self.sent: list[Any] = []
        """The models that have sent their buffers in this batch."""
        self._adds = self._in_backward = self._reduces = False
        """Of the batch: whether it adds to gradients of the round, is in its backward pass, is reduced by that."""
        self._guarded = False
        """Whether the batch's backward pass is still to begin, in a loop that survives."""
        self._expecting: list[Any] = []
        """The models of DDP's that are to expect gradients from then on."""
        self._loss: torch.Tensor | None = None
        self._set_aside = False
        """Whether the gradients of the round are in `_kept`, and not in ``.grad``."""
        self._parameters: set[torch.Tensor] = set()
        """What has a gradient of this round so far, as far as it is not reduced yet."""
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._reducers: weakref.WeakSet[Any] | None = None
        """What reduces gradients in this process; None: the loop does not survive."""
        self._before = ExitStack()
        """What puts the reducers back as they were before the loop's body."""

    def begin(self, *, first: bool, more_parts: bool) -> None:
        """Begin a batch. ``first``: of its round. ``more_parts``: others follow this part."""
        self._leave_body()
        if first:
            self.forget()
        self.more_parts, self.sent, self._adds, self._in_backward = more_parts, [], not first, False
        self._guarded, self._expecting = False, []
        if more_parts:
            self._put_aside()

    def forget(self) -> None:
        """Forget an unfinished round."""
        self._leave_body()
        self._set_aside, self._parameters, self._kept = False, set(), {}

    def guard(self, *, last: bool) -> None:
        """Be able to undo the batch that has begun. ``last``: of its round, whose backward pass reduces."""
        if self._reducers is None:
            self._reducers, mine = weakref.WeakSet(_reducers()), weakref.ref(self)
            self.possible = not _waits_in_layers(self._reducers)
            for each in self._reducers:
                if isinstance(each, torch.nn.parallel.DistributedDataParallel):
                    model = weakref.ref(each)
                    each.module.register_forward_pre_hook(Hook(partial(_forward_begins, mine, model)))
                    each.register_forward_hook(Hook(partial(_forward_ends, mine, model)), always_call=True)
        self._guarded = True
        # Not as the batch is drawn: `no_sync` of the loop's, or a Trainer's, may only be around this.
        for each in self._reducers:
            if hasattr(each, "_allreduce_delay"):
                # Horovod's optimizer counts each parameter's passes until it reduces, and offers no call to leave one
                # out. So one is added for this pass.
                self._before.callback(_as_now(each))
                each._allreduce_delay.update({p: k + self.more_parts for p, k in each._allreduce_delay.items()})
            elif self.more_parts:
                # DDP counts no passes: a flag, which this sets, says whether one reduces.
                self._before.enter_context(each.no_sync())
        if not self._set_aside:  # a backward pass that reduces cannot be undone, and needs no copy
            held = self._parameters if self.copies and not last else ()
            self._kept = {p: p.grad.clone() for p in held if p.grad is not None}

    def scaled(self, loss: torch.Tensor, *, last: bool) -> None:
        """Note the loss of a batch in a loop that survives."""
        self._loss = loss if self._expecting else None
        if self._reducers is None or (last and not self.more_parts):
            return
        if self.copies or self.more_parts or not self._reducers:
            self._parameters.update(leaves_of(loss))
        elif not self._parameters:  # of 32 layers this takes a tenth of a walk through the graph, and once a round
            self._parameters = set().union(*map(_reduced, self._reducers))

    def backward_begins(self, *, last: bool) -> None:
        """Give back what earlier parts have brought, as the reducer may take gradients from here on."""
        self._in_backward, self._guarded = True, False
        if self._reducers is None or self.more_parts:
            return
        for each in self._expecting:
            finds_unused = each.find_unused_parameters and not each.static_graph
            each.reducer.prepare_for_backward([self._loss] if finds_unused else [])
        self._loss = None
        self._reduces = last or any(_reduces_now(each, self._parameters) for each in self._reducers)
        if self._set_aside:
            for p, gradient in self._kept.items():
                p.grad = gradient if self._reduces else gradient.clone()
            self._set_aside = False
            if self._reduces:
                self._kept = {}

    def backward_ends(self) -> None:
        """End the loop's body, if its batch is a part that is not reduced."""
        if self.more_parts:
            for p in self._parameters:
                if (gradient := p.grad) is not None:
                    self._kept[p] = self._kept[p] + gradient if p in self._kept else gradient
                    p.grad = None
            # In a callback of autograd: it comes out of the body's backward(), and `Shortage.survived` catches it.
            raise PartDone

    def undo(self) -> bool:
        """Undo the batch at hand; return False if that is impossible, since a collective may have begun."""
        strange = len(_reducers()) > len(self._reducers or ())  # wrapped since: it would reduce each part
        lost = self._reduces or (self._adds and not self.copies)
        if strange or (self._in_backward and lost and not self.more_parts):
            return False
        # Else ``guard``, or the beginning of the backward pass, has kept what earlier batches and parts brought.
        self._put_aside(keep=not self._in_backward)
        self._before.close()
        for each in self.sent:
            each.require_forward_param_sync = False  # buffers travel once in a round
        return True

    def _leave_body(self) -> None:
        """Put the reducers back behind a part, of which they shall know nothing; not behind a whole batch."""
        if not self.more_parts:
            self._before.pop_all()
        self._before.close()

    def _put_aside(self, *, keep: bool = True) -> None:
        """Move the gradients of the round's earlier batches from ``.grad`` to ``_kept``; clear what a failure left."""
        if keep and not self._set_aside:
            self._kept = {p: p.grad for p in self._parameters if p.grad is not None}
        for p in self._parameters:
            p.grad = None
        self._set_aside = True


def _as_now(optimizer: Any) -> Callable[[], None]:
    """Return what restores the backward passes that Horovod's optimizer has counted by now."""
    handles, delays = dict(optimizer._handles), dict(optimizer._allreduce_delay)

    def restore() -> None:
        optimizer._handles = dict(handles)
        optimizer._allreduce_delay.update(delays)

    return restore


def _forward_begins(redone: weakref.ref[Redone], model: weakref.ref[Any], *_: Any) -> None:
    """Note that DDP has sent the buffers of its model, which it does before the forward pass of what it wraps.

    At the end of a forward pass DDP begins to expect gradients, and reduces those of the next backward pass, be it a
    part's. What comes between, such as the loss, may still run out of memory. So it begins as the backward pass does.
    A user's own pass through what DDP wraps is none of DDP's.
    """
    if (noting := redone()) is not None and (each := model()) is not None and each._get_active_ddp_module() is each:
        noting.sent.append(each)
        if noting._guarded and torch.is_grad_enabled() and each.require_backward_grad_sync:
            each.require_backward_grad_sync = False
            noting._expecting.append(each)


def _forward_ends(redone: weakref.ref[Redone], model: weakref.ref[Any], *_: Any) -> None:
    each: Any = model()
    if (noting := redone()) is not None and each in noting._expecting:
        each.require_backward_grad_sync = each.require_forward_param_sync = True


def _reducers() -> list[Any]:
    """Return what reduces gradients in this process: models of DDP's and FSDP2's, and Horovod's optimizers."""
    ddp = torch.nn.parallel.DistributedDataParallel
    models = [e for e in _alive(torch.nn.Module) if issubclass(type(e), ddp) or _waits(e)]
    return models + [e for e in _alive(torch.optim.Optimizer) if hasattr(e, "_allreduce_delay")]


def _alive(kind: type) -> list[Any]:
    # isinstance() would ask an object's own __class__, which may do anything.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _reduced(by: Any) -> set[torch.Tensor]:
    """Return the parameters whose gradients it reduces."""
    if isinstance(by, torch.nn.Module):
        return set(by.parameters())
    return {p for group in by.param_groups for p in group["params"]}


def _waits_in_layers(reducers: Iterable[Any]) -> bool:
    """Return whether any waits for other ranks in each pass: FSDP2, DeepSpeed's engine, or a SyncBatchNorm in it."""
    norms = {e.weight for e in _alive(torch.nn.Module) if "SyncBatchNorm" in [k.__name__ for k in type(e).__mro__]}
    return any(_waits(each) or norms & _reduced(each) for each in reducers)


def _waits(model: Any) -> bool:
    return hasattr(type(model), "unshard") or type(model).__name__ == "DeepSpeedEngine"


def _reduces_now(each: Any, parameters: set[torch.Tensor]) -> bool:
    """Return whether it would reduce gradients of these parameters in the backward pass that begins."""
    if hasattr(each, "_allreduce_delay"):
        return any(delay <= 1 and p in parameters for p, delay in each._allreduce_delay.items())
    return getattr(each, "require_backward_grad_sync", True) and bool(_reduced(each) & parameters)
