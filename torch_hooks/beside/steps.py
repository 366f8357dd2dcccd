"""The steps of optimizers in a round beside a reducer, and how long the update takes."""

from __future__ import annotations

import math

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from torch_hooks.beside.stepping_optimizers import SteppingOptimizers, is_horovods
from torch_hooks.rates import Rates

IN_BETWEEN = (
    "came in the middle of a round of several micro-batches. Write: if balance.round_complete: optimizer.step(); "
    "optimizer.zero_grad()"
)
_REDUCED_BEFORE = (
    "step(closure) of hvd.DistributedOptimizer reduces gradients before it calls the closure. Call backward() before "
    "step(); or end the closure with optimizer.synchronize(), and step inside optimizer.skip_synchronize()"
)
_TWICE = "scale() was called twice for one batch. Add the losses, those of several models too, and scale their sum"
_IN_TURN = (
    "scale() was called for a batch that an optimizer has stepped with already. Models that step in turn need "
    "DistributedOptimizer, with balance.also() for the second one"
)
# LBFGS decides by this rank's own loss how often it calls the closure, so ranks would do unequal numbers of rounds.
_CLOSURE = (
    "scale() was called twice for one batch, because step() has called its closure again. Use an optimizer that calls "
    "it once, unlike LBFGS and SAM"
)


class Steps:
    """Checks and times the steps for the current batch."""

    def __init__(self, balancer: Balancer, trained: SteppingOptimizers) -> None:
        self._balancer, self._trained = balancer, trained
        self._rates = Rates(balancer)
        self._inside: list[torch.optim.Optimizer] = []
        """Optimizers whose step() is running, the outermost first: Horovod's calls that of the one inside."""
        self._stepped = False
        """True: an optimizer has stepped with this batch's gradient."""
        self._update_began_at = math.nan
        self._advanced = -1
        """The latest round whose update has begun."""

    def begin_batch(self) -> None:
        """Expect the steps of a new batch."""
        self._inside, self._stepped = [], False

    def end_batch(self) -> None:
        """Restore the learning rates, which a step that has raised has left multiplied."""
        self._rates.restore()

    def forget(self) -> None:
        """Forget an unfinished round."""
        self._advanced = -1

    def twice(self) -> RoundStateError:
        """Return the error of a second loss for one batch."""
        return RoundStateError(_CLOSURE if self._inside else _IN_TURN if self._stepped else _TWICE)

    def reduced(self) -> None:
        """Note that all gradients are reduced: in the closure of a step, the update follows."""
        if self._inside:
            self._update_begins(self._balancer.meter.batch.clock())

    def begins(self, optimizer: torch.optim.Optimizer, *, closure: bool, done: bool) -> None:
        """Note that a step begins. ``closure``: it has one to call. ``done``: the batch's gradients are there."""
        self._inside.append(optimizer)
        if not done:
            # Only Horovod's optimizer has this attribute. It is False inside `skip_synchronize`, where step() reduces
            # nothing, so that its closure may still bring the gradients.
            if closure and len(self._inside) == 1 and getattr(optimizer, "_should_synchronize", False):
                raise RoundStateError(_REDUCED_BEFORE)
            return
        self._require_complete()
        now = self._balancer.meter.batch.clock()
        # Horovod's optimizer waits for the other ranks in its step(), before it calls the step of the one inside.
        if len(self._inside) == 2 and is_horovods(optimizer):
            self._balancer.meter.add_wait(now - self._update_began_at)
        if len(self._inside) == (2 if is_horovods(optimizer) else 1):
            self._update_begins(now)
        else:
            self._update_began_at = now

    def ends(self, optimizer: torch.optim.Optimizer, *, done: bool) -> None:
        """Note that the optimizer has stepped."""
        if all(optimizer is not each for each in self._inside):
            return
        # Those above it have raised: PyTorch calls no hook of a step that fails.
        while self._inside[-1] is not optimizer:
            self._inside.pop()
        if len(self._inside) == (2 if is_horovods(optimizer) else 1) and not math.isnan(self._update_began_at):
            self._balancer.meter.applied(self._balancer.meter.batch.clock() - self._update_began_at)
            self._update_began_at = math.nan
        self._inside.pop()
        # Inner loops and adversarial inputs step before the scaled loss is propagated, by gradients of this rank alone.
        # Comparing those over the ranks would stop the training.
        if not self._inside and done:
            self._require_complete()
            self._stepped = True
            self._trained.stepped(optimizer)

    def _require_complete(self) -> None:
        if self._balancer.between_updates:
            planner = self._balancer.planner
            raise RoundStateError(f"step() {IN_BETWEEN}. {planner.room.lack(planner.global_batch)}".rstrip(". "))

    def _update_begins(self, now: float) -> None:
        self._update_began_at = now
        self._balancer.meter.applying(waited=True)
        # Once for several optimizers. Not by "later than": loading a state may take the round number back.
        if self._advanced != self._balancer.rounds:
            self._advanced = self._balancer.rounds
            self._balancer.planner.count_update(self._balancer.work.plan.total)
        self._rates.multiply(self._inside[-1])
