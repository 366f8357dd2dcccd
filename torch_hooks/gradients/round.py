"""The gradients of this rank's round: gathered over its micro-batches, undone if memory runs short, sent at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.attempt import Attempt
from torch_hooks.gradients.gathered import Gathered
from torch_hooks.gradients.synchroniser import Synchroniser

__all__ = ["RoundGradients"]

_WITHOUT_A_BATCH = (
    "a gradient came without a batch: iterate over a BalancedLoader, or announce your own batch with "
    "balance.batch(samples) before its forward pass. If this model has a new optimizer now, close() the former one; if "
    "another optimizer's loss reaches this model, give that one balance.also(), or freeze this one meanwhile by "
    "requires_grad_(False)"
)
_IN_TURN = (
    "a gradient came after step() of an optimizer whose round goes on: optimizers that step in turn need rounds of one "
    "micro-batch, for the first of them updates only at the end of the round; use a policy without max_micro_batch, "
    "such as policy='lb-bsp' or 'bsp', or compute all losses before the first step()"
)


class RoundGradients:
    """From the beginning of a round's first micro-batch until the synchroniser has finished.

    ``loop_at_work`` returns whether any optimizer of the loop has still to step for the current batch.
    """

    def __init__(
        self,
        balancer: Balancer,
        names: dict[torch.Tensor, str],
        synchroniser: Synchroniser,
        loop_at_work: Callable[[], bool],
    ) -> None:
        self._balancer = balancer
        self._names = names
        self._synchroniser = synchroniser
        self._loop_at_work = loop_at_work
        self._attempt = Attempt()
        self._gathered = Gathered()
        self._straight = False
        """True if each gradient leaves as it comes, with nothing gathered before it, so that no more needs doing."""

    @property
    def accumulating(self) -> bool:
        """True if gradients of earlier micro-batches wait to be added to."""
        return self._balancer.accumulating and not self._synchroniser.updates_locally

    @property
    def done_in_parts(self) -> bool:
        """True if gradients of a whole micro-batch have left that is done again, in parts, for the others."""
        return bool(self._attempt.left)

    @property
    def _leave(self) -> bool:
        return self._balancer.closing and self._synchroniser.overlaps

    def begin_micro_batch(self) -> None:
        """Bring the gradient accumulated so far to the units of the micro-batch that begins (see ``Balancer``).

        What an earlier round has left is cleared, in whatever order the loop calls ``zero_grad()`` and ``step()``: its
        body, which does so, does not run on a rank without data.
        """
        self._attempt.begin()
        accumulating = self.accumulating
        self._straight = self._leave and not (accumulating or self._attempt.left)
        if not accumulating:
            self._gathered.forget()
            for parameter in self._names:
                parameter.grad = None
            return
        self._gathered.begin(self._names, self._balancer.rescale)

    def arrived(self, parameter: torch.Tensor, note: Any) -> None:
        """Take a parameter's gradient that a backward pass has completed."""
        if self._straight:
            self._synchroniser.arrived(note)
            return
        if not self._balancer.at_work:
            # No matter if another optimizer's loss has brought it in its own time: the next round clears it.
            if not self._loop_at_work():
                raise RoundStateError(_WITHOUT_A_BATCH)
            if self._balancer.in_round:
                raise RoundStateError(_IN_TURN)
            return
        if not self._attempt.touch(parameter):
            return
        if not self._synchroniser.updates_locally:
            self._gathered.added(parameter, complete=self._balancer.closing)
        if self._leave:
            self._synchroniser.arrived(note)

    def guard_micro_batch(self) -> None:
        """Be able to undo the micro-batch that has begun: it may run out of memory."""
        if self.accumulating:
            self._attempt.guard(self._names)

    def undo_micro_batch(self) -> bool:
        """Undo the micro-batch, but for gradients that have left and are complete; return whether that was possible."""
        if not self._attempt.open:
            return False
        self._straight = False
        left = self._synchroniser.set_aside()
        undone = self._attempt.undo(self._names, left, self.accumulating)
        self._gathered.renew(self._names)
        return undone

    def applied(self) -> None:
        """End the micro-batch, which cannot be undone any more."""
        self._attempt.over()

    def finish(self) -> None:
        """Synchronise: the gradients are then the sums over all ranks."""
        self._straight = False
        self._attempt.over()
        if self._synchroniser.overlaps:  # else the gradient is this rank's own, to do with as it likes
            self._gathered.require_unchanged(self._names)
        self._gathered.forget()
        self._synchroniser.finish()
        self._attempt.round_over()

    def abandon(self) -> None:
        """Forget what an unfinished round has gathered."""
        if self._synchroniser.gradients_left:
            raise RoundStateError(
                "the loop was left between backward() and step(), with gradients on their way to the other ranks; "
                "call optimizer.step() before leaving it, or give the loader stop_at=rounds"
            )
        self._straight = False
        self._balancer.abandon()
        self._synchroniser.forget()
        self._attempt.round_over()
