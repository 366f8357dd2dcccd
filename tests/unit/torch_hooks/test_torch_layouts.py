"""How gradients lie in memory does not matter, nor which leave together; what tears ranks apart is told.

The oracle is plain PyTorch with a contiguous copy of the model and no fused optimizer, on the samples of all ranks.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
from jobs_on_threads import told  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.policies import BSP, StaticAllocation  # noqa: E402
from hvd_hetero.rounds import RoundPlan  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402
from torch_hooks.wires.threads import TorchThreadWire  # noqa: E402

RANKS, ROUNDS, SAMPLES = 2, 6, 8  # of each rank
X = torch.randn(ROUNDS, RANKS, SAMPLES, 4, 6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Y = X.sum((-1, -2, -3)).unsqueeze(-1)
OPTIMIZERS = {
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=1e-2, fused=fused),
}


class Net(torch.nn.Module):
    """Convolutions, a parameter that is a transpose, and a last layer without any number."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(4, 6, 3)
        self.second = torch.nn.Conv2d(6, 5, 3)
        self.turned = torch.nn.Parameter(torch.randn(7, 20).t())
        self.third = torch.nn.Linear(7, 1)
        self.empty = torch.nn.Linear(1, 0)

    def forward(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1)
        out = self.third(hidden @ self.turned)
        return out + self.empty(out).sum()


def deep():
    layers = torch.nn.Linear(144, 1), torch.nn.Linear(1, 30), torch.nn.Linear(30, 1)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


def made(kind=Net):
    """The same model whenever it is asked for."""
    model, dice = kind().double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 4)
    return model


def step(net, optimizer, x, y):
    optimizer.zero_grad()
    functional.mse_loss(net(x), y).backward()
    optimizer.step()


def of_rank(rank, round):
    """Three quarters of its samples on rank 0, all of them on the others: weights that differ."""
    count = SAMPLES - 2 * (rank == 0)
    return X[round, rank][:count], Y[round, rank][:count]


def of_all(round):
    return tuple(torch.cat(parts) for parts in zip(*(of_rank(rank, round) for rank in range(RANKS)), strict=True))


def begun(net, inner=None, **options):
    balance = LoadBalance("bsp", global_batch=RANKS * SAMPLES)
    inner = torch.optim.SGD(net.parameters(), lr=1e-3) if inner is None else inner
    return balance, DistributedOptimizer(inner, balance, net.named_parameters(), **options)


def require_near(net, plain):
    for mine, its in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_channels_last_transposed_and_empty_parameters_train_as_plain_ones_also_with_fused_optimizers(
    name, fused, resumed
):
    before = 2 if resumed else 0  # state that exists on rank 0 alone, and has to get to the others

    def case(rank):
        net = made().to(memory_format=torch.channels_last)
        inner = OPTIMIZERS[name](net.parameters(), fused)
        for round in range(before if rank == 0 else 0):
            step(net, inner, *of_all(round))
        balance, optimizer = begun(net, inner)
        for round in range(before, ROUNDS):
            balance.batch(len(of_rank(rank, round)[0]))
            step(net, optimizer, *of_rank(rank, round))
        return net

    plain = made()
    plain.turned = torch.nn.Parameter(plain.turned.detach().contiguous())
    single = OPTIMIZERS[name](plain.parameters(), False)
    for round in range(ROUNDS):
        step(plain, single, *of_all(round))
    for net in run_on_threads(case, RANKS):
        require_near(net, plain)


class Biases(torch.nn.Module):
    """Of one sample, both have one gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(144, 4))
        self.one, self.other = torch.nn.Parameter(torch.empty(4)), torch.nn.Parameter(torch.empty(4))

    def forward(self, x):
        return torch.tanh(x.flatten(1) @ self.weight + self.one.view(1, -1) + self.other.view(1, -1))


class Parts(torch.nn.Module):
    """Of one matrix."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.empty(72, 4)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x.flatten(1) @ torch.cat([self.one, self.other]))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("policy", [BSP, lambda: StaticAllocation([1, 2])])
