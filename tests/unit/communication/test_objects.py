"""Objects in one collective: what each rank gets, and that it is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.communication.objects import Gather, all_objects, object_of
from hvd_hetero.errors import HeteroError


def on_ranks(ranks: int, call: Callable[[int, Gather], Any]) -> list[Any]:
    """Call it on so many threads, whose one gather lays what they send end to end."""
    sent = [memoryview(b"")] * ranks
    all_there = threading.Barrier(ranks, timeout=60.0)
    calls = [0] * ranks

    def rank(number: int) -> Any:
        def gather(name: str, mine: memoryview) -> memoryview:
            calls[number] += 1
            sent[number] = mine
            all_there.wait()
            return memoryview(b"".join(sent))

        return call(number, gather)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(rank, range(ranks)))
    assert calls == [1] * ranks, "one collective"
    return found


_OBJECTS = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=10)  # threads that meet, on a machine that may be busy
@given(st.lists(_OBJECTS, min_size=1, max_size=4))
def test_each_rank_has_the_objects_of_all_in_their_order(objects: list[Any]) -> None:
    assert on_ranks(len(objects), lambda rank, gather: all_objects(objects[rank], "all", len(objects), gather)) == [
        objects
    ] * len(objects)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_the_object_of_one_rank_is_itself_there_and_a_copy_elsewhere(root: int) -> None:
    mine = [{"of": rank} for rank in range(3)]
    found = on_ranks(3, lambda rank, gather: object_of(mine[rank], rank == root, "one", gather))
    assert found == [mine[root]] * 3
    assert [each is mine[root] for each in found] == [rank == root for rank in range(3)]


def test_functions_of_a_script_travel() -> None:
    """Which the standard library's pickle refuses."""
    doubled, _ = on_ranks(2, lambda rank, gather: object_of(lambda number: 2 * number, rank == 1, "one", gather))
    assert doubled(4) == 8


READ = []


def read() -> None:
    """A message was."""
    READ.append(1)


class TellsWhenRead:
    def __reduce__(self) -> tuple[Any, ...]:
        return read, ()


def test_what_is_sent_is_read_by_the_others_alone() -> None:
    """It may be large, or on a device that has no room for another."""
    READ.clear()
    on_ranks(3, lambda rank, gather: object_of(TellsWhenRead(), rank == 1, "one", gather))
    assert len(READ) == 2


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        # Rank 0 would take the one for all, and rank 1 another call's object for its own.
        (
            [lambda gather: all_objects("mine", "A", 2, gather), lambda gather: object_of(None, False, "B", gather)],
            [r"'A' .*1 of 2", r"'B' .*1 of 1"],
        ),
        (
            [lambda gather: all_objects(1, "A", 2, gather), lambda gather: all_objects(2, "B", 2, gather)],
            [r"'A' .*2 of 2", r"'B' .*2 of 2"],
        ),
        ([lambda gather: object_of(1, True, "A", gather)] * 2, [r"'A' .*2 of 1"] * 2),
        ([lambda gather: object_of(1, False, "A", gather)] * 2, [r"'A' .*0 of 1"] * 2),
    ],
)
def test_ranks_that_are_out_of_step_hear_so(calls: list[Callable[[Gather], Any]], said: list[str]) -> None:
    """On all of them: one that went on alone would wait for the others."""

    def rank(number: int, gather: Gather) -> None:
        with pytest.raises(HeteroError, match=said[number]):
            calls[number](gather)

    on_ranks(2, rank)


@pytest.mark.parametrize("foreign", [b"", b"\x07", b"\x07" * 11, b"\x07" * 12, b"\xff" * 50])
def test_bytes_of_a_call_of_the_users_own_are_no_object(foreign: bytes) -> None:
    """TensorFlow pairs it with a call of this package, since both gather bytes."""
    with pytest.raises(HeteroError, match=r"'A' .*of 2"):
        all_objects("mine", "A", 2, lambda _, mine: memoryview(bytes(mine) + foreign))
    with pytest.raises(HeteroError, match=r"'A' .*of 1"):
        object_of(None, False, "A", lambda *_: memoryview(foreign))


def test_an_object_that_cannot_travel_is_said_where_it_is() -> None:
    with pytest.raises(TypeError, match="pickle"):
        all_objects(threading.Lock(), "all", 1, lambda _, mine: mine)
