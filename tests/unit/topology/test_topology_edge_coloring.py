"""The split of a graph into matchings."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_hetero.topology import complete, from_edges, matching_decomposition, ring


def colors(graph):
    """How many matchings, after making sure that they are matchings and hold each edge once."""
    matchings = matching_decomposition(graph)
    assert sorted(edge for matching in matchings for edge in matching) == list(graph.edges)
    for matching in matchings:
        ends = [node for edge in matching for node in edge]
        assert len(ends) == len(set(ends)) > 0
    return len(matchings)


@pytest.mark.parametrize("nodes", range(2, 14))
def test_rings_and_complete_graphs(nodes):
    """As few as there can be: 2 or 3 for even and odd rings, n - 1 or n for complete graphs."""
    assert colors(ring(nodes)) == (1 if nodes == 2 else 2 + nodes % 2)
    assert colors(complete(nodes)) == nodes - 1 + nodes % 2


def test_no_edges():
    assert colors(ring(1)) == 0


def test_random_graphs_meet_vizings_bound():
    """At most Delta + 1 matchings, on 300 graphs of all densities; both Delta and Delta + 1 occur."""
    rng, above = np.random.default_rng(0), []
    for _ in range(300):
        nodes, density = int(rng.integers(2, 18)), rng.uniform(0.05, 1)
        graph = from_edges([(i, j) for i in range(nodes) for j in range(i) if rng.random() < density], nodes=nodes)
        above.append(colors(graph) - int(graph.degrees().max()))
    assert set(above) == {0, 1}


def test_bipartite_graphs_need_no_extra_matching():
    """Konig: Delta matchings are enough where the nodes fall into two sides."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        left, right = rng.integers(1, 9, 2)
        pairs = [(i, left + j) for i in range(left) for j in range(right) if rng.random() < 0.6]
        graph = from_edges(pairs, nodes=int(left + right))
        assert colors(graph) == graph.degrees().max()


def test_the_petersen_graph_needs_one_more():
    """The classical graph of degree 3 that three matchings cannot hold."""
    outer = [(i, (i + 1) % 5) for i in range(5)]
    inner = [(5 + i, 5 + (i + 2) % 5) for i in range(5)]
    assert colors(from_edges([*outer, *inner, *((i, i + 5) for i in range(5))])) == 4
