"""MATCHA: probabilities, mixing weight, activations."""

from __future__ import annotations

import functools
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom

from hvd_hetero.topology import complete, from_edges, mixing_matrix, mixing_rho, ring
from hvd_hetero.topology import matcha as solved
from hvd_hetero.topology.graphs import laplacian

matcha = functools.cache(solved)  # several tests ask the same graphs
BUDGETS = (0.05, 0.5, 1.0)


def barbell(clique, path):
    """Two cliques joined by a path of so many further nodes: dense ends, a thin middle."""
    first = list(itertools.combinations(range(clique), 2))
    middle = [(clique - 1 + i, clique + i) for i in range(path + 1)]
    last = list(itertools.combinations(range(clique + path, 2 * clique + path), 2))
    return from_edges([*first, *middle, *last])


def connected_graphs():
    rng = np.random.default_rng(7)
    graphs = [ring(2), ring(3), ring(8), ring(9), complete(6), from_edges([(0, i) for i in range(1, 9)]), barbell(5, 2)]
    graphs += [barbell(12, 5)]  # whose degrees differ by place
    while len(graphs) < 28:
        nodes, density = int(rng.integers(3, 13)), rng.uniform(0.2, 0.9)
        graph = from_edges([(i, j) for i in range(nodes) for j in range(i) if rng.random() < density], nodes=nodes)
        if graph.is_connected():
            graphs.append(graph)
    return graphs


GRAPHS = connected_graphs()
BIPARTITE = from_edges([(i, 6 + j) for i in range(6) for j in range(6)])


@functools.cache
def tori():
    return [from_edges(torus_edges(a, b)) for a, b in ((3, 3), (4, 4), (4, 6), (8, 8))]


def torus_edges(a, b):
    nodes = [(i, j) for i in range(a) for j in range(b)]
    pairs = {frozenset((x, y)) for x in nodes for y in (((x[0] + 1) % a, x[1]), (x[0], (x[1] + 1) % b))}
    return [tuple(sorted(i * b + j for i, j in pair)) for pair in pairs]


@functools.cache
def random_graphs():
    """A ring, so that they are connected, and each other edge by chance."""
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 65))
        edges = {(i, i + 1) for i in range(n - 1)} | {(0, n - 1)}
        edges |= {(i, j) for i in range(n) for j in range(i + 1, n) if rng.random() < rng.uniform(0, 0.3)}
        found.append(from_edges(sorted(edges)))
    return found


def laplacians(m):
    """Each matching's Laplacian, built edge by edge."""
    out = np.zeros((len(m.matchings), m.nodes, m.nodes))
    for number, edges in enumerate(m.matchings):
        for i, j in edges:
            d = np.zeros(m.nodes)
            d[i], d[j] = 1, -1
            out[number] += np.outer(d, d)
    return out


def connectivity(parts, p):
    return np.linalg.eigvalsh(np.tensordot(p, parts, 1))[1]


def weighted(drawn, alpha):
    """W by the rule, of one or several Laplacians of drawn edges."""
    degrees = drawn.diagonal(axis1=-2, axis2=-1)
    w = np.where(drawn == -1, 2 * alpha / (degrees[..., :, None] + degrees[..., None, :] + 2), 0)
    return w + np.eye(drawn.shape[-1]) * (1 - w.sum(axis=-1, keepdims=True))


def draws(m):
    """All 2^M outcomes: their chances, and the Laplacians of what is drawn."""
    active = np.array(list(itertools.product([0, 1], repeat=len(m.matchings))))
    chances = np.where(active, m.probabilities, 1 - np.array(m.probabilities)).prod(axis=1)
    return chances, np.tensordot(active, laplacians(m), 1)


def rho_by_enumeration(m, alpha):
    """|| E[W'W] - J || by summing over all 2^M activations."""
    chances, drawn = draws(m)
    w = weighted(drawn, alpha)
    return np.linalg.norm(np.tensordot(chances, w @ w, 1) - 1 / m.nodes, 2)


@pytest.mark.parametrize("budget", BUDGETS)
def test_invariants(budget):
    """Edges partitioned, probabilities within 0 and 1, the budget spent in full, rho below 1."""
    for graph in GRAPHS:
        m = matcha(graph, budget)
        assert sorted(itertools.chain(*m.matchings)) == list(graph.edges)
        assert len(m.matchings) <= graph.degrees().max() + 1
        assert all(0 <= p <= 1 for p in m.probabilities)
        assert sum(m.probabilities) == pytest.approx(budget * len(m.matchings), rel=1e-12)
        assert 0 <= m.rho < 1


