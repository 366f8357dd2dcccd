"""Calls that take turns start on every rank in the agreed order, in whatever order they come."""

from __future__ import annotations

import itertools
import random

import pytest

from hvd_hetero.communication.lines import FoundByName, Turns
from hvd_hetero.errors import RoundStateError


class Rank:
    """Notes in which order calls start."""

    def __init__(self):
        self.turns, self.started = Turns(), []

    def come(self, *names):
        for name in names:
            self.turns.come(name, lambda name=name: self.started.append(name))


def test_without_an_order_calls_start_as_they_come():
    rank = Rank()
    rank.come("b", "a", "b")
    assert rank.started == ["b", "a", "b"]


@pytest.mark.parametrize("comes", list(itertools.permutations("abcd")))
def test_all_orders_become_one(comes):
    rank = Rank()
    for _ in range(2):
        rank.turns.in_order(["a", "b", "c", "d"])
        rank.come(*comes)
    assert rank.started == list("abcd") * 2
    assert rank.turns.held == ()


def test_a_call_is_held_back_only_until_those_before_it_have_come():
    rank = Rank()
    rank.turns.in_order(["a", "b", "c"])
    rank.come("b")
    assert rank.started == []
    assert rank.turns.held == ("b",)
    rank.come("a")
    assert rank.started == ["a", "b"]


def test_ranks_that_have_come_to_different_points_change_their_order_alike():
    """Some leave the round at random places in the old order, and come to the rest in an order of their own."""
    draw = random.Random(0)
    for _ in range(200):
        old = list("abcdefgh")
        dropped = set(draw.sample(old, draw.randint(0, 3)))
        kept = [name for name in old if name not in dropped]
        new = [*kept, *"xyz"]
        draw.shuffle(new)  # the order of later rounds may be any
        ranks = [Rank() for _ in range(3)]
        for rank in ranks:
            rank.turns.in_order(old)
            early = draw.sample(kept, draw.randint(0, len(kept)))
            rank.come(*early)
            rank.turns.change_order(new)
            rest = [name for name in new if name not in early]
            rank.come(*draw.sample(rest, len(rest)))
            rank.turns.in_order(new)
            rank.come(*draw.sample(new, len(new)))
        assert ranks[0].started == ranks[1].started == ranks[2].started
        assert sorted(ranks[0].started) == sorted([*kept, *"xyz", *new])
        assert ranks[0].started[-len(new) :] == new


def test_a_call_without_a_turn_is_refused():
    rank = Rank()
    rank.turns.in_order(["a", "b"])
    with pytest.raises(RoundStateError, match=r"'c' has no turn.* these are left: a, b"):
        rank.come("c")
    rank.come("b")
    with pytest.raises(RoundStateError, match="'b' has no turn"):
        rank.come("b")


def test_where_calls_are_found_by_name_there_is_one_line():
    wire = FoundByName()
    assert wire.line() is wire
