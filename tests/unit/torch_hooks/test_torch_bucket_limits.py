"""A wire says how large buckets are to be, and gradients leave in as many sums."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.communication.bucket_sizes import Limits, divide  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402
from torch_hooks.wires.threads import TorchThreadWire  # noqa: E402
from torch_hooks.wires.torch_distributed import ProcessGroupWire  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
LAYERS, GLOBAL_BATCH = 8, 6
TENSORS = 2 * LAYERS


def sums_of_a_round(limits):
    """How many sums each rank starts in the last of three rounds."""

    class Wire(TorchThreadWire):
        def __init__(self, crew, rank):
            super().__init__(crew, rank)
            self.names = []

        def start_sum(self, tensor, name):
            self.names.append(name)
            return super().start_sum(tensor, name)

    if limits is not None:
        Wire.limits = limits

    def train(rank):
        here = wire_here()
        balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH, wire=(wire := Wire(here.crew, here.rank)))
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance, model.named_parameters())
        for (x,) in BalancedLoader(TensorDataset(torch.ones(3 * GLOBAL_BATCH, 4)), balance):
            wire.names.clear()
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return len(wire.names)

    return run_on_threads(train, ranks=2)


@pytest.mark.parametrize(
    ("limits", "sums"),
    [
        (Limits(members=100, most=2**20, least=2**20, alone=2**20), 1),
        (Limits(members=4, most=2**20, least=2**20, alone=2**20), TENSORS // 4),
        (Limits(members=100, most=2**20, least=2**20, alone=1), TENSORS),
        (None, 1),
    ],
)
def test_gradients_leave_in_as_many_sums_as_the_wire_wants(limits, sums):
    assert sums_of_a_round(limits) == [sums] * 2


@pytest.mark.parametrize(("hosts", "sums"), [(["a", "a"], 2), (["a", "b"], 7)])
def test_over_process_groups_hundreds_of_gradients_leave_in_few_sums(hosts, sums, monkeypatch):
    """200 layers of 128 units are 13 MB, for which Horovod's limits make 13 buckets."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(ProcessGroupWire, "allgather_object", lambda self, obj, name: hosts)
        wire = ProcessGroupWire()
        monkeypatch.undo()
        sizes = [4 * 128, 4 * 128 * 128] * 200
        assert len(divide(sizes)) == 13
        assert len(divide(sizes, limits=wire.limits)) == sums
        assert wire.line().limits == wire.limits
    finally:
        dist.destroy_process_group()
