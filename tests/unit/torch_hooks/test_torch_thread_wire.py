"""What travels between ranks that are threads: as on Horovod's wire, and the same bits in every run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402


def test_a_sum_is_in_place_and_in_order_of_rank_and_raises_no_version():
    terms = [torch.tensor([0.1 * 3**rank, 1e17 * (-1) ** rank]) for rank in range(4)]
    expected = ((terms[0] + terms[1]) + terms[2]) + terms[3]

    def case(rank):
        wire, tensor = wire_here(), terms[rank].clone()
        handle = wire.start_sum(tensor, "sum")
        assert wire.wait(handle) is tensor
        assert wire.done(handle)
        return tensor, tensor._version

    for tensor, version in run_on_threads(case, ranks=4):
        assert torch.equal(tensor, expected)
        assert version == 0


def test_an_exchange_tells_what_came_and_how_much_from_each():
    def case(rank):
        wire = wire_here()
        to = [[1, 2, 0], [0, 0, 1], [3, 0, 0]][rank]
        sent = torch.arange(sum(to)) + 10 * rank
        received, counts = wire.result(wire.start_exchange(sent, to, "exchange"))
        return received.tolist(), counts.tolist()

    assert run_on_threads(case, ranks=3) == [([0, 20, 21, 22], [1, 0, 3]), ([1, 2], [2, 0, 0]), ([10], [0, 1, 0])]


def test_tensors_of_unlike_shapes_are_refused():
    def case(rank):
        wire_here().result(wire_here().start_sum(torch.zeros(rank + 1), "sum"))

    with pytest.raises(ThreadRankError, match="'sum'"):
        run_on_threads(case, ranks=2)
