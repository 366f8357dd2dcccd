"""Squared norms of gradients: this rank's own, and those of the mean over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The squares of halves would overflow.
_WIDE = (torch.float32, torch.float64)
_NUMBERS_PER_SUM = 2**18  # one float32 sum of ten million squares was 2.6e-4 off, in these parts 9e-7


def square_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a tensor's numbers, on its device, so that no host waits for it."""
    numbers = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().reshape(-1)
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers).reshape(-1)
    wide = numbers.dtype if numbers.dtype in _WIDE else torch.float32
    several = numbers.numel() > _NUMBERS_PER_SUM
    parts = (part.to(wide) for part in (torch.split(numbers, _NUMBERS_PER_SUM) if several else [numbers]))
    return sum_of([part.dot(part) for part in parts])


def sum_of(squares: Sequence[torch.Tensor], nothing: float = 0.0) -> torch.Tensor:
    """Return the sum of several tensors' squares, where the first is; ``nothing`` if there is none."""
    if len(squares) < 2:
        return squares[0] if squares else torch.tensor(nothing)
    return torch.stack([each.to(squares[0].device, squares[0].dtype) for each in squares]).sum()


@dataclass(slots=True)
class Squares:
    """The squares measured in one round, until the next row of the table leaves."""

    samples: float
    """Samples of this rank, as far as they count in the mean."""
    own_factor: float
    """The factor from the square of what this rank has sent to that of its mean gradient."""
    own: torch.Tensor
    mean_factor: float
    mean: torch.Tensor
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(
        cls,
        samples: float,
        own_factor: float,
        own: Sequence[torch.Tensor],
        mean_factor: float,
        mean: Sequence[torch.Tensor],
    ) -> Squares:
        """Add up the squares of all parts of the gradients."""
        squares = cls(samples, own_factor, sum_of(own), mean_factor, sum_of(mean))
        # A device computes them later than they are asked for. Copied when they are ready, they are here a round later.
        if squares.own.device.type == "cuda":
            squares.own, squares.mean = _on_host(squares.own), _on_host(squares.mean)
            squares.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            squares.arrived.record()
        return squares

    def read(self) -> tuple[float, float, float]:
        """Return samples, the square of this rank's mean gradient, and of that of all ranks."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.samples, self.own_factor * float(self.own), self.mean_factor * float(self.mean)


def _on_host(number: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
