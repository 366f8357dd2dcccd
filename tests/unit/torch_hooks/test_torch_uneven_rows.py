"""Rows of unequal numbers, in messages of equal length: one call where there is room for all, and two otherwise."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.errors import HeteroError  # noqa: E402
from torch_hooks.wires.uneven_rows import Rows  # noqa: E402


def gather(of_ranks, room):
    """What each rank receives, how much room is told for the next time, and how many calls it took."""
    sides = [Rows(rows, len(of_ranks), room, "rows") for rows in of_ranks]
    assert len({side.sent.shape for side in sides}) == 1, "messages of equal length"
    messages = [side.sent.clone() for side in sides]
    for side in sides:
        side.received = messages
    (enough,) = {side.enough() for side in sides}
    second = [side.second() for side in sides]
    assert len({more is None for more in second}) == 1, "all ranks make a second call, or none"
    if second[0] is not None:
        assert len({sent.shape for _, sent in second}) == 1
        for side in sides:
            side.received = [sent.clone() for _, sent in second]
    return [side.result() for side in sides], enough, 1 + (second[0] is not None)


@pytest.mark.parametrize("room", [0, 1, 3, 7])
@pytest.mark.parametrize("numbers", [[0, 0], [1, 1], [0, 5, 2], [7, 0, 1, 3]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_rows_come_end_to_end_whatever_the_room(numbers, room, dtype):
    ranks = [torch.randint(0, 2, (n, 2, 3), generator=torch.Generator().manual_seed(n)).to(dtype) for n in numbers]
    results, enough, calls = gather(ranks, room)
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, torch.cat(ranks))
    assert calls == 1 + (max(numbers) > room)
    assert enough >= max(numbers)


def test_the_room_that_is_told_is_enough_for_the_same_numbers():
    ranks = [torch.arange(16.0)[:n] for n in (16, 3)]
    _, enough, calls = gather(ranks, 0)
    assert (enough, calls) == (18, 2)
    assert gather(ranks, enough)[2] == 1


def test_rows_of_no_width_and_parts_of_tensors():
    ranks = [torch.zeros(2, 0), torch.zeros(1, 0)]
    assert [list(result.shape) for result in gather(ranks, 4)[0]] == [[3, 0]] * 2
    for columns in (torch.arange(12).reshape(3, 4).t(), torch.arange(4)[None].t()):  # the latter counts as contiguous
        for room in (0, 1):
            of_ranks = [columns[:n] for n in (1, 4)]
            for result in gather(of_ranks, room)[0]:
                assert torch.equal(result, torch.cat(of_ranks))


def test_rows_of_other_types_are_refused_on_all_ranks():
    with pytest.raises(HeteroError, match="'rows'"):
        gather([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], 0)
