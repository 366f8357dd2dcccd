"""Graphs and mixing matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_hetero.topology import Graph, complete, from_edges, metropolis_weights, mixing_matrix, mixing_rho, ring


def random_graph(seed, nodes, density):
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(nodes) for j in range(i) if rng.random() < density]
    return from_edges(pairs, nodes=nodes)


def test_rings():
    """One edge per node from three nodes on; no loop and no double edge below."""
    assert ring(1).edges == ()
    assert ring(2).edges == ((0, 1),)
    assert ring(4).edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert ring(7).degrees().tolist() == [2] * 7


def test_complete_graphs():
    """n (n - 1) / 2 edges, each node with n - 1 neighbours."""
    for nodes in (1, 2, 5):
        graph = complete(nodes)
        assert len(graph.edges) == nodes * (nodes - 1) // 2
        assert graph.degrees().tolist() == [nodes - 1] * nodes


def test_from_edges_normalises():
    """Direction, order and repetition of edges carry no meaning, and the node count follows from the edges."""
    assert from_edges([(2, 0), (0, 2), (1, 0)]) == Graph(3, ((0, 1), (0, 2)))
    assert from_edges([], nodes=2) == Graph(2, ())
    assert from_edges(np.array([[0, 1]])).edges == ((0, 1),)


def test_connected():
    assert ring(1).is_connected()
    assert ring(9).is_connected()
    assert not from_edges([(0, 1)], nodes=3).is_connected()
    assert not from_edges([(0, 1), (2, 3)]).is_connected()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_edges([(0, 0.5)]), r"edges.*\(0, 0\.5\)"),
        (lambda: from_edges([0, 1]), "edges"),
        (lambda: ring(3.5), "nodes"),
        (lambda: ring(0), r"nodes.* 0\b"),
        (lambda: complete(-1), r"nodes.* -1"),
        (lambda: from_edges([(1, 1)]), r"edges.*\(1, 1\)"),
        (lambda: from_edges([(0, -1)]), r"edges.*\(0, -1\)"),
        (lambda: from_edges([(0, 1, 2)]), "edges"),
        (lambda: from_edges([(0, 4)], nodes=3), r"nodes=3.*rank 4.*nodes=5"),
        (lambda: mixing_matrix(from_edges([(0, 1), (2, 3)])), r"graph.* 4 nodes.* 2 edges"),
        (lambda: mixing_rho(np.ones((2, 3))), "matrix"),
        (lambda: mixing_rho([[0.5, 0.5], [0.4, 0.6]]), r"matrix.*sum"),
        (lambda: mixing_rho([[np.nan]]), r"matrix.* nan"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0.1, 1.0))
def test_mixing_is_symmetric_doubly_stochastic_and_contracts(seed, nodes, density):
    """Rows sum to 1, nothing is negative, only neighbours mix, and repeated mixing reaches the mean."""
    graph = random_graph(seed, nodes, density)
    assume(graph.is_connected())
    matrix = mixing_matrix(graph)
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix.sum(axis=1), 1.0, atol=1e-14)
    assert (matrix >= 0).all()
    assert (np.diag(matrix) > 0).all()
    linked = {(i, j) for i, j in zip(*np.nonzero(np.triu(matrix, 1)), strict=True)}
    assert linked == set(graph.edges)
    assert mixing_rho(matrix) < 1.0


def test_mixing_of_known_graphs():
    """A mean of three on a ring, the exact mean on a complete graph, 1/(1 + larger degree) on a star."""
    assert np.allclose(mixing_matrix(ring(5))[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    assert np.allclose(mixing_matrix(complete(6)), 1 / 6)
    assert metropolis_weights(from_edges([(0, 1), (0, 2), (0, 3), (1, 2)])).tolist() == [0.25, 0.25, 0.25, 1 / 3]
    assert mixing_matrix(ring(1)).tolist() == [[1.0]]


def test_rho_is_the_second_eigenvalue_squared():
    """On a ring the eigenvalues are (1 + 2 cos(2 pi k / n)) / 3; rho is the square of the largest but one."""
    eigenvalues = (1 + 2 * np.cos(2 * np.pi * np.arange(1, 8) / 8)) / 3
    assert mixing_rho(mixing_matrix(ring(8))) == pytest.approx((eigenvalues**2).max(), rel=1e-12)
    assert mixing_rho(mixing_matrix(complete(4))) == pytest.approx(0.0, abs=1e-15)
    assert mixing_rho(np.eye(3)) == pytest.approx(1.0)


def test_rho_bounds_one_round():
    """No vector's squared distance from its mean shrinks by less than rho, and one by just that."""
    matrix, rng = mixing_matrix(random_graph(3, 9, 0.5)), np.random.default_rng(0)
    x = rng.normal(size=(9, 200))
    before, after = x - x.mean(axis=0), matrix @ x - x.mean(axis=0)
    assert ((after**2).sum(axis=0) <= mixing_rho(matrix) * (before**2).sum(axis=0) + 1e-12).all()
    slowest = np.linalg.svd(matrix - 1 / 9)[2][0]
    assert ((matrix @ slowest) ** 2).sum() == pytest.approx(mixing_rho(matrix))
