"""MATCHA: mixing over random matchings within a communication budget (Wang et al. 2019; non-blocking-sgd, section 6.1).

1. Split the edges of the base graph into M matchings (``edge_coloring``).
2. Choose how often to use each, p: the best connected expected graph with sum p = budget * M (``activation``).
3. Choose the weight alpha of W = I - alpha sum_j B_j L_j that makes rho = || E[W'W] - J || least, up to where a
   round could make disagreement larger (``alpha``). rho < 1.
4. In each round draw B_j ~ Bernoulli(p_j) from (seed, round) alone, so that every rank draws the same.

The pairs of one matching exchange at the same time, so a round takes as long as it has active matchings: budget is the
share of the time that D-PSGD needs on the same graph.

Agreement. Drawing needs no messages. But p comes from floating-point eigenvectors. If it differs in its last digits,
two ranks disagree about a matching in some rare draw. If processors or libraries may differ, compute ``matcha`` on one
rank and broadcast the result: it is plain data.

Differences from the paper
- The paper uses one alpha for all edges, and so does this, unless D-PSGD's weights (Metropolis-Hastings) contract
  faster when all edges are used. They do if degrees differ by place, as in two cliques of twelve joined by a path, and
  in about one of a thousand random graphs. L_j is then built from D-PSGD's weights in steps 2 to 4. So rho at budget 1
  never exceeds D-PSGD's: by that choice, or because alpha = 1 is D-PSGD itself.
- A disconnected graph is an error here; the paper assumes there is none.

Shapes: n nodes, m edges, M matchings.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.topology.activation import most_connected
from hvd_hetero.topology.alpha import best_alpha
from hvd_hetero.topology.edge_coloring import matching_decomposition
from hvd_hetero.topology.graphs import Edge, Graph, check_rank, laplacian, require_connected
from hvd_hetero.topology.weights import metropolis_weights, mixing_matrix, mixing_rho

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
    weights: tuple[tuple[float, ...], ...]
    """Weights of the edges of each matching; 1 as a rule (see the module)."""
    probabilities: tuple[float, ...]
    """Probability that a round uses each matching."""
    alpha: float
    """Mixing weight."""
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
        return tuple(
            (i + j - rank, self.alpha * weight)
            for number in np.flatnonzero(self.active(seed, round_number))
            for (i, j), weight in zip(self.matchings[number], self.weights[number], strict=True)
            if rank in (i, j)
        )

    def mixing(self, seed: int, round_number: int) -> NDArray[np.float64]:
        """Return W of this round, (n, n), symmetric with rows that sum to 1."""
        used = np.flatnonzero(self.active(seed, round_number))
        edges = [edge for number in used for edge in self.matchings[number]]
        weights = [weight for number in used for weight in self.weights[number]]
        return np.eye(self.nodes) - self.alpha * laplacian(self.nodes, edges, weights)


def matcha(graph: Graph, budget: float = 0.5) -> Matcha:
    """Return the best random mixing on ``graph`` for ``budget``, 1e-9 to 1, the share of D-PSGD's communication."""
    if not _LEAST_BUDGET <= budget <= 1.0:
        raise ValueError(
            f"budget must be at least {_LEAST_BUDGET:g} and at most 1, got {budget}; "
            "it is the share of the matchings used in a round, and 1 is D-PSGD"
        )
    require_connected(graph, "MATCHA")
    if graph.nodes == 1:  # no other rank to agree with
        return Matcha(1, (), (), (), alpha=0.0, rho=0.0, connectivity=0.0, connectivity_bound=0.0)
    matchings = matching_decomposition(graph)
    weight_of = dict(zip(graph.edges, _weights(graph), strict=True))
    weights = tuple(tuple(weight_of[edge] for edge in matching) for matching in matchings)
    laplacians = np.array([laplacian(graph.nodes, m, w) for m, w in zip(matchings, weights, strict=True)])
    activation = most_connected(laplacians, float(budget))
    alpha, rho = best_alpha(laplacians, activation.probabilities)
    assert rho < 1.0, f"a connected graph must contract, got rho = {rho}"
    return Matcha(
        graph.nodes,
        matchings,
        weights,
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


def _weights(graph: Graph) -> list[float]:
    """Return 1 for every edge, or D-PSGD's weights if they contract faster."""
    values = np.linalg.eigvalsh(laplacian(graph.nodes, graph.edges))
    equal_rho = ((values[-1] - values[1]) / (values[-1] + values[1])) ** 2  # best_alpha's at budget 1
    if equal_rho <= mixing_rho(mixing_matrix(graph)) + 1e-12:  # beyond rounding
        return [1.0] * len(graph.edges)
    return [float(weight) for weight in metropolis_weights(graph)]