def kelley(parts, budget):
    """The same optimum by cutting planes: each eigenvector bounds lambda_2 linearly in p; (reached, bound)."""
    count, nodes = len(parts), parts.shape[1]
    p, reached, cuts = np.full(count, budget), 0.0, []
    for _ in range(300):
        # the vector 1 lifted out of the way, for LP corners where the graph falls apart
        values, vectors = np.linalg.eigh(np.tensordot(p, parts, 1) + 2 * nodes * np.full((nodes, nodes), 1 / nodes))
        reached = max(reached, values[0])
        cuts += [[*(-np.einsum("i,mij,j->m", v, parts, v)), 1.0] for v in vectors.T[:2]]
        found = linprog(
            [0.0] * count + [-1.0],
            A_ub=cuts,
            b_ub=np.zeros(len(cuts)),
            A_eq=[[1.0] * count + [0.0]],
            b_eq=[budget * count],
            bounds=[(0, 1)] * count + [(0, None)],
        )
        p = found.x[:-1]
        if found.x[-1] <= reached * (1 + 1e-5):
            break
    return reached, found.x[-1]


@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_connectivity_equals_kelleys(budget):
    """Linear programming over eigenvector cuts, which bounds the connectivity of all probabilities, meets it."""
    for graph in [*GRAPHS[4:6], *GRAPHS[8:10]]:
        m = matcha(graph, budget)
        reached, bound = kelley(laplacians(m), budget)
        assert bound <= reached * (1 + 1e-5)
        assert reached * (1 - 1e-4) <= connectivity(laplacians(m), m.probabilities) <= bound * (1 + 1e-9)


def test_a_bridge_is_used_most():
    """The one matching that joins the two cliques gets the highest probability, more than twice the average."""
    m = matcha(barbell(5, 0), 0.4)
    (bridge,) = (j for j, edges in enumerate(m.matchings) if (4, 5) in edges)
    assert m.probabilities[bridge] == max(m.probabilities)
    assert m.probabilities[bridge] > 2 * 0.4


def test_alike_matchings_are_used_alike():
    """The matchings of rings and complete graphs cannot be told apart, so each gets the budget."""
    for graph in (ring(8), ring(9), complete(6), complete(7)):
        assert matcha(graph, 0.3).probabilities == pytest.approx([0.3] * len(matcha(graph, 0.3).matchings), abs=1e-3)


@pytest.mark.parametrize("budget", BUDGETS)
def test_rho_is_that_of_every_activation_summed(budget):
    """rho equals the expectation over all 2^M outcomes, and no other alpha up to 1 gives less."""
    for graph in [g for g in GRAPHS if g.degrees().max() <= 6]:
        m = matcha(graph, budget)
        assert m.rho == pytest.approx(rho_by_enumeration(m, m.alpha), abs=1e-9)
        for alpha in (0.5, 0.99):
            assert rho_by_enumeration(m, alpha) >= m.rho - 1e-9


def test_rho_on_a_complete_graph_by_the_law_of_the_number_drawn():
    """Given k of its M matchings, weights are 1 / (k + 1), L has the mean K = k n / M, and L^2 the mean K (k + 1)."""
    for nodes, budget in [(8, 0.5), (16, 0.1), (32, 0.3)]:
        m = matcha(complete(nodes), budget)
        k = np.arange(nodes)
        expected = 1 - binom.pmf(k, nodes - 1, budget) @ (k / (k + 1)) * nodes / (nodes - 1)
        assert m.rho == pytest.approx(expected, abs=1e-4 if nodes == 8 else 0.02), "more matchings: of draws by chance"


@pytest.mark.parametrize("budget", [0.1, 1.0])
def test_no_round_makes_disagreement_larger(budget):
    """Whatever matchings are drawn, the spectral norm of W is at most 1: also for all of them together."""
    for graph in [*(ring(n) for n in (4, 9, 64)), *(complete(n) for n in (4, 5, 33)), *tori(), *random_graphs()]:
        m = matcha(graph, budget)
        assert m.rho < 1
        assert sum(m.probabilities) == pytest.approx(budget * len(m.matchings))
        drawn = [m.mixing(7, number) for number in range(10)]
        for w in (weighted(laplacians(m).sum(axis=0), m.alpha), *drawn):
            assert np.array_equal(w, w.T)
            assert w.sum(axis=1) == pytest.approx(1)
            assert np.linalg.norm(w, 2) <= 1 + 1e-12


