"""The squares of gradients in one round beside a reducer, which keeps no rank's own.

A parameter's hook sees the gradient of one backward pass on this rank, before it is added to ``.grad`` and reduced: so
each micro-batch is measured by itself. With w_ij of ``scaled_rounds`` and the factor f of a gradient scaler, hooks see
f w_ij g_ij, and f g is in ``.grad`` when the round's last backward pass is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.rounds import MicroBatch
from torch_hooks.beside.trained import Trained
from torch_hooks.gradients.squares import Squares, square_of, sum_of


class Noise:
    """Which rounds are measured, and what is told of them. ``means_of``: n of a reducer that takes the mean."""

    def __init__(self, balancer: Balancer, trained: Trained, means_of: int) -> None:
        self._balancer, self._trained, self._means_of = balancer, trained, means_of
        self._squares: LocalSquares | None = None
        """What is measured in this round."""
        self._measured: LocalSquares | None = None
        """What was measured, until a row takes it along."""

    def begin_batch(self, work: MicroBatch) -> None:
        """Begin a batch: at the first of a round, decide whether it is measured."""
        every = self._trained.every
        if every and self._measured is None and not self._balancer.in_round and self._balancer.measures(every):
            samples = work.plan.total / self._means_of
            self._squares = LocalSquares(self._balancer.rounds, self._trained.parameters(), samples)

    def leave_out(self) -> None:
        """Leave out a gradient that others weigh, too."""
        self._squares = None
        if self._balancer.planner.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) goes by each rank's own gradient, which a normalised loss hides; scale the "
                "mean loss of this rank's batch, or give a global_batch that stays"
            )

    def backward_begins(self, gradient: torch.Tensor) -> None:
        """Listen to a backward pass, whose first gradient is that of the loss."""
        if self._squares is not None:
            self._squares.begin(gradient)

    def backward_ends(self, share: float) -> None:
        """Count the gradients of a batch, whose loss was multiplied by ``share``."""
        if self._squares is not None:
            self._squares.end(share)

    def complete(self) -> None:
        """Take the gradient of the round, which is reduced."""
        if self._squares is not None:
            self._squares.complete()
            self._measured, self._squares = self._squares, None

    def forget(self) -> None:
        """Forget an unfinished round."""
        if self._squares is not None:
            self._squares.listening.close()
            self._squares = None

    def figures(self) -> dict[str, float]:
        """Return what was measured, for a row; nothing while a device may still compute it."""
        if self._measured is None or self._measured.round + 1 >= self._balancer.rounds:
            return {}
        measured, self._measured = self._measured, None
        return measured.read()


class LocalSquares:
    """What this rank measures in one round. ``samples``: those of a batch whose w_ij is 1."""

    def __init__(self, round: int, parameters: Sequence[torch.Tensor], samples: float) -> None:
        self.round, self._parameters, self._samples = round, parameters, samples
        self.listening = ExitStack()
        self._came: dict[int, torch.Tensor] = {}
        self._own: list[torch.Tensor] = []
        """w_ij |g_ij|² of each micro-batch with samples."""
        self._weight = 0.0
        self._scale = torch.ones(())
        self._stale: torch.Tensor | None = None
        """NaN if an earlier round's gradient was still there, to which this one's adds; else 0."""
        self._squares: Squares | None = None

    def begin(self, scale: torch.Tensor) -> None:
        """Listen to a backward pass. ``scale``: f."""
        self._scale, self._came = scale.detach().double(), {}
        if self._stale is None:
            self._stale = torch.where(self._present() > 0.0, math.nan, 0.0)
        for i, p in enumerate(self._parameters):
            if p.requires_grad:
                hook = p.register_hook(partial(self._add, i))  # type: ignore[no-untyped-call]
                self.listening.callback(hook.remove)

    def _add(self, i: int, gradient: torch.Tensor) -> None:
        # A reentrant checkpoint may bring a gradient in pieces, whose squares do not add up.
        self._came[i] = square_of(gradient) if i not in self._came else torch.tensor(math.nan)

    def end(self, weight: float) -> None:
        """Count what came. ``weight``: w_ij."""
        self.listening.close()
        if weight:
            square = sum_of([*self._came.values()], math.nan)  # NaN of parameters in shards, whose hooks hear nothing
            self._own.append(self._unscaled(square) / weight)
            self._weight += weight

    def complete(self) -> None:
        """Take the square of the mean gradient, which is reduced."""
        assert self._stale is not None, "a backward pass has begun"
        factor, own = 1.0 / self._weight if self._weight else 0.0, [*self._own, self._stale]
        self._squares = Squares.of(self._weight * self._samples, factor, own, 1.0, [self._unscaled(self._present())])
        self._parameters = ()  # which its figures need not keep

    def read(self) -> dict[str, float]:
        """Return the figures for this rank's row; in a later round, when a device is done with them."""
        assert self._squares is not None, "the round is over"
        names, further = ("gradient_samples", "gradient_square", "mean_square"), max(len(self._own) - 1.0, 0.0)
        return {"further_batches": further, **dict(zip(names, self._squares.read(), strict=True))}

    def _present(self) -> torch.Tensor:
        return sum_of([square_of(p.grad) for p in self._parameters if p.grad is not None])

    def _unscaled(self, square: torch.Tensor) -> torch.Tensor:
        return square / self._scale.to(square.device) ** 2
