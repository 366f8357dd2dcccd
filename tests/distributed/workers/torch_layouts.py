"""One rank of the layout test: gradients as they lie in memory, in bundles of every kind, and hooks of the user's.

The oracle is plain PyTorch with a contiguous copy of the model and no fused optimizer, on the samples of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import hvd
from torch.nn import functional

from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import BSP, Policy, StaticAllocation
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.gradients import bundles

# Sizes in bytes at which a small model takes every way that a large one takes.
bundles._ALONE, bundles._MOST = 1000, 500
ROUNDS, SAMPLES = 6, 8  # of each rank
GENERATOR = torch.Generator().manual_seed(5)
RANKS = 2
X = torch.randn(ROUNDS, RANKS, SAMPLES, 4, 6, 6, generator=GENERATOR, dtype=torch.float64)
Y = X.sum((-1, -2, -3)).unsqueeze(-1)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=1e-2, fused=fused),
}


class Net(torch.nn.Module):
    """Convolutions, a parameter that is a transpose, and a last layer without any number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 6, 3)
        self.second = torch.nn.Conv2d(6, 5, 3)
        self.turned = torch.nn.Parameter(torch.randn(7, 20).t())
        self.third = torch.nn.Linear(7, 1)
        self.empty = torch.nn.Linear(1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1)
        out = self.third(hidden @ self.turned)
        return out + self.empty(out).sum()


def made(kind: Callable[[], torch.nn.Module] = Net) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind().double()


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    functional.mse_loss(net(x), y).backward()
    optimizer.step()