def test_every_round_keeps_away_from_minus_one():
    """On any edges of any graph, W's eigenvalues are at least -1 + 4 / (X + 2), X the largest d_i + d_j."""
    rng, negative = np.random.default_rng(0), 0
    for graph in [*GRAPHS, *random_graphs()]:
        whole = laplacian(graph.nodes, graph.edges)
        for keep in (*rng.uniform(size=5), 1.0):
            kept = np.triu(rng.uniform(size=whole.shape) < keep, 1)
            drawn = np.where(kept | kept.T, whole, 0)
            drawn -= np.diag(drawn.sum(axis=1))
            degrees = drawn.diagonal()
            most = ((degrees[:, None] + degrees) * (drawn == -1)).max()
            w = weighted(drawn, 1.0)
            assert np.linalg.eigvalsh(w)[0] >= -1 + 4 / (most + 2) - 1e-12
            negative += w.min() < 0
    assert negative > 10  # so it is not because all weights are positive


def test_a_pair_weighs_more_the_fewer_partners_it_has():
    """A path of four: the middle pair alone, the outer pairs alone, and all three together."""
    m = replace(matcha(from_edges([(0, 1), (1, 2), (2, 3)]), 0.5), alpha=0.9)
    seen = {tuple(sorted(m.pairs(0, k).items())) for k in range(100)}
    one, two, three = (0.9 * (2 / (met + 2)) for met in (2, 3, 4))
    alone = {(), (((1, 2), one),), (((0, 1), one), ((2, 3), one))}
    assert seen == alone | {(((0, 1), two), ((1, 2), three), ((2, 3), two))}


def test_budget_one_is_d_psgd_where_degrees_are_equal_and_no_worse_elsewhere():
    """The matrix of Metropolis-Hastings weights, where alpha is 1; elsewhere at most its rho."""
    for graph in [*GRAPHS, BIPARTITE]:
        m = matcha(graph, 1.0)
        assert m.probabilities == (1.0,) * len(m.matchings)
        assert m.rho <= mixing_rho(mixing_matrix(graph)) + 1e-9
        assert mixing_rho(m.mixing(0, 0)) == pytest.approx(m.rho, abs=1e-9)
    for graph in (ring(8), ring(9), complete(7)):
        assert matcha(graph, 1.0).mixing(0, 0) == pytest.approx(mixing_matrix(graph))


def test_one_node():
    m = matcha(ring(1))
    assert (m.matchings, m.probabilities, m.rho) == ((), (), 0.0)
    assert m.mixing(0, 0).tolist() == [[1.0]]


def test_activations_depend_on_seed_and_round_alone():
    """Two ranks that ask in different orders, or after a restart, get the same; other seeds and rounds differ."""
    here = matcha(complete(8), 0.5)
    there = pickle.loads(pickle.dumps(here))
    assert here == there
    first = [here.active(5, k).tolist() for k in range(50)]
    assert first == [there.active(5, k).tolist() for k in reversed(range(50))][::-1]
    assert first != [here.active(6, k).tolist() for k in range(50)]
    assert len({tuple(row) for row in first}) > 20


def test_activation_bits_are_pinned():
    """The draws of this seed, so that a change of generator, which would part old ranks from new ones, is seen."""
    m = matcha(complete(8), 0.5)
    drawn = ["".join(str(int(b)) for b in m.active(2024, k)) for k in (7, 8)]
    assert drawn == ["0111110", "0000101"]


def test_numpy_integers_draw_as_pythons_do():
    """A round counter out of an array draws what the plain integer draws on another rank, again in each round."""
    m = matcha(complete(8), 0.5)
    for k in range(20):
        assert m.active(np.int64(3), np.int64(k)).tolist() == m.active(3, k).tolist()


def test_activations_have_their_probabilities_and_are_independent():
    """Over 4,000 rounds each matching's share is p within 4 standard deviations, and so is each pair's joint share."""
    m = matcha(GRAPHS[12], 0.4)
    p, rounds = np.array(m.probabilities), 4000
    drawn = np.array([m.active(1, k) for k in range(rounds)], dtype=float)
    joint, expected = drawn.T @ drawn / rounds, np.outer(p, p)
    np.fill_diagonal(expected, p)
    assert (np.abs(joint - expected) <= 4 * np.sqrt(expected * (1 - expected) / rounds) + 1e-3).all()


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        *((lambda bad=bad: solved(ring(4), bad), ValueError, "budget") for bad in (0.0, 1e-16, 1.01, float("nan"))),
        (lambda: solved(from_edges([(0, 1), (2, 3)])), ValueError, "graph.* 4 nodes.* 2 edges"),
        (lambda: matcha(ring(4)).active(3.0, 0), TypeError, "seed"),
        (lambda: matcha(ring(4)).active(2**128, 0), ValueError, "seed"),
        (lambda: matcha(ring(4)).active(0, -1), ValueError, "round_number"),
    ],
)
def test_what_cannot_be_is_refused(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_the_least_budget_still_contracts():
    """At the least budget that is taken, rho is below 1 and the budget is kept."""
    m = matcha(ring(9), 1e-9)
    assert m.rho < 1
    assert sum(m.probabilities) == pytest.approx(3e-9)
