"""Who is connected to whom in a signal channel, and what the loss of ranks does to the rest."""

import random
from collections import deque

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from hvd_hetero.communication.signals.neighbours import MESH, neighbours


@pytest.mark.parametrize("size", [1, 2, 3, 7, MESH, MESH + 1, 10, 15, 16, 17, 100, 1000])
def test_neighbours(size):
    """Symmetric, never oneself; all up to MESH, else at most 2·log2(size); everyone within log2(size) hops."""
    of = [neighbours(rank, size) for rank in range(size)]
    for rank in range(size):
        assert rank not in of[rank]
        assert all(rank in of[other] for other in of[rank])
    if size <= MESH:
        assert all(len(each) == size - 1 for each in of)
    else:
        assert all(len(each) <= 2 * (size - 1).bit_length() for each in of)
    assert max(distances(of, set()).values()) <= size.bit_length()


@pytest.mark.parametrize("size", [9, 10, 11, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64])
def test_survivors_stay_connected_when_any_few_die(size):
    """Whatever ranks die, fewer than each has neighbours, the others reach one another.

    By Menger's theorem: between rank 0 and each rank that is not its neighbour run as many paths without a common rank
    as each has neighbours. Every rank sees the same graph as rank 0 does.
    """
    of = [neighbours(rank, size) for rank in range(size)]
    entry, exit = range(size), range(size, 2 * size)
    edges = [(entry[rank], exit[rank]) for rank in range(size)]
    edges += [(exit[rank], entry[other]) for rank in range(size) for other in of[rank]]
    capacity = csr_matrix((np.ones(len(edges), dtype=np.int32), np.transpose(edges)), shape=(2 * size, 2 * size))
    for other in set(range(1, size)) - of[0]:
        assert maximum_flow(capacity, exit[0], entry[other]).flow_value == len(of[0])


def test_a_tenth_of_a_thousand_dies():
    """Of 1,000 ranks any tenth may die: the rest reach one another, in at most 8 hops."""
    chance = random.Random(0)
    of = [neighbours(rank, 1000) for rank in range(1000)]
    for _ in range(20):
        found = distances(of, set(chance.sample(range(1000), 100)))
        assert len(found) == 900
        assert max(found.values()) <= 8


def distances(of, dead):
    start = next(rank for rank in range(len(of)) if rank not in dead)
    found, todo = {start: 0}, deque([start])
    while todo:
        rank = todo.popleft()
        for other in of[rank] - dead - found.keys():
            found[other] = found[rank] + 1
            todo.append(other)
    return found
