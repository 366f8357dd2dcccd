"""What optimizers say: when they step in a round, and how long the update takes."""

from __future__ import annotations

import math

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from torch_hooks.beside.trained import Trained, is_horovods
from torch_hooks.rates import Rates

IN_BETWEEN = (
    "came in the middle of a round of several micro-batches; write: if balance.round_complete: optimizer.step(); "
    "optimizer.zero_grad()"
)
_REDUCED_BEFORE = (
    "step(closure) of hvd.DistributedOptimizer reduces gradients before it calls the closure. Call backward() before "
    "step(); or end the closure with optimizer.synchronize(), and step inside optimizer.skip_synchronize()"
)
_TWICE = "scale() came twice for one batch, which would count twice; "
_ADDED = "add the losses, of several models too, and scale their sum"
_IN_TURN = (
    "models that step in turn need DistributedOptimizer, with balance.also() for the second. Optimizers that need two "
    "backward passes of a batch (SAM) do not go with unequal batches"
)
_CLOSURE = (
    "the closure of step() has run again. Use an optimizer that calls it once: LBFGS decides by the loss of this rank "
    "alone how often it does"
)


class Steps:
    """The steps for the batch at hand. Horovod's optimizer steps around the one inside, and waits between the two."""

    def __init__(self, balancer: Balancer, trained: Trained) -> None:
        self._balancer, self._trained = balancer, trained
        self._rates = Rates(balancer)
        self._inside: list[torch.optim.Optimizer] = []
        """Those in step(), the outermost first."""
        self._stepped = False
        """True: an optimizer has stepped with this batch's gradient."""
        self._update_began_at = math.nan
        self._advanced = -1
        """The latest round whose update has begun."""

    def begin_batch(self) -> None:
        """Begin a batch."""
        self._inside, self._stepped = [], False

    def end_batch(self) -> None:
        """End what a step that has raised has left."""
        self._rates.restore()

    def forget(self) -> None:
        """Forget an unfinished round."""
        self._advanced = -1

    def twice(self) -> RoundStateError:
        """Return the error of a second loss for one batch."""
        return RoundStateError(_TWICE + (_CLOSURE if self._inside else _IN_TURN if self._stepped else _ADDED))

    def reduced(self) -> None:
        """Note that all gradients are reduced: in the closure of a step, the update follows."""
        if self._inside:
            self._update_begins(self._balancer.meter.batch.clock())

    def begins(self, optimizer: torch.optim.Optimizer, *, closure: bool, done: bool) -> None:
        """Note that a step begins. ``closure``: it has one to call. ``done``: the batch's gradients are there."""
        self._inside.append(optimizer)
        if not done:
            if closure and len(self._inside) == 1 and getattr(optimizer, "_should_synchronize", False):  # Horovod's
                raise RoundStateError(_REDUCED_BEFORE)
            return
        self._require_complete()
        now = self._balancer.meter.batch.clock()
        if len(self._inside) == 2 and is_horovods(optimizer):
            self._balancer.meter.waited(now - self._update_began_at)
        if len(self._inside) == (2 if is_horovods(optimizer) else 1):
            self._update_begins(now)
        else:
            self._update_began_at = now

    def ends(self, optimizer: torch.optim.Optimizer, *, done: bool) -> None:
        """Note that the optimizer has stepped."""
        if all(optimizer is not each for each in self._inside):
            return
        while self._inside[-1] is not optimizer:  # it has raised
            self._inside.pop()
        if len(self._inside) == (2 if is_horovods(optimizer) else 1) and not math.isnan(self._update_began_at):
            self._balancer.meter.applied(self._balancer.meter.batch.clock() - self._update_began_at)
            self._update_began_at = math.nan
        self._inside.pop()
        if not self._inside and done:  # else it does not use this batch's gradient
            self._require_complete()
            self._stepped = True
            self._trained.stepped(optimizer)

    def _require_complete(self) -> None:
        if self._balancer.between_updates:
            raise RoundStateError(f"step() {IN_BETWEEN}")

    def _update_begins(self, now: float) -> None:
        self._update_began_at = now
        self._balancer.meter.applying(waited=True)
        if self._advanced != self._balancer.rounds:  # once for several optimizers; a state may take rounds back
            self._advanced = self._balancer.rounds
            self._balancer.planner.advance(self._balancer.work.plan.total)
        self._rates.multiply(self._inside[-1])
