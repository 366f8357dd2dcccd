"""A parameter with no elements, such as the bias of a layer that has none, is trained like any other."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.policies import BSP, ElasticBSP  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


class Net(torch.nn.Module):
    def __init__(self, shape, used, dtype):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.empty = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.used = used

    def forward(self, x):
        return self.layer(x) + (self.empty.sum() if self.used else 0.0)


@pytest.mark.parametrize(
    ("shape", "used", "dtype"),
    [((0,), True, torch.float32), ((4, 0), False, torch.float32), ((0, 3), True, torch.float64)],
)
@pytest.mark.parametrize("policy", [BSP, lambda: BSP(max_micro_batch=3), lambda: ElasticBSP(updates="local")])
def test_it_is_trained(shape, used, dtype, policy):
    net = Net(shape, used, dtype)
    balance = LoadBalance(policy(), global_batch=8)
    loader = BalancedLoader(TensorDataset(X), balance, stop_at=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optimizer, balance, net.named_parameters())
    before = net.layer.weight.detach().clone()
    while balance.rounds < 3:
        for (x,) in loader:
            optimizer.zero_grad()
            functional.mse_loss(net(x), x[:, :1]).backward()
            optimizer.step()
    assert not torch.equal(before, net.layer.weight)
    assert net.empty.shape == shape


def test_nothing_but_it():
    empty = torch.nn.Parameter(torch.zeros(0))
    balance = LoadBalance("bsp", global_batch=8)
    optimizer = DistributedOptimizer(torch.optim.SGD([empty], lr=0.1), balance)
    for _ in range(2):
        balance.batch(8)
        empty.sum().backward()
        optimizer.step()
    assert balance.rounds == 2
