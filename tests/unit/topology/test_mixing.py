"""Who averages with whom: rows of mixing matrices, and names."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hvd_hetero.topology import complete, from_edges, matcha, ring
from hvd_hetero.topology.mixing import MatchaMixing, NeighbourMixing, resolve_mixing


def matrix(mixing, workers: int, round: int) -> np.ndarray:
    rows = [mixing.row(rank, round) for rank in range(workers)]
    return np.array([[row.get(j, 0.0) for j in range(workers)] for row in rows])


@pytest.mark.parametrize("sync", ["d-psgd", "matcha"])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_in_every_round_the_rows_make_a_symmetric_doubly_stochastic_matrix(sync, workers):
    mixing = resolve_mixing(sync, workers)
    for round in range(20):
        w = matrix(mixing, workers, round)
        assert np.allclose(w, w.T)
        assert np.allclose(w.sum(axis=1), 1)
        assert max(np.count_nonzero(row) - (row[i] != 0) for i, row in enumerate(w)) <= mixing.most_neighbours


@pytest.mark.parametrize("sync", ["d-psgd", "matcha", MatchaMixing(matcha(complete(5), budget=0.4), seed=7)])
def test_the_matrix_of_a_round_holds_the_rows_of_all_ranks(sync):
    mixing = resolve_mixing(sync, 5)
    for round in range(20):
        assert mixing.matrix(round) == pytest.approx(matrix(mixing, 5, round), abs=1e-15)


@pytest.mark.parametrize("sync", ["d-psgd", "matcha", NeighbourMixing(from_edges([(0, 1), (0, 2), (0, 3), (3, 4)]))])
def test_what_ranks_exchange_makes_the_average_of_their_rows_and_has_one_size(sync):
    mixing = resolve_mixing(sync, 5)
    models = np.random.default_rng(1).normal(size=5)
    for round in range(20):
        exchanges = [mixing.exchange(rank, round) for rank in range(5)]
        for rank, mine in enumerate(exchanges):
            assert sum(mine.copies) == mixing.most_neighbours
            came = [models[j] for j, sender in enumerate(exchanges) for _ in range(sender.copies[rank])]
            mean = mine.own * models[rank] + np.dot(mine.received, came)
            assert mean == pytest.approx(mixing.matrix(round)[rank] @ models, abs=1e-12)
            assert sum(mine.received) + mine.own == pytest.approx(1.0)


def test_pairs_that_share_no_rank_exchange_at_once():
    """An even ring needs two turns, an odd one three, everybody with everybody of four three; MATCHA what is active."""
    assert [resolve_mixing("d-psgd", n).exchanges(0) for n in (2, 3, 6, 7)] == [1, 3, 2, 3]
    assert NeighbourMixing(complete(4)).exchanges(9) == 3
    drawn = resolve_mixing("matcha", 6)
    for round in range(50):
        partners = [len(drawn.row(rank, round)) - 1 for rank in range(6)]
        assert drawn.exchanges(round) == max(partners)  # on an even ring each matching holds every rank


def test_local_updates_go_with_the_allreduce_alone():
    assert resolve_mixing("allreduce", 4, updates_locally=True) is None
    with pytest.raises(ValueError, match=r"sync='matcha'.*local updates.*sync='allreduce'"):
        resolve_mixing("matcha", 4, updates_locally=True)


def test_d_psgd_averages_along_a_ring_and_matcha_with_some_of_it_at_a_time():
    edges = {(i, (i + 1) % 6) for i in range(6)} | {((i + 1) % 6, i) for i in range(6)}
    w = matrix(resolve_mixing("d-psgd", 6), 6, 0)
    assert {(int(i), int(j)) for i, j in np.argwhere(w) if i != j} == edges
    used = [
        {(int(i), int(j)) for i, j in np.argwhere(matrix(resolve_mixing("matcha", 6), 6, r)) if i != j}
        for r in range(40)
    ]
    assert all(links <= edges for links in used)
    assert len({frozenset(links) for links in used}) > 1
    assert set.union(*used) == edges


def test_a_schedule_that_was_sent_to_another_rank_says_the_same():
    mixing = MatchaMixing(matcha(complete(5), budget=0.4), seed=7)
    copied = pickle.loads(pickle.dumps(mixing))
    assert all(mixing.row(2, r) == copied.row(2, r) for r in range(30))


def test_the_allreduce_and_a_single_rank_need_no_mixing():
    assert resolve_mixing("allreduce", 4) is None
    assert resolve_mixing("matcha", 1) is None


def test_graphs_of_ones_own_are_taken():
    mixing = NeighbourMixing(complete(4))
    assert resolve_mixing(mixing, 4) is mixing


@pytest.mark.parametrize(
    ("sync", "error", "message"),
    [
        ("dpsgd", ValueError, r"'dpsgd'.*'d-psgd'"),
        (NeighbourMixing(ring(3)), ValueError, r"sync.* 3 nodes.* 4 ranks"),
        (None, TypeError, r"sync.* None"),
    ],
)
def test_what_is_not_known_is_refused(sync, error, message):
    with pytest.raises(error, match=message):
        resolve_mixing(sync, 4)
