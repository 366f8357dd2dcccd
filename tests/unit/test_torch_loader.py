"""Micro-batches that memory makes smaller, on one rank."""

from __future__ import annotations

import time

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.nn import functional  # noqa: E402

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

BATCH = 8
X = torch.randn(2 * BATCH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def begun(policy, dataset, **options):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    balance = LoadBalance(policy, global_batch=BATCH)
    loader = BalancedLoader(dataset, balance, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, balance, loader, DistributedOptimizer(optimizer, balance, model.named_parameters())


class Slow(torch.utils.data.Dataset):
    """Every sample takes its time to be read."""

    read_s = 2e-3

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        time.sleep(self.read_s)
        return X[i], Y[i]


@pytest.mark.parametrize("known", [True, False], ids=["known beforehand", "found out"])
def test_samples_that_are_read_again_in_parts_count_as_waiting_for_data(known):
    model, balance, loader, optimizer = begun("bsp", Slow())
    input_s = []
    balance.balancer.observer = lambda finished: input_s.extend(finished.table.figures("input_s"))
    if known:
        balance.balancer.pace.limit = 4
    for x, y in loader:
        with balance.surviving_out_of_memory():
            if len(x) == BATCH:
                raise torch.OutOfMemoryError("8 samples do not fit")
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    first_s, second_s = input_s
    assert first_s >= 2 * BATCH * Slow.read_s, "all of them twice"
    assert second_s >= BATCH * Slow.read_s
