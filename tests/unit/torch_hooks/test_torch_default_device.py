"""What ranks tell each other stays on the CPU, whatever device a script has made the default."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, LoadBalance, average_by_samples  # noqa: E402


@pytest.mark.parametrize("options", [{"policy": "lb-bsp"}, {"policy": "bsp", "sync": "d-psgd"}])
def test_a_script_with_a_default_device_trains_as_one_without(options):
    """On the device "meta" a tensor has no numbers: one that was made there by mistake cannot be read."""

    def trained(rank):
        torch.set_default_device("meta")  # of this thread
        try:
            return train(rank)
        finally:
            torch.set_default_device(None)

    def train(rank):
        x = torch.arange(96, device="cpu", dtype=torch.float64).reshape(48, 2).sin()
        model = torch.nn.Linear(2, 1, device="cpu", dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(0.1), model.bias.fill_(0.1)
        balance = LoadBalance(global_batch=8, **options)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        while balance.rounds < 6:  # PyTorch's own DataLoader reads a number that it makes on the default device
            balance.batch(balance.batch_size)
            optimizer.zero_grad()
            model(x[8 * balance.rounds :][: balance.batch_size]).square().mean().backward()
            optimizer.step()
        mean = average_by_samples({"a": 1.0 + rank, "b": model.bias.detach()}, 1 + rank, balance)
        balance.close()
        return [p.tolist() for p in model.parameters()], float(mean["a"])

    first, second = run_on_threads(trained, 2)
    assert first[1] == second[1] == pytest.approx(5 / 3)
    if "sync" not in options:
        assert first[0] == second[0]
    assert first[0][0] != [[0.1, 0.1]]
