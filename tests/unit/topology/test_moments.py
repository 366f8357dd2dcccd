"""Moments of what a round of MATCHA draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_hetero.topology import complete, from_edges, matching_decomposition, ring
from hvd_hetero.topology.moments import moments

STAR = from_edges([(0, i) for i in range(1, 9)])
UNEVEN = from_edges([(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (3, 5), (4, 5), (5, 6), (6, 7)])


def by_enumeration(nodes, matchings, p):
    """The same moments, draw by draw and edge by edge."""
    mean, square = np.zeros((nodes, nodes)), np.zeros((nodes, nodes))
    for active in itertools.product([False, True], repeat=len(p)):
        chance = np.prod([q if on else 1 - q for q, on in zip(p, active, strict=True)])
        drawn = [edge for on, matching in zip(active, matchings, strict=True) if on for edge in matching]
        degree = np.bincount(np.array(drawn, dtype=int).ravel(), minlength=nodes)
        whole = np.zeros((nodes, nodes))
        for i, j in drawn:
            d = np.zeros(nodes)
            d[i], d[j] = 1, -1
            whole += 2 / (degree[i] + degree[j] + 2) * np.outer(d, d)
        mean += chance * whole
        square += chance * whole @ whole
    return mean, square


@pytest.mark.parametrize("graph", [ring(2), ring(3), ring(7), complete(4), complete(7), complete(8), STAR, UNEVEN])
@pytest.mark.parametrize("seed", [0, 1, None])
def test_moments_are_the_sums_over_all_draws(graph, seed):
    """Unequal probabilities, and the one draw of probabilities 1."""
    matchings = matching_decomposition(graph)
    count = len(matchings)
    p = np.ones(count) if seed is None else np.random.default_rng(seed).uniform(0.01, 0.99, count)
    pairs = zip(moments(graph.nodes, matchings, p), by_enumeration(graph.nodes, matchings, p), strict=True)
    for one, other in pairs:
        assert one == pytest.approx(other, abs=1e-8)


def test_high_degrees_are_as_exact():
    """Where all 31 matchings of a complete graph are drawn, A is (32 I - 1 1') / 32, a projection."""
    mean, square = moments(32, matching_decomposition(complete(32)), np.ones(31))
    assert mean == pytest.approx(np.eye(32) - 1 / 32, abs=1e-14)
    assert square == pytest.approx(mean, abs=1e-6)
