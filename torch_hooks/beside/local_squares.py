"""The squares of gradients in one round beside a reducer, which keeps no rank's own.

With the loss factor a_ij (``loss_factors``) and the factor f of a gradient scaler, hooks of parameters see f a_ij g_ij,
and f g is in ``.grad`` when the round's last backward pass is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.rounds import MicroBatch
from torch_hooks.beside.stepping_optimizers import SteppingOptimizers
from torch_hooks.gradients.squares import Squares, square_of, sum_of


class Noise:
    """Measures gradient noise in some rounds. ``divisor``: n of a reducer that takes the mean."""

    def __init__(self, balancer: Balancer, trained: SteppingOptimizers, divisor: int) -> None:
        self._balancer, self._trained, self._divisor = balancer, trained, divisor
        self._parameters: Sequence[torch.Tensor] = ()
        """Those whose gradients are measured; none in a round that is not."""
        self._samples = 0.0
        """Samples of a batch whose a_ij is 1."""
        self._listening = ExitStack()
        self._came: dict[int, torch.Tensor] = {}
        self._own: list[torch.Tensor] = []
        """a_ij |g_ij|² of each micro-batch with samples."""
        self._factors = 0.0
        """The sum of a_ij."""
        self._scale = torch.ones(())
        self._stale: torch.Tensor | None = None
        """NaN if an earlier round's gradient was still there, to which this one's adds; else 0."""
        self._measured: tuple[int, int, Squares] | None = None
        """A round, its micro-batches with samples, and its squares, until a row takes them along."""

    def begin_batch(self, work: MicroBatch) -> None:
        """Begin a batch: at the first of a round, decide whether it is measured."""
        every = self._trained.every
        if every and self._measured is None and not self._balancer.in_round and self._balancer.measures_noise(every):
            self._parameters, self._samples = self._trained.parameters(), work.plan.total / self._divisor
            self._own, self._factors, self._stale = [], 0.0, None

    def leave_out(self) -> None:
        """Do not measure this round: something else weighs its gradient, too, by factors that are unknown here."""
        self._parameters = ()
        if self._balancer.planner.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) needs each rank's own gradient, which a normalised loss hides. Scale the mean "
                "loss of this rank's batch, or give a constant global_batch"
            )

    def backward_begins(self, scale: torch.Tensor) -> None:
        """Register hooks for a backward pass. ``scale``: the gradient of the loss, f."""
        if not self._parameters:
            return
        self._scale, self._came = scale.detach().double(), {}
        if self._stale is None:
            # The mean is read from .grad, so it must not hold an older gradient. NaN keeps the round out of the noise.
            self._stale = torch.where(self._present() > 0.0, math.nan, 0.0)
        # These hooks see the gradient of one backward pass before it is added to .grad and reduced, so each micro-batch
        # is measured by itself. They cost 1.7 ms for 40 small parameters, and so are there in measured rounds only.
        for i, p in enumerate(self._parameters):
            if p.requires_grad:
                hook = p.register_hook(partial(self._add, i))  # type: ignore[no-untyped-call]
                self._listening.callback(hook.remove)

    def _add(self, i: int, gradient: torch.Tensor) -> None:
        # A reentrant checkpoint may bring a gradient in pieces, whose squares do not add up.
        self._came[i] = square_of(gradient) if i not in self._came else torch.tensor(math.nan)

    def backward_ends(self, loss_factor: float) -> None:
        """Count the gradients of a batch, whose loss was multiplied by ``loss_factor``, a_ij."""
        self._listening.close()
        if self._parameters and loss_factor:
            # Hooks of sharded parameters are not called, so nothing is known there: NaN.
            square = sum_of([*self._came.values()], math.nan)
            # The square has a_ij twice. What remains is a_ij |g_ij|², of which complete() makes the mean by samples.
            self._own.append(self._unscaled(square) / loss_factor)
            self._factors += loss_factor

    def complete(self) -> None:
        """Compute the square of the round's mean gradient, now that it is reduced."""
        if self._parameters:
            assert self._stale is not None, "a backward pass has begun"
            factor, own = 1.0 / self._factors if self._factors else 0.0, [*self._own, self._stale]
            mean = [self._unscaled(self._present())]
            squares = Squares.of(self._factors * self._samples, factor, own, 1.0, mean)
            self._measured = self._balancer.rounds, len(self._own), squares
        self.forget()

    def undo(self) -> None:
        """Forget a batch that is done again: its parts are measured like micro-batches."""
        self._listening.close()

    def forget(self) -> None:
        """Stop measuring in this round, which is over or abandoned."""
        self._listening.close()
        self._parameters = ()

    def figures(self) -> dict[str, float]:
        """Return what was measured, as columns of a row; nothing until it can be read."""
        # A device may still compute the squares of the last round, and reading them would wait for it.
        if self._measured is None or self._measured[0] + 1 >= self._balancer.rounds:
            return {}
        (_, batches, squares), self._measured = self._measured, None
        names, further = ("gradient_samples", "gradient_square", "mean_square"), max(batches - 1.0, 0.0)
        return {"further_batches": further, **dict(zip(names, squares.read(), strict=True))}

    def _present(self) -> torch.Tensor:
        return sum_of([square_of(p.grad) for p in self._parameters if p.grad is not None])

    def _unscaled(self, square: torch.Tensor) -> torch.Tensor:
        return square / self._scale.to(square.device) ** 2