@pytest.mark.parametrize("kind", [Biases, Parts])
def test_gradients_that_share_memory_are_added_summed_and_clipped_as_if_they_did_not(kind, policy, passes):
    """As a backward pass leaves them; batches are of three samples, and every update is clipped."""

    def update(net, optimizer, x):
        for _ in range(passes):
            functional.mse_loss(net(x), x.flatten(1)[:, :4]).backward()
        optimizer.step()

    def clips(net):
        return lambda *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05) and None

    def case(rank):
        net, balance = made(kind), LoadBalance(policy(), global_batch=3)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), balance)
        optimizer.register_step_pre_hook(clips(net))
        for x in BalancedLoader(X[0].flatten(0, 1)[:12], balance):
            update(net, optimizer, x)
        return net

    plain = made(kind)
    single = torch.optim.SGD(plain.parameters(), lr=0.5)
    single.register_step_pre_hook(clips(plain))
    for x in X[0].flatten(0, 1)[:12].split(3):
        single.zero_grad()
        update(plain, single, x)
    for net in run_on_threads(case, RANKS):
        require_near(net, plain)


class Uneven(BSP):
    """Shares that differ, in one micro-batch each."""

    def first(self, workers, global_batch):
        return RoundPlan.of([SAMPLES - 2, SAMPLES + 2])


@pytest.mark.parametrize("policy", [BSP, Uneven, lambda: StaticAllocation([3, 5])])
def test_every_round_posts_as_many_collectives_and_the_first_the_table_besides(policy, monkeypatch):
    """Fewer than there are parameters, and the table travels with the gradients once it is known what is trained."""
    starts = TorchThreadWire.start_sum

    def case(rank):
        net, balance = made(deep), LoadBalance(policy(), global_batch=RANKS * SAMPLES)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), balance, net.named_parameters())
        posted = counts[rank] = [0]
        loader = BalancedLoader(TensorDataset(X.flatten(0, 2), Y.flatten(0, 2)), balance, stop_at=ROUNDS)
        for x, y in loader:
            step(net, optimizer, x, y)
            if balance.round_complete:
                posted.append(0)
        return posted[:ROUNDS]

    def counted(wire, *arguments):
        counts.setdefault(wire.rank, [0])[-1] += 1
        return starts(wire, *arguments)

    counts = {}
    monkeypatch.setattr(TorchThreadWire, "start_sum", counted)
    for first, *others in run_on_threads(case, RANKS):
        assert others == [first - 1] * (ROUNDS - 1)
        assert 1 <= others[0] < 6


def shift(parameter):
    parameter.grad.add_(1e-2)


def changed_by_a_hook(rank):
    """Which comes after gradients were noted, before they are summed."""
    net = made(deep)
    balance, optimizer = begun(net)
    for round in range(2):
        balance.batch(len(of_rank(rank, round)[0]))
        if round:
            net[3].weight.register_post_accumulate_grad_hook(shift)
        step(net, optimizer, *of_rank(rank, round))


def other_layouts(rank):
    begun(made().to(memory_format=torch.channels_last) if rank == 1 else made())


def other_compression(rank):
    begun(made(), compression=torch.float16 if rank == 1 else None)


@pytest.mark.parametrize(
    ("case", "message", "on_rank_1"),
    [
        (changed_by_a_hook, r"'3.weight' was changed between backward\(\) and step\(\)", ""),
        (other_layouts, "in the parameters that they train", "strides"),
        (other_compression, "in the arguments of DistributedOptimizer", "this rank has compression="),
    ],
)
def test_what_tears_ranks_apart_is_told_on_each(case, message, on_rank_1):
    said = told(case)
    assert all(re.search(message, each) for each in said)
    assert on_rank_1 in said[1]
