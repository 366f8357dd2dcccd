"""MATCHA: mixing over random matchings within a communication budget (Wang et al. 2019; non-blocking-sgd, section 6.1).

1. Split the edges of the base graph into M matchings (``edge_coloring``).
2. Choose how often to use each, p: the best connected expected graph with sum p = budget * M (``activation``).
3. In each round draw B_j ~ Bernoulli(p_j) from (seed, round) alone, so that every rank draws the same.
4. Weight each drawn pair (i, j) by the partners d that its two ranks have in this round, alpha 2 / (d_i + d_j + 2), so
   that no round makes disagreement larger. alpha in 0 ... 1 makes rho = || E[W'W] - J || least (``alpha``). rho < 1.

The pairs of one matching exchange at the same time, so a round takes as long as it has active matchings: budget is the
share of the time that D-PSGD needs on the same graph.

Agreement. Drawing needs no messages, and a round's weights follow from integers and alpha. But p and alpha come from
floating-point eigenvectors. If they differ in their last digits, two ranks disagree about a matching
in some rare draw. If processors or libraries may differ, compute ``matcha`` on one rank and broadcast the result: it is
plain data.

Differences from the paper
- The paper has one weight, alpha, for all pairs in all rounds, and no bound on single rounds. Here a pair weighs more
  in a round in which its ranks have fewer partners.
- A disconnected graph is an error here; the paper assumes there is none.

Shapes: n nodes, m edges, M matchings.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.topology.activation import most_connected
from hvd_hetero.topology.alpha import best_alpha
from hvd_hetero.topology.edge_coloring import matching_decomposition
from hvd_hetero.topology.graphs import Edge, Graph, check_rank, laplacian, require_connected
from hvd_hetero.topology.moments import moments, pair_weight

_LEAST_BUDGET = (
    1e-9  # arbitrary: a billion rounds between exchanges help no training, and below some 1e-15 rho rounds to 1
)


@dataclass(frozen=True, slots=True)
class Matcha:
    """A schedule of random matchings, as plain data."""

    nodes: int
    """Number of ranks."""
    matchings: tuple[tuple[Edge, ...], ...]
    """Edges of each matching."""
    probabilities: tuple[float, ...]
    """Probability that a round uses each matching."""
    alpha: float
    """Scale of the weights, the same in all rounds, at most 1. A drawn pair whose ranks have d_i and d_j partners in
    the round weighs alpha 2 / (d_i + d_j + 2), so alpha / 2 if neither has another partner."""
    rho: float
    """Factor by which a round shrinks the mean squared distance from agreement, at worst."""
    connectivity: float
    """lambda_2 of the expected graph."""
    connectivity_bound: float
    """lambda_2 that no probabilities within the budget can exceed."""

    def active(self, seed: int, round_number: int) -> NDArray[np.bool_]:
        """Return which matchings this round uses, (M,): the same on every rank, in any order of calls.

        It takes raw bits of a counter-based generator, keyed by the seed and counted by the round. NumPy promises these
        bits for all versions, unlike the distributions built on them.
        """
        key, counter = _counter("seed", seed), _counter("round_number", round_number)
        raw = np.random.Philox(key=key, counter=counter << 64).random_raw(len(self.matchings))
        uniform = (np.asarray(raw) >> np.uint64(11)) * 2.0**-53  # exact: 53 bits
        return uniform < np.array(self.probabilities)

    def partners(self, rank: int, seed: int, round_number: int) -> tuple[tuple[int, float], ...]:
        """Return (other rank, weight) of each exchange of ``rank`` in this round; the rest of 1 is its own weight."""
        check_rank("rank", rank, self.nodes)
        drawn = self.pairs(seed, round_number)
        return tuple((i + j - rank, weight) for (i, j), weight in drawn.items() if rank in (i, j))

    def mixing(self, seed: int, round_number: int) -> NDArray[np.float64]:
        """Return W of this round, (n, n), symmetric with rows that sum to 1 and a spectral norm of 1."""
        drawn = self.pairs(seed, round_number)
        return np.eye(self.nodes) - laplacian(self.nodes, list(drawn), list(drawn.values()))

    def pairs(self, seed: int, round_number: int) -> dict[Edge, float]:
        """Return the pairs that exchange in this round, each with its weight."""
        used = np.flatnonzero(self.active(seed, round_number))
        drawn = [edge for number in used for edge in self.matchings[number]]
        partners = Counter(chain.from_iterable(drawn))
        return {(i, j): self.alpha * pair_weight(partners[i] + partners[j]) for i, j in drawn}


def matcha(graph: Graph, budget: float = 0.5) -> Matcha:
    """Return the best random mixing on ``graph`` for ``budget``, 1e-9 to 1, the share of D-PSGD's communication."""
    if not _LEAST_BUDGET <= budget <= 1.0:
        raise ValueError(
            f"budget must be at least {_LEAST_BUDGET:g} and at most 1, got {budget}; "
            "it is the share of the matchings used in a round, and 1 is D-PSGD"
        )
    require_connected(graph, "MATCHA")
    if graph.nodes == 1:  # no other rank to agree with
        return Matcha(1, (), (), alpha=0.0, rho=0.0, connectivity=0.0, connectivity_bound=0.0)
    matchings = matching_decomposition(graph)
    laplacians = np.array([laplacian(graph.nodes, matching) for matching in matchings])
    activation = most_connected(laplacians, float(budget))
    alpha, rho = best_alpha(*moments(graph.nodes, matchings, activation.probabilities))
    assert rho < 1.0, f"a connected graph must contract, got rho = {rho}"
    return Matcha(
        graph.nodes,
        matchings,
        tuple(activation.probabilities.tolist()),
        alpha,
        rho,
        activation.connectivity,
        activation.bound,
    )


def _counter(name: str, value: SupportsIndex) -> int:
    """Return `value` as a Python integer of 128 bits; NumPy's would lose the round number when shifted by 64."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r} ({type(value).__name__}); use the same one on every rank"
        ) from None
    if not 0 <= number < 2**128:
        raise ValueError(f"{name} must be from 0 to 2**128 - 1, got {number}; use the same one on every rank")
    return number
