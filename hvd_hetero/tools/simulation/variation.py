r"""The straggler process: by which factor a batch of a worker takes longer than its pace explains.

The k-th batch of worker i takes f_i(k) times as long. Families:

    exponential   f ~ exp(1), so the time of a batch is exponential with mean Γ(x) (non-blocking-sgd, section 4)
    slow-down     f = 1 with probability 1 - p, else uniform in [1, most] (its section 6: other nodes and other rates in
                  every iteration, the slowest twice as slow as the fastest)
    jitter        f log-normal with mean 1: the scatter that every machine shows
    recorded      f given, one after the other, then from the start again

**Common random numbers.** Every worker has a separate stream for every variation, PCG64 seeded by (seed, worker,
number of the variation), and f_i(k) depends on nothing else. So all policies meet the same k-th batch on worker i, a
difference between two policies is theirs and not chance, and a policy or a worker more changes no other's draws.

"Batch" is a worker's work between two synchronisations (``per="round"``), as in the papers' analysis, or each of its
micro-batches (``per="batch"``), which then vary independently.

Left out: dependence between workers and between batches, except by ``hvd_hetero.tools.simulation.availability``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.tools.simulation.settings import MAX_RATIO, Setting, check

Floats = NDArray[np.float64]
Per = Literal["round", "batch"]

PER = Setting(str, "round", known=("round", "batch"))
# One call of the generator for so many draws of a worker (arbitrary).
_DRAWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Variation(ABC):
    """A distribution of time factors."""

    settings: ClassVar[dict[str, Setting]] = {}
    per: Per = "round"
    """One factor in a round, or one in each micro-batch."""

    def __post_init__(self) -> None:
        check(self, {"per": PER, **self.settings})

    @abstractmethod
    def draw(self, rng: np.random.Generator, first: int, count: int) -> Floats:
        """Return the factors number ``first`` to ``first + count - 1`` of one worker."""


@dataclass(frozen=True, slots=True)
class Exponential(Variation):
    """Times are exponential around their mean."""

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Floats:
        """Return factors of mean 1."""
        return rng.exponential(size=count)


@dataclass(frozen=True, slots=True)
class RandomSlowDown(Variation):
    """Some batches take up to ``most`` times as long."""

    settings: ClassVar[dict[str, Setting]] = {
        "most": Setting(float, 2.0, 1, MAX_RATIO, "times as long at most; 2 is twice"),
        "probability": Setting(float, 1.0, 0, 1, "the share of batches that are slow"),
    }
    most: float = 2.0
    probability: float = 1.0

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Floats:
        """Return factors uniform in [1, most], or 1."""
        slow, chosen = rng.uniform(1.0, self.most, count), rng.random(count) < self.probability
        return np.where(chosen, slow, 1.0)


@dataclass(frozen=True, slots=True)
class Jitter(Variation):
    """Log-normal scatter of mean 1; ``sigma`` is about the relative standard deviation."""

    settings: ClassVar[dict[str, Setting]] = {
        "sigma": Setting(float, 0.02, 0, 3, "a relative deviation; 0.02 is about 2 %")
    }
    sigma: float = 0.02

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Floats:
        """Return factors of mean 1."""
        return rng.lognormal(-0.5 * self.sigma**2, self.sigma, count)


@dataclass(frozen=True, slots=True)
class Recorded(Variation):
    """The factors of a recording, over and over."""

    factors: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        Variation.__post_init__(self)
        if wrong := [f for f in self.factors or (0.0,) if not 0 < f < float("inf")]:
            raise ValueError(
                f"factors must be numbers, positive and finite, got {wrong[0]}; correct or leave out others"
            )

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Floats:
        """Return the recorded factors, without chance."""
        return np.array([self.factors[(first + k) % len(self.factors)] for k in range(count)])


class Draws:
    """The factors of all workers, in blocks, each worker from its own streams.

    Read them by number, never backwards (``round``, ``one``), or one after the other (``following``, ``use``).
    """

    def __init__(self, variations: Sequence[tuple[Variation, ...]], seed: int, per: Per, stream: int) -> None:
        self._variations = [[(j, v) for j, v in enumerate(each) if v.per == per] for each in variations]
        self.any = any(self._variations)
        self._seed, self._stream = seed, stream
        self._generators: dict[tuple[int, int], np.random.Generator] = {}
        self._blocks = np.ones((len(variations), _DRAWS_AT_ONCE))
        self._number = np.full(len(variations), -1)
        self._ahead: list[list[float]] = [[] for _ in variations]  # shown, and not used yet

    def round(self, k: int) -> Floats:
        """Return every worker's factor number k, (n,)."""
        if not self.any:
            return self._blocks[:, 0]
        for worker in np.flatnonzero(self._number != k // _DRAWS_AT_ONCE):
            self._advance(int(worker), k // _DRAWS_AT_ONCE)
        return self._blocks[:, k % _DRAWS_AT_ONCE]

    def one(self, worker: int, k: int) -> float:
        """Return the k-th factor of one worker."""
        if not self._variations[worker]:
            return 1.0
        self._advance(worker, k // _DRAWS_AT_ONCE)
        return float(self._blocks[worker, k % _DRAWS_AT_ONCE])

    def following(self, counts: NDArray[np.int64]) -> Floats:
        """Return the next ``counts[i]`` factors of each worker, (n, max count), 1 beyond."""
        factors = np.ones((len(counts), max(int(counts.max()), 1)))
        for worker, count in enumerate(counts.tolist()):
            if self._variations[worker]:
                ahead = self._ahead[worker]
                while len(ahead) < count:
                    self._advance(worker, int(self._number[worker]) + 1)
                    ahead += self._blocks[worker].tolist()
                factors[worker, :count] = ahead[:count]
        return factors

    def use(self, counts: NDArray[np.int64]) -> None:
        """Drop so many of the factors that ``following`` showed; the next call begins after them."""
        for ahead, count in zip(self._ahead, counts.tolist(), strict=True):
            del ahead[:count]

    def _advance(self, worker: int, block: int) -> None:
        while self._number[worker] < block:
            self._number[worker] += 1
            row = np.ones(_DRAWS_AT_ONCE)
            for j, variation in self._variations[worker]:
                if (rng := self._generators.get((worker, j))) is None:
                    # A stream of its own, so that one more worker or variation changes no other's draws.
                    rng = np.random.Generator(np.random.PCG64([self._seed, self._stream, worker, j]))
                    self._generators[worker, j] = rng
                row *= variation.draw(rng, int(self._number[worker]) * _DRAWS_AT_ONCE, _DRAWS_AT_ONCE)
            self._blocks[worker] = row
        assert self._number[worker] == block, "draws were asked for backwards"
