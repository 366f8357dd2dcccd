r"""The compute model: what a batch costs a worker, in seconds at its full pace.

    Γ(x) = m max(x, x_s) + b    for 1 <= x <= x_o,       Γ(0) = 0

with m seconds per sample, b seconds fixed, x_s the saturation point, x_o the most samples that fit in memory (lb-bsp,
sections 3.2 and 3.3). A CPU that does v samples per second is m = 1/v, b = 0, x_s = 1, x_o = ∞. A round of x samples in
k micro-batches costs the sum over its micro-batches, whose sizes differ by one at most (``RoundPlan.sizes``).

A micro-batch above x_o is done in as few smaller ones as fit, as production does once it has run out of
memory. Left out: the first failure itself, caches that favour some batch sizes, and heat.

Shapes: n workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Samples: no more fit in an int64.
_SAMPLES_IN_INT64 = 2.0**62

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Compute:
    """Γ of one worker."""

    slope_s: float
    """m, seconds per sample."""
    intercept_s: float = 0.0
    """b, seconds per micro-batch."""
    saturation: float = 1.0
    """x_s, samples: smaller micro-batches take no less time."""
    memory_limit: int | None = None
    """x_o, samples of the largest micro-batch that fits; None for no limit."""

    def __post_init__(self) -> None:
        if not (self.slope_s > 0 and math.isfinite(self.slope_s)):
            raise ValueError(f"slope_s must be positive and finite, got {self.slope_s}; it is seconds per sample")
        if self.saturation < 1:
            raise ValueError(f"saturation must be at least 1 sample, got {self.saturation}; 1 means no flat part")
        least_s = self.slope_s * self.saturation + self.intercept_s
        if not (least_s > 0 and math.isfinite(least_s)):
            raise ValueError(
                f"intercept_s must leave the smallest batch a positive time, got {self.intercept_s} with slope_s="
                f"{self.slope_s} and saturation={self.saturation}, which is {least_s:g} s; raise intercept_s"
            )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ValueError(f"memory_limit must be at least 1 sample, got {self.memory_limit}; None means no limit")

    @classmethod
    def at_speed(cls, samples_per_s: float, fixed_s: float = 0.0) -> Compute:
        """Return a CPU: time proportional to the batch, after a fixed time per micro-batch."""
        if not (samples_per_s > 0 and math.isfinite(samples_per_s)):
            raise ValueError(f"samples_per_s must be positive and finite, got {samples_per_s}")
        return cls(1.0 / samples_per_s, fixed_s)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The micro-batches of every worker in a round: ``small`` of ``small_s`` seconds, then ``large`` of ``large_s``."""

    small: Ints
    large: Ints
    small_s: Floats
    large_s: Floats
    base: Ints
    """Samples of a small micro-batch; a large one has one more."""

    @property
    def count(self) -> Ints:
        """Micro-batches of each worker."""
        return self.small + self.large

    @property
    def work_s(self) -> Floats:
        """Seconds at full pace for all of them."""
        return self.small * self.small_s + self.large * self.large_s

    def finished_by(self, work_s: Floats) -> Ints:
        """Return how many micro-batches are complete after this much work."""
        # A small relative margin, so that the work of exactly j micro-batches counts as j, however it was summed.
        budget = work_s * (1.0 + 1e-12)
        with np.errstate(divide="ignore", invalid="ignore"):
            small = np.where(self.small_s > 0, np.floor(budget / self.small_s), 0.0)
            rest = budget - self.small * self.small_s
            large = np.where(self.large_s > 0, np.floor(rest / self.large_s), 0.0)
        done = np.where(small < self.small, small, self.small + np.maximum(large, 0.0))
        return np.clip(done, 0, self.count).astype(np.int64)

    def work_of(self, done: Ints) -> Floats:
        """Return the seconds at full pace of the first ``done`` micro-batches."""
        small = np.minimum(done, self.small)
        return small * self.small_s + (done - small) * self.large_s

    def samples_of(self, done: Ints) -> Ints:
        """Return the samples in the first ``done`` micro-batches."""
        return np.asarray(done * self.base + np.maximum(done - self.small, 0))


class Devices:
    """Γ of all workers at once."""

    def __init__(self, computes: Sequence[Compute]) -> None:
        self.slope_s = np.array([c.slope_s for c in computes])
        self.intercept_s = np.array([c.intercept_s for c in computes])
        self.saturation = np.array([c.saturation for c in computes], dtype=np.float64)
        limits = [np.iinfo(np.int64).max if c.memory_limit is None else c.memory_limit for c in computes]
        self.memory_limit = np.array(limits, dtype=np.int64)
        self._most = self.memory_limit.astype(np.float64)
        self._least_s = self.slope_s * self.saturation + self.intercept_s
        self._most_s = self.slope_s * np.maximum(self._most, self.saturation) + self.intercept_s

    def seconds(self, samples: Ints) -> Floats:
        """Return Γ of one micro-batch each."""
        batch_s = self.slope_s * np.maximum(samples, self.saturation) + self.intercept_s
        return np.where(samples > 0, batch_s, 0.0)

    def pieces(self, samples: Ints, micro_batches: Ints) -> Pieces:
        """Return the micro-batches of a round, cut smaller if memory demands it."""
        count = np.maximum(micro_batches, -(-samples // self.memory_limit))
        base, large = np.divmod(samples, np.maximum(count, 1))
        return Pieces(count - large, large, self.seconds(base), self.seconds(base + 1), base)

    def within(self, work_s: Floats) -> Ints:
        """Return the most samples that one share can hold in this much work, within memory: the inverse of Γ."""
        full = np.floor(work_s / self._most_s)  # of the largest micro-batches that fit; 0 if there is no limit
        rest_s = work_s - full * self._most_s
        fits = rest_s >= self._least_s
        rest = np.where(fits, np.floor((rest_s - self.intercept_s) / self.slope_s * (1 + 1e-12)), 0.0)
        return np.asarray(
            np.minimum(full * self._most + np.minimum(rest, self._most), _SAMPLES_IN_INT64), dtype=np.int64
        )
