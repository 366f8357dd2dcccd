"""Both wires between processes do what the interface says, call by call (that of threads: tests/unit/torch_hooks)."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
RANKS = 3
WIRES = {"torch": "HorovodWire", "torch.distributed": "ProcessGroupWire"}


@pytest.fixture(scope="module", params=list(WIRES))
def wire(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(wire, pool):
    with pool("wire_calls.py", RANKS, wire) as ranks:
        yield ranks


def everywhere(ranks, case):
    return [rank[case] for rank in ranks]


def test_the_wire_is_that_of_what_was_initialised(ranks, wire):
    assert everywhere(ranks, "kind") == [WIRES[wire]] * RANKS


def test_sums_are_in_place_in_every_type_and_raise_no_version(ranks, wire):
    for outcome in everywhere(ranks, "sums"):
        assert len(outcome) == 5 + (wire == "torch.distributed")
        for dtype, found in outcome.items():
            assert found == [True, 0] + [6] * 6, dtype


def test_rows_are_laid_end_to_end_however_many_a_rank_has_and_however_many_it_had(ranks):
    """Rank r has n r rows of 0, 1, …, on top of 1000 r."""
    expected = []
    for n in (1, 5, 2, 0, 40):
        sizes = [2 * n * rank for rank in range(RANKS)]
        expected.append([[sum(sizes) // 2, 2], sum(k * (k - 1) // 2 + 1000 * r * k for r, k in enumerate(sizes))])
    assert everywhere(ranks, "gathers") == [expected] * RANKS


def test_rows_of_any_type_are_gathered_whoever_asks_first(ranks):
    halves = [[[0.5, 0.5], [0.5, 0.5]]] * RANKS
    assert everywhere(ranks, "gathers_of_all_types") == [[halves, [0, 1, 1, 2, 2, 2]]] * RANKS


def test_an_exchange_brings_what_each_rank_has_sent(ranks):
    found = everywhere(ranks, "exchanges")
    assert found[0] == [[[0, 1, 100, 101, 200, 201], [2, 2, 2]]] * 2
    assert found[1] == [[[2, 3, 102, 103, 104], [2, 3, 0]]] * 2
    assert found[2] == [[[4, 5, 202, 203, 204], [2, 0, 3]]] * 2


def test_broadcasts_and_objects(ranks):
    assert everywhere(ranks, "broadcasts") == [[[1.0] * 3, 0, [], {"of": 1}, [0, 1, 2]]] * RANKS


def test_objects_of_any_rank_and_length_whatever_device_is_the_default(ranks):
    expected = [[{"of": rank} for rank in range(RANKS)], ["x" * 100 * rank for rank in range(RANKS)]]
    assert everywhere(ranks, "objects") == [expected] * RANKS


def test_calls_of_a_line_have_no_order_relative_to_those_of_the_wire(ranks):
    sums = {"a": 3.0, "b": 30.0, "c": 300.0, "d": 3000.0, "table": 21.0}
    assert everywhere(ranks, "lines") == [{str(round): sums for round in range(3)}] * RANKS


def test_lines_are_used_again_once_no_rank_holds_them(ranks, wire):
    """Six optimizers one after the other, the third of which rank 1 keeps: each needs a line."""
    found = everywhere(ranks, "lines_are_used_again")
    assert [kept for *_, kept in found] == [0, 1, 0]
    if wire == "torch.distributed":
        assert all(after - before <= 2 for before, after, _ in found)


@pytest.mark.parametrize("wire", ["torch.distributed"], indirect=True)
def test_ranks_of_a_group_train_without_the_others(ranks):
    """With inputs of 0 and 2, the mean gradient is 1 in each of two rounds."""
    assert everywhere(ranks, "a_group_of_some") == [[-2.0, 1.0], [], [-2.0, 1.0]]


@pytest.mark.parametrize("wire", ["torch.distributed"], indirect=True)
def test_parameters_may_be_of_a_type_that_horovod_cannot_sum(ranks):
    found = everywhere(ranks, "parameters_in_bfloat16")
    assert all(before == found[0][0] for before, _ in found), "rank 0's"
    for _, gradients in found:
        assert gradients == pytest.approx([1.0, 1.0], rel=0.01)
