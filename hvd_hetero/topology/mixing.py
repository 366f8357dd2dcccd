"""How ranks average: all with all, or each with its neighbours in a graph.

    allreduce   one gradient g = (1 / S) sum_i G_i for all, G_i the sum of the gradients of rank i's S_i samples
    D-PSGD      x_i <- sum_j W_ij x_j - eta (n / S) G_i
    MATCHA      the same, with another W in every round, drawn alike on every rank

(non-blocking-sgd, sections 2.2 and 2.5, Algorithms 1 and 2.) W is symmetric and doubly stochastic, so mixing keeps the
mean of the models. That mean moves by eta (1 / n) sum_i (n / S) G_i = eta g: the same step as with an allreduce, for
any shares. The ranks hold different models during training; its result is their mean.

Differences from the paper: the factor n S_i / S weights a rank's mean gradient by its samples. The paper's factor
n_i / N, by samples S_i / x_i, is the option ``scaling="n/N"`` of ``NonBlocking``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.topology import matcha, matching_decomposition, mixing_matrix, ring
from hvd_hetero.topology.graphs import Graph
from hvd_hetero.topology.matcha import Matcha

ALLREDUCE = "allreduce"

Floats = NDArray[np.float64]


class Exchange(NamedTuple):
    """What one rank sends and receives in a round, in one ``alltoall``."""

    copies: list[int]
    """Copies of its parameters for each rank."""
    own: float
    """The weight of its own parameters."""
    received: list[float]
    """The weights of the copies that come, in the order of the ranks that have sent them."""


class _Exchanges(Protocol):
    """The base of both ways of mixing."""

    __slots__ = ()

    @property
    def nodes(self) -> int:
        """Number of ranks that the mixing is made for."""

    @property
    def most_neighbours(self) -> int:
        """Most neighbours of a rank in a round."""

    def matrix(self, round: int) -> Floats:
        """Return W of this round, the rows of all ranks."""

    def row(self, rank: int, round: int) -> Mapping[int, float]:
        """Return the weights with which a rank averages in this round, its own included; they sum to 1."""
        weights = self.matrix(round)[rank]
        return {int(j): float(weights[j]) for j in np.flatnonzero(weights)}

    def exchange(self, rank: int, round: int) -> Exchange:
        """Return what a rank sends and receives in this round: one copy to and from each neighbour.

        Every rank sends ``most_neighbours`` copies in every round; copies that no neighbour needs go to itself.
        """
        # As many in every round, because Horovod caches collectives by the size of what is sent, and the shapes in
        # TensorFlow's graph are fixed.
        weights = self.row(rank, round)
        copies = [int(j in weights) for j in range(self.nodes)]
        copies[rank] = self.most_neighbours - (len(weights) - 1)
        received = [0.0 if j == rank else weights[j] for j, count in enumerate(copies) for _ in range(count)]
        return Exchange(copies, weights[rank], received)


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourMixing(_Exchanges):
    """D-PSGD: the same weights in every round."""

    graph: Graph
    """Links between ranks."""

    @property
    def nodes(self) -> int:
        """Number of ranks that the mixing is made for."""
        return self.graph.nodes

    def matrix(self, round: int) -> Floats:
        """Return W, the rows of all ranks."""
        return _matrix(self.graph)

    def exchanges(self, round: int) -> int:
        """Return the number of successive exchanges in a round; disjoint pairs exchange at once."""
        return _matchings(self.graph)

    @property
    def most_neighbours(self) -> int:
        """Most neighbours of a rank in a round."""
        return int(self.graph.degrees().max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class MatchaMixing(_Exchanges):
    """MATCHA: some of the links in each round, the more important ones more often; computed on one rank, and sent."""

    schedule: Matcha
    """Matchings and their probabilities."""
    seed: int = 0
    """Seed of the draws, the same on all ranks."""

    @property
    def nodes(self) -> int:
        """Number of ranks that the mixing is made for."""
        return self.schedule.nodes

    def matrix(self, round: int) -> Floats:
        """Return W of this round, the rows of all ranks."""
        return self.schedule.mixing(self.seed, round)

    def exchanges(self, round: int) -> int:
        """Return the number of successive exchanges in this round: its active matchings."""
        return int(self.schedule.active(self.seed, round).sum())

    @property
    def most_neighbours(self) -> int:
        """Most neighbours of a rank in a round."""
        return len(self.schedule.matchings)


Mixing = NeighbourMixing | MatchaMixing


_BY_NAME: dict[str, Callable[[int], Mixing]] = {
    "d-psgd": lambda workers: NeighbourMixing(ring(workers)),
    "matcha": lambda workers: MatchaMixing(matcha(ring(workers), budget=0.5)),
}

MIXING_NAMES = tuple(_BY_NAME)
"""Names that ``sync`` takes, besides ``"allreduce"``."""


def resolve_mixing(sync: str | Mixing, workers: int, *, updates_locally: bool = False) -> Mixing | None:
    """Return the mixing that ``sync`` names, or None for the allreduce.

    By name, D-PSGD averages along a ring, and MATCHA uses half of that ring's links in a round. A policy that
    ``updates_locally`` needs the allreduce.
    """
    if sync == ALLREDUCE:
        return None
    if isinstance(sync, Mixing):
        if (nodes := sync.nodes) != workers:
            raise ValueError(
                f"sync has a graph of {nodes} nodes, and there are {workers} ranks; give one node per rank"
            )
    elif not isinstance(sync, str):
        raise TypeError(f"sync must be a name, a NeighbourMixing or a MatchaMixing, got {sync!r}; write sync='matcha'")
    elif sync not in _BY_NAME:
        known = (ALLREDUCE, *MIXING_NAMES)
        near = difflib.get_close_matches(sync.lower().replace("_", "-"), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"sync {sync!r} is not known; {hint}known names: {', '.join(known)}")
    elif workers == 1:
        return None
    if updates_locally:
        raise ValueError(
            f"sync={sync!r} does not go with local updates, whose round ends by averaging all parameters; use "
            "sync='allreduce', or ElasticBSP(updates='accumulate')"
        )
    return _named(sync, workers) if isinstance(sync, str) else sync


@lru_cache(maxsize=8)  # MATCHA's optimisation computes eigenvalues of n x n matrices many times
def _named(name: str, workers: int) -> Mixing:
    return _BY_NAME[name](workers)


@lru_cache(maxsize=8)  # every round needs it
def _matrix(graph: Graph) -> Floats:
    return mixing_matrix(graph)


@lru_cache(maxsize=8)
def _matchings(graph: Graph) -> int:
    return len(matching_decomposition(graph))