def mine(round: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three quarters of its samples on rank 0, all of them on the others: weights that differ."""
    count = SAMPLES - 2 * (hvd.rank() == 0)
    return X[round, hvd.rank()][:count], Y[round, hvd.rank()][:count]


def everybodys(round: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.cat([X[round, 0][: SAMPLES - 2], X[round, 1]]),
        torch.cat([Y[round, 0][: SAMPLES - 2], Y[round, 1]]),
    )


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    return max(
        float((p - q).detach().abs().max())
        for p, q in zip(one.parameters(), other.parameters(), strict=True)
        if p.numel()
    )


def training(name: str, *, fused: bool, resumed: bool) -> float:
    """How far off a model that lies in memory its own way is from a plain one."""
    net, plain = made(), made()
    net = net.to(memory_format=torch.channels_last)
    with torch.no_grad():
        plain.turned = torch.nn.Parameter(plain.turned.contiguous())
    single = OPTIMIZERS[name](plain.parameters(), False)
    inner = OPTIMIZERS[name](net.parameters(), fused)
    before = 2 if resumed else 0
    for round in range(before):  # state that exists on rank 0 alone, and has to get to the others
        step(plain, single, *everybodys(round))
        if hvd.rank() == 0:
            step(net, inner, *everybodys(round))
    balance = LoadBalance("bsp", global_batch=SAMPLES * hvd.size())
    optimizer = DistributedOptimizer(inner, balance, net.named_parameters())
    for round in range(before, ROUNDS):
        step(plain, single, *everybodys(round))
        balance.batch(len(mine(round)[0]))
        step(net, optimizer, *mine(round))
    return difference(net, plain)


def refused(provoke: Callable[[], object]) -> str:
    try:
        provoke()
    except HeteroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def deep() -> torch.nn.Module:
    """Its first weight leaves alone."""
    layers = (torch.nn.Linear(144, 1), torch.nn.Linear(1, 30), torch.nn.Linear(30, 1))
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


def a_hook_that_comes_late() -> str:
    """It changes gradients after they were noted, before they are summed."""

    def shift(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1e-2)

    net, balance = made(deep), LoadBalance("bsp", global_batch=2 * SAMPLES)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), balance, net.named_parameters())
    for round in range(3):
        balance.batch(len(mine(round)[0]))
        if round == 1:
            net[3].weight.register_post_accumulate_grad_hook(shift)
            said = refused(lambda r=round: step(net, optimizer, *mine(r)))
            break
        step(net, optimizer, *mine(round))
    return said


def kept(parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], round: int) -> None:
    """And written into between rounds, which no later round reads."""
    for gradient in gradients:
        gradient.fill_(float(round))


def put_back(parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], round: int) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.zero_()


def put_crosswise(parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], round: int) -> None:
    """Each to the next parameter of as many numbers: within a bundle and across two, as they are and as views."""
    for parameter in parameters:
        alike = [number for number, other in enumerate(parameters) if other.numel() == parameter.numel()]
        following = alike[(alike.index(next(n for n in alike if parameters[n] is parameter)) + 1) % len(alike)]
        parameter.grad = gradients[following].zero_().view(parameter.shape)


def gradients_that_are_kept(use: Callable[[list[torch.nn.Parameter], list[torch.Tensor], int], None]) -> float:
    """How far off a model is that is trained while ``use`` does something with the gradients of an earlier round."""
    net, oracle, balance = made(deep), made(deep), LoadBalance("bsp", global_batch=2 * SAMPLES)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-2), balance, net.named_parameters())
    plain = torch.optim.SGD(oracle.parameters(), lr=1e-2)
    parameters, gradients = list(net.parameters()), []
    for round in range(ROUNDS):
        x, y = mine(round)
        balance.batch(len(x))
        if gradients:
            use(parameters, gradients, round)
        functional.mse_loss(net(x), y).backward()
        optimizer.step()
        step(oracle, plain, *everybodys(round))
        gradients = [p.grad for p in parameters if p.grad is not None]
    return difference(net, oracle)


def parts_that_freeze_and_thaw() -> float:
    """What travels together changes from round to round."""

    def deep() -> torch.nn.Module:
        layers = [torch.nn.Linear(144, 6)]
        for width in (6, 6, 1):
            layers += [torch.nn.Tanh(), torch.nn.Linear(6, width)]
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)

    net, oracle, balance = made(deep), made(deep), LoadBalance("bsp", global_batch=2 * SAMPLES)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-2), balance, net.named_parameters())
    plain = torch.optim.SGD(oracle.parameters(), lr=1e-2)
    for round in range(ROUNDS):
        for model in (net, oracle):
            model[1].requires_grad_(round not in (2, 3))
            model[-1].weight.requires_grad_(round < 4)
        balance.batch(len(mine(round)[0]))
        step(net, optimizer, *mine(round))
        step(oracle, plain, *everybodys(round))
    optimizer.close()
    return difference(net, oracle)


class Uneven(BSP):
    """Shares that differ, in one micro-batch each."""

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        return RoundPlan.of([SAMPLES - 2, SAMPLES + 2])


def collectives(policy: Policy) -> list[int]:
    """How many are posted in each round."""
    posts = 0
    net, balance = made(deep), LoadBalance(policy, global_batch=2 * SAMPLES)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), balance, net.named_parameters())
    loader = BalancedLoader(torch.utils.data.TensorDataset(X.flatten(0, 2), Y.flatten(0, 2)), balance, stop_at=ROUNDS)
    allreduce = hvd.allreduce_async_

    def counted(*arguments: Any, **options: Any) -> int:
        nonlocal posts
        posts += 1
        return allreduce(*arguments, **options)

    hvd.allreduce_async_ = counted
    posted: list[int] = []
    for x, y in loader:
        step(net, optimizer, x, y)
        if balance.round_complete:
            posted.append(posts - sum(posted))
    hvd.allreduce_async_ = allreduce
    optimizer.close()
    return posted


def layouts_that_differ() -> str:
    net, balance = made(), LoadBalance("bsp", global_batch=2 * SAMPLES)
    if hvd.rank() == 1:
        net = net.to(memory_format=torch.channels_last)
    inner = torch.optim.SGD(net.parameters(), lr=1e-3)
    return refused(lambda: DistributedOptimizer(inner, balance, net.named_parameters()))


def compression_that_differs() -> str:
    net, balance = made(), LoadBalance("bsp", global_batch=2 * SAMPLES)
    inner = torch.optim.SGD(net.parameters(), lr=1e-3)
    fp16 = hvd.Compression.fp16 if hvd.rank() == 1 else hvd.Compression.none
    return refused(lambda: DistributedOptimizer(inner, balance, net.named_parameters(), compression=fp16))


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    assert hvd.size() == RANKS, "the data is for as many ranks"
    cases = {
        f"{name}, {'fused' if fused else 'not fused'}, {'resumed' if resumed else 'new'}": training(
            name, fused=fused, resumed=resumed
        )
        for name in OPTIMIZERS
        for fused in (False, True)
        for resumed in (False, True)
    }
    report(
        {
            "off": cases,
            "differ": layouts_that_differ(),
            "compression": compression_that_differs(),
            "late": a_hook_that_comes_late(),
            "kept": {use.__name__: gradients_that_are_kept(use) for use in (kept, put_back, put_crosswise)},
            "thawed": parts_that_freeze_and_thaw(),
            "collectives": {
                "even": collectives(BSP()),
                "uneven": collectives(Uneven()),
                "in micro-batches": collectives(StaticAllocation([3, 5])),
            },
        }
    )


if __name__ == "__main__":
    main()
