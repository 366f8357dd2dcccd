"""MATCHA: mixing over random matchings within a communication budget (Wang et al. 2019; non-blocking-sgd, section 6.1).

1. Split the edges of the base graph into M matchings (``edge_coloring``).
2. Choose how often to use each, p: the best connected expected graph with sum p = budget * M (``activation``).
3. In each round draw B_j ~ Bernoulli(p_j) from (seed, round) alone, so that every rank draws the same.
4. Weight each drawn pair (i, j) by the partners d that its two ranks have in this round, 2 / (d_i + d_j + 2), so that
   no round makes disagreement larger.

The pairs of one matching exchange at the same time, so a round takes as long as it has active matchings. Hence budget
is the share of the time that D-PSGD needs on the same graph.

Weights. Let d_i be the number of partners of rank i in a round, and L_e the Laplacian of one edge. Over the drawn pairs
e = (i, j),

    W = I - alpha sum_e w_e L_e,    w_e = 2 / (d_i + d_j + 2),    0 < alpha <= 1

For equal degrees d, w is D-PSGD's weight 1 / (d + 1), and two ranks without other partners take their mean.

rho = || E[W'W] - 11'/n || is the factor by which a round shrinks disagreement; it is below 1 if the graph is connected.

Differences from the paper
- The paper has one weight, alpha, for all pairs in all rounds, and no bound on single rounds. Here a pair weighs more
  in a round in which its ranks have fewer partners.
- A disconnected graph is an error here; the paper assumes there is none.

Shapes: n nodes, m edges, M matchings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.checks import integer
from hvd_hetero.topology.activation import most_connected
from hvd_hetero.topology.edge_coloring import matching_decomposition
from hvd_hetero.topology.graphs import Edge, Graph, laplacian, require_connected

# With more matchings, rho is a mean over random draws, as many as all draws of so many are (arbitrary).
_MATCHINGS_ENUMERATED = 12


@dataclass(frozen=True, slots=True)
class Matcha:
    """A schedule of random matchings, as plain data."""

    nodes: int
    """Number of ranks."""
    matchings: tuple[tuple[Edge, ...], ...]
    """Edges of each matching."""
    probabilities: tuple[float, ...]
    """Probability that a round uses each matching."""
    # Of the alphas up to 1, it has the least rho on all graphs of benchmarks/results/topology.md. A smaller one, 0.78
    # for 6 + 6 ranks at budget 1, is better on dense bipartite graphs alone.
    alpha: float = 1.0
    """Scale of the weights, at most 1. A drawn pair whose ranks have d_i and d_j partners in the round weighs
    alpha 2 / (d_i + d_j + 2), so alpha / 2 if neither has another partner."""

    @property
    def rho(self) -> float:
        """Factor by which a round shrinks the mean squared distance from agreement, at worst.

        It is exact for up to 12 matchings. Of more, 4,096 draws stand for all: an estimate, and a little high.
        """
        if not self.matchings:
            return 0.0
        count, p = len(self.matchings), np.array(self.probabilities)
        edges = np.array(list(chain.from_iterable(self.matchings)))
        own = np.repeat(np.arange(count), [len(matching) for matching in self.matchings])
        if count <= _MATCHINGS_ENUMERATED:
            active = np.array(list(product((False, True), repeat=count)))
            chances = np.where(active, p, 1.0 - p).prod(axis=1)
        else:
            active = np.random.default_rng(0).random((2**_MATCHINGS_ENUMERATED, count)) < p
            chances = np.full(len(active), 1.0 / len(active))
        drawn = active[:, own].astype(float)  # (draws, edges)
        ends = np.eye(self.nodes)[edges]
        weights = self.alpha * drawn * _pair_weight((drawn @ ends.sum(axis=1))[:, edges].sum(axis=2))
        across = ends[:, 0] - ends[:, 1]  # W = I - across' diag(weights) across
        mean = across.T @ ((chances @ weights)[:, None] * across)
        square = across.T @ ((weights.T * chances @ weights) * (across @ across.T)) @ across
        return float(np.linalg.eigvalsh(np.eye(self.nodes) - 1.0 / self.nodes - 2.0 * mean + square)[-1])

    def active(self, seed: int, round_number: int) -> NDArray[np.bool_]:
        """Return which matchings this round uses, (M,): the same on every rank, in any order of calls.

        It takes raw bits of a counter-based generator, keyed by the seed and counted by the round. NumPy promises these
        bits for all versions, unlike the distributions built on them.
        """
        # As Python's integers: NumPy's would lose the round number when shifted by 64.
        key, counter = (
            integer(name, value, 0, 2**128, remedy="use the same one on every rank")
            for name, value in (("seed", seed), ("round_number", round_number))
        )
        raw = np.random.Philox(key=key, counter=counter << 64).random_raw(len(self.matchings))
        uniform = (np.asarray(raw) >> np.uint64(11)) * 2.0**-53  # exact: 53 bits
        return uniform < np.array(self.probabilities)

    def mixing(self, seed: int, round_number: int) -> NDArray[np.float64]:
        """Return W of this round, (n, n), symmetric with rows that sum to 1 and a spectral norm of 1."""
        drawn = self.pairs(seed, round_number)
        return np.eye(self.nodes) - laplacian(self.nodes, list(drawn), list(drawn.values()))

    def pairs(self, seed: int, round_number: int) -> dict[Edge, float]:
        """Return the pairs that exchange in this round, each with its weight."""
        used = np.flatnonzero(self.active(seed, round_number))
        drawn = [edge for number in used for edge in self.matchings[number]]
        partners = Counter(chain.from_iterable(drawn))
        return {(i, j): float(self.alpha * _pair_weight(partners[i] + partners[j])) for i, j in drawn}


def matcha(graph: Graph, budget: float = 0.5) -> Matcha:
    """Return the best random mixing on ``graph`` for ``budget``, 1e-9 to 1, the share of D-PSGD's communication."""
    # Below some 1e-15 rho rounds to 1, and a billion rounds between exchanges help no training.
    if not 1e-9 <= budget <= 1.0:
        raise ValueError(
            f"budget must be at least 1e-09 and at most 1, got {budget}; it is the share of the matchings used in a "
            "round, and 1 is D-PSGD"
        )
    require_connected(graph, "MATCHA")
    if graph.nodes == 1:  # no other rank to agree with
        return Matcha(1, (), ())
    # Compute this on one rank and broadcast the result, if processors or libraries may differ. p comes from
    # floating-point eigenvectors; where its last digits differ, ranks disagree about a matching in some rare draw.
    matchings = matching_decomposition(graph)
    laplacians = np.array([laplacian(graph.nodes, matching) for matching in matchings])
    return Matcha(graph.nodes, matchings, tuple(most_connected(laplacians, float(budget)).tolist()))


def _pair_weight(partners: Any) -> Any:
    """Return the weight of a drawn pair whose two ranks have so many partners in the round, together; at least 2."""
    # No disagreement grows, in any round. With X the largest d_i + d_j in it, and t = d_j / d_i in
    # (a - b)^2 <= (1 + t) a^2 + (1 + 1/t) b^2,
    #     sum_e w_e (x_i - x_j)^2 <= X / (X + 2) sum_e 2 (x_i^2 / d_i + x_j^2 / d_j) = 2 X / (X + 2) sum_i x_i^2,
    # so the eigenvalues of W are in -1 + 4 / (X + 2) ... 1.
    # Considered: the least rho under || W || <= 1. A step is x <- W x - eta g. Where the loss has the curvature h, it
    # multiplies a disagreement with the eigenvalue l of W by l - eta h, so an eigenvalue of -1 leaves no room for any
    # curvature. Weights that use all room have a smaller rho, and train later or not at all. D-PSGD's weights on the
    # drawn edges train as soon as these, but their rho has no closed form, and is larger where degrees differ.
    return 2.0 / (partners + 2)
