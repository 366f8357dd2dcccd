"""Mixing matrices of D-PSGD (non-blocking-sgd, section 2.5 and Eq. 6).

After its local update every rank replaces its model by a weighted mean of its own and its neighbours':

    x_i <- sum_j W_ij x_j,    W = W',  W 1 = 1,  W >= 0,  W_ij > 0 only for neighbours and for i = j.

With J = 11'/n, the mean squared distance from agreement shrinks at least by rho = || W'W - J || (spectral norm) per
round. rho < 1 if the graph is connected and W has a positive diagonal.

Weights: Metropolis-Hastings, W_ij = 1 / (1 + max(d_i, d_j)). A rank needs only its own degree and its neighbours'. Rows
sum to less than 1 off the diagonal, so the diagonal is positive. On a ring this is a mean of three, on a complete graph
the exact mean.

Differences from the paper
- The paper says only that W "presents the adjacency", non-zero where two nodes are connected; the weights are the
  choice above.

Shapes: n nodes, m edges.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_hetero.topology.graphs import Graph, laplacian, require_connected


def metropolis_weights(graph: Graph) -> NDArray[np.float64]:
    """Return 1 / (1 + max(d_i, d_j)) for each edge, (m,), in the order of ``graph.edges``."""
    # Considered: I - alpha L with the best alpha (needs eigenvalues, may put negative weights on the diagonal), and the
    # fastest mixing matrix by semidefinite programming (Boyd, Diaconis and Xiao 2004), for which the core has no
    # solver.
    degrees = graph.degrees()
    return np.array([1.0 / (1.0 + max(degrees[i], degrees[j])) for i, j in graph.edges])


def mixing_matrix(graph: Graph) -> NDArray[np.float64]:
    """Return the symmetric doubly stochastic (n, n) matrix of Metropolis-Hastings weights."""
    require_connected(graph, "mixing")
    return np.eye(graph.nodes) - laplacian(graph.nodes, graph.edges, metropolis_weights(graph))


def mixing_rho(matrix: ArrayLike) -> float:
    """Return || W'W - J ||, the factor by which a round shrinks the squared distance from agreement, at worst."""
    mixing = np.asarray(matrix, dtype=np.float64)
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.size == 0:
        raise ValueError(f"matrix must be square, one row per rank, got shape {mixing.shape}; mixing_matrix makes one")
    sums = np.concatenate([mixing.sum(axis=0), mixing.sum(axis=1)])
    worst = sums[np.argmax(np.abs(sums - 1.0))]  # NaN, if there is one
    if not abs(worst - 1.0) <= 1e-9:
        raise ValueError(
            f"matrix must have rows and columns that sum to 1, got a sum of {worst}; otherwise mixing moves the mean"
        )
    # For doubly stochastic W, W'W - J = (W - J)'(W - J) is exact and avoids the cancellation.
    return float(np.linalg.norm(mixing - 1.0 / len(mixing), 2) ** 2)
