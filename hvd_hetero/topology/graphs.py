"""Graphs of ranks: undirected, without loops and without parallel edges.

The Laplacian of a graph is L = sum over edges (i, j) of (e_i - e_j)(e_i - e_j)'. It is positive semidefinite, L 1 = 0,
and its second smallest eigenvalue lambda_2, the algebraic connectivity, is positive exactly for connected graphs.

The non-blocking paper draws its base graph (Figure 1a, 8 nodes, "randomly generated") without a list of edges, so it
has no name here.

Shapes: n nodes, m edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_hetero.checks import integer

Edge: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of ranks 0 ... nodes - 1; ``from_edges`` makes one."""

    nodes: int
    """Number of ranks."""
    edges: tuple[Edge, ...]
    """Pairs (i, j) with i < j, sorted, each once."""

    def degrees(self) -> NDArray[np.int64]:
        """Return the number of neighbours of each node, (n,)."""
        return np.bincount(np.array(self.edges, dtype=np.int64).ravel(), minlength=self.nodes)

    def is_connected(self) -> bool:
        """Return True if a path leads from every node to every other."""
        from scipy.sparse.csgraph import connected_components

        return int(connected_components(laplacian(self.nodes, self.edges))[0]) == 1


def ring(nodes: int) -> Graph:
    """Return the cycle 0 - 1 - ... - (n-1) - 0; one edge for two nodes, none for one."""
    count = _node_count(nodes)
    return from_edges(((i, (i + 1) % count) for i in range(count if count > 2 else count - 1)), nodes=count)


def complete(nodes: int) -> Graph:
    """Return the graph that joins every pair of nodes."""
    count = _node_count(nodes)
    return from_edges(((i, j) for i in range(count) for j in range(i + 1, count)), nodes=count)


def from_edges(edges: Iterable[Sequence[int]], nodes: int | None = None) -> Graph:
    """Return the graph of these pairs. ``nodes`` defaults to one more than the largest rank in a pair.

    The order of the edges, and of the ends of an edge, means nothing. An edge given twice counts once.
    """
    kept: set[Edge] = set()
    for edge in edges:
        try:
            i, j = map(operator.index, edge)
        except (TypeError, ValueError) as error:
            raise type(error)(f"edges must be pairs of ranks, got {edge!r}; write each as (i, j)") from None
        if i == j or min(i, j) < 0:
            raise ValueError(f"edges must join two different ranks from 0 on, got ({i}, {j}); leave this edge out")
        kept.add((min(i, j), max(i, j)))
    needed = max((j for _, j in kept), default=0) + 1
    count = needed if nodes is None else _node_count(nodes)
    if count < needed:
        raise ValueError(
            f"nodes must be above every rank that edges name, got nodes={count} and an edge with rank {needed - 1}; "
            f"use nodes={needed} or leave that edge out"
        )
    return Graph(count, tuple(sorted(kept)))


def laplacian(nodes: int, edges: Sequence[Edge], weights: ArrayLike = 1.0) -> NDArray[np.float64]:
    """Return the sum over edges of w_ij (e_i - e_j)(e_i - e_j)', (n, n)."""
    matrix = np.zeros((nodes, nodes))
    if edges:
        i, j = np.array(edges).T
        matrix[i, j] = matrix[j, i] = -np.broadcast_to(np.asarray(weights, dtype=np.float64), len(edges))
        np.fill_diagonal(matrix, -matrix.sum(axis=1))
    return matrix


def require_connected(graph: Graph, use: str) -> None:
    """Refuse a graph in several parts, whose models would never agree."""
    if not graph.is_connected():
        raise ValueError(
            f"graph must be connected for {use}, got {graph.nodes} nodes and {len(graph.edges)} edges in several "
            "parts: their models would never agree; add edges between the parts, or remove the lone nodes"
        )


def _node_count(nodes: SupportsIndex) -> int:
    return integer("nodes", nodes, 1, remedy="it is the number of ranks")
