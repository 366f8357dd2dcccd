"""The interface of what a simulation trains, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.rounds import RoundPlan

Ints = NDArray[np.int64]


class Learner(Protocol):
    """A training in simulated time (``benchmarks/papers/_learners.py`` has update rules)."""

    @property
    def loss(self) -> float:
        """The loss over all training samples."""

    def update(self, plan: RoundPlan, samples: list[NDArray[np.int64]], done: Ints) -> None:
        """Learn that rank i has done its first ``done[i]`` micro-batches, on ``samples[i]``."""


@dataclass(slots=True)
class Simulated:
    """The results of a simulation: one entry a round, or one a worker."""

    name: str
    workers: int
    elapsed_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    """Seconds of waiting for others, the mean over workers."""
    micro_batches: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    loss: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, updates, loss) of each evaluation."""

    def rate(self, skip: int = 0) -> float:
        """Return the samples per second, without the first rounds."""
        return sum(self.samples[skip:]) / sum(self.elapsed_s[skip:])

    def waiting_share(self, skip: int = 0) -> float:
        """Return the share of the workers' time spent waiting for others."""
        return sum(self.idle_s[skip:]) / sum(self.elapsed_s[skip:])

    def transfer_share(self, skip: int = 0) -> float:
        """Return the share of the time spent in transfers."""
        return sum(self.transfer_s[skip:]) / sum(self.elapsed_s[skip:])

    def round_s(self, skip: int = 0) -> float:
        """Return the mean seconds of a round."""
        return sum(self.elapsed_s[skip:]) / len(self.elapsed_s[skip:])
