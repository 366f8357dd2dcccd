"""States of what learns: plain data that loads to the same figures, and what cannot be is refused by name."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import numpy as np
import pytest

from hvd_hetero.kept import Figure, Kept


class Pair(NamedTuple):
    one: float = 1.0
    two: float = 2.0


class Inner(Kept):
    KEPT = (Figure("value", least=-math.inf),)

    def __init__(self) -> None:
        self.value = 0.0


class Learner(Kept):
    KEPT = (
        Figure("_ranks", unknown=math.nan),
        Figure("_latest", unknown=math.inf),
        Figure("count", whole=True, most=10),
        Figure("sure"),
        Figure("_pair", positive=True),
        Figure("_sizes", whole=True, any_length=True),
    )
    PARTS = ("_inner", "_other")

    def __init__(self, ranks: int = 3) -> None:
        self._ranks = np.full(ranks, math.nan)
        self._latest = math.inf
        self.count, self.sure = 0, False
        self._pair, self._sizes = Pair(), [0]
        self._inner: Inner | None = Inner()
        self._other: Inner | None = None


def taught() -> Learner:
    learner = Learner()
    learner._ranks[1] = 0.1
    learner.count, learner.sure, learner._pair, learner._sizes = 7, True, Pair(0.25, 4.0), [3, 1]
    learner._inner.value = -2.5
    return learner


def test_what_was_learned_comes_back_from_json_with_its_types_and_what_is_not_known():
    learner = Learner()
    learner.load_state_dict(json.loads(json.dumps(taught().state_dict(), allow_nan=False)))
    assert np.array_equal(learner._ranks, taught()._ranks, equal_nan=True)
    assert (learner._latest, learner._sizes, learner._inner.value) == (math.inf, [3, 1], -2.5)
    assert (type(learner.count), learner.sure, learner._pair) == (int, True, Pair(0.25, 4.0))
    assert learner.state_dict() == taught().state_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [1.0, 1.0]},
        {"ranks": [1.0, -2.0, 1.0]},
        {"ranks": [1.0, math.nan, 1.0]},
        {"ranks": [[1.0], [], [1.0]]},
        {"latest": None},
        {"latest": [1.0]},
        {"count": 1.5},
        {"count": 11},
        {"count": "some"},
        {"pair": [0.0, 1.0]},
        {"pair": [math.inf, 1.0]},
        {"sizes": 3},
        {"sizes": [-1]},
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_changes_nothing(change):
    learner = Learner()
    with pytest.raises(ValueError, match=rf"Learner: '{next(iter(change))}' must be .*, got .*; resume"):
        learner.load_state_dict(taught().state_dict() | change)
    assert learner.state_dict() == Learner().state_dict()


def test_a_missing_figure_is_named():
    state = taught().state_dict()
    del state["count"]
    with pytest.raises(
        ValueError, match=r"'count' must be whole, of shape \(\), at least 0 and at most 10, got nothing"
    ):
        Learner().load_state_dict(state)


def test_a_part_that_one_of_both_lacks_stays_as_it_is():
    learner, without = Learner(), Learner()
    without._inner = None
    without.load_state_dict(taught().state_dict())
    learner.load_state_dict(without.state_dict())
    assert without._inner is None
    assert learner._inner.value == 0.0
