"""Micro-batches that memory or collate_fn makes smaller, on one rank."""

from __future__ import annotations

import time

import pytest
from clocks import ThreadClock

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.nn import functional  # noqa: E402

from hvd_hetero.policies import BSP  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

BATCH = 8
X = torch.randn(2 * BATCH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True)).float()


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


class Cast(torch.nn.Module):
    """From float64 to float32: gradients of two kinds leave apart, those of the layers behind it first."""

    def forward(self, x):
        return x.float()


def network():
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4).double(), torch.nn.Tanh(), Cast(), torch.nn.Linear(4, 4), torch.nn.Tanh(),
        torch.nn.Linear(4, 1),
    )  # fmt: skip


def begun(policy, dataset, **options):
    model = network()
    balance = LoadBalance(policy, global_batch=BATCH)
    loader = BalancedLoader(dataset, balance, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, balance, loader, DistributedOptimizer(optimizer, balance, model.named_parameters())


class Slow(torch.utils.data.Dataset):
    """Every sample takes its time to be read."""

    read_s = 2e-3

    def __init__(self, clock):
        self._clock = clock

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self._clock.pass_s(self.read_s)
        return X[i], Y[i]


@pytest.mark.parametrize("known", [True, False], ids=["known beforehand", "found out"])
def test_samples_that_are_read_again_in_parts_count_as_waiting_for_data(known, monkeypatch):
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    model, balance, loader, optimizer = begun("bsp", Slow(clock))
    input_s = []
    balancer_of(balance).observer = lambda finished: input_s.extend(finished.table.figures("input_s"))
    if known:
        balancer_of(balance).meter.memory.failed = 4
    for x, y in loader:
        with balance.surviving_out_of_memory():
            if len(x) == BATCH:
                raise torch.OutOfMemoryError("8 samples do not fit")
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert input_s == pytest.approx([2 * BATCH * Slow.read_s, BATCH * Slow.read_s]), "those of the first round twice"


class Unreadable(torch.utils.data.Dataset):
    """Some samples cannot be read."""

    def __init__(self, unreadable):
        self._unreadable = unreadable

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return None if i in self._unreadable else i


def indices(samples):
    return torch.tensor([i for i in samples if i is not None], dtype=torch.int64)


def single(unreadable, rounds):
    """What one process makes of the samples that can be read, a round at a time."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for r in range(rounds):
        index = [i for i in range(r * BATCH, (r + 1) * BATCH) if i not in unreadable]
        optimizer.zero_grad(set_to_none=False)
        if index:
            functional.mse_loss(model(X[index]), Y[index]).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("moment", ["never", "backward"])
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize(
    "unreadable",
    [{10, 11}, {8, 9, 13, 14, 15}, set(range(8, 15))],
    ids=["second", "first and last", "all but the last"],
)
def test_micro_batches_and_parts_in_which_nothing_is_left_are_passed_over(unreadable, micro_batch, moment):
    """Of the second round, in which memory runs short once, in the backward pass: some gradients are gone."""
    model, balance, loader, optimizer = begun(
        BSP(max_micro_batch=micro_batch), Unreadable(unreadable), collate_fn=indices, weight_of=len
    )
    used = []
    balancer_of(balance).observer = lambda finished: used.append(finished.table.figures("weight")[0])
    shortages = [moment]

    def runs_short(size):
        if balance.rounds == 1 and size > 1 and "backward" in shortages:
            shortages.clear()
            raise torch.OutOfMemoryError(f"{size} samples do not fit")

    for index in loader:
        assert len(index), "it is never yielded"
        with balance.surviving_out_of_memory():
            optimizer.zero_grad()
            hidden = model[:3](X[index])
            hidden.register_hook(lambda gradient, size=len(index): runs_short(size))  # noqa: B008 - of this batch
            functional.mse_loss(model[3:](hidden), Y[index]).backward()
            optimizer.step()
    assert used == [BATCH, BATCH - len(unreadable)]
    for mine, its in zip(model.parameters(), single(unreadable, 2).parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
