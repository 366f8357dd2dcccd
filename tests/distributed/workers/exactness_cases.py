"""Trainings under every policy, beside what one process makes of the same samples: for ranks of any kind.

Every sample is its own index, so what was visited is written down from the batches themselves. The oracle shares no
code with the project: it repeats the training on the union of the indices that the ranks really saw, round by round,
with plain PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hvd_hetero.policies import (
    BSP,
    LBBSP,
    ElasticBSP,
    LBNonBlocking,
    NonBlocking,
    Policy,
    SelfAdaptive,
    StaticAllocation,
)
from hvd_hetero.rounds import FinishedRound
from hvd_hetero.session import balancer_of
from tests.distributed.workers.every_round import EveryRoundAnother  # from wherever this is imported
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

CLIP = 0.5
GLOBAL_BATCH = 12
SAMPLES = 12 * 8 + 2  # two more than eight rounds: a ninth on two ranks, and in the eighth on three, which need three
FEATURES = 6


class Indexed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return i


class Net(torch.nn.Module):
    """Dense layers around a convolution, one parameter that no loss reaches, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(FEATURES, 8)
        self.convolution = torch.nn.Conv1d(1, 2, 3)
        self.outer = torch.nn.Linear(12, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.full((8,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x) + self.frozen)
        return self.outer(torch.tanh(self.convolution(hidden[:, None])).flatten(1))


@dataclass
class Outcome:
    """What one rank did."""

    parameters: torch.Tensor
    seen: list[list[int]]
    """its samples, per round"""
    epochs: list[int]
    """of each round"""
    planned: list[tuple[int, ...]]
    """of each round: every rank's samples"""
    sizes: list[int]


def policies(ranks: int) -> dict[str, Callable[[], Policy]]:
    return {
        "bsp": BSP,
        "bsp in micro-batches": lambda: BSP(max_micro_batch=2),
        "lb-bsp": LBBSP,
        "static": lambda: StaticAllocation([3, 1, 2, 1][:ranks]),
        "static, one rank without data": lambda: StaticAllocation([0, 3, 1, 1][:ranks]),
        "every round another": lambda: EveryRoundAnother(4),
        "self-adaptive": lambda: SelfAdaptive(total=3 * ranks),
        "non-blocking": lambda: NonBlocking(GLOBAL_BATCH // ranks),
        "lb-non-blocking": lambda: LBNonBlocking(micro_batches=2),
        "lb-non-blocking, with trials": LBNonBlocking,
        "elastic-bsp": lambda: ElasticBSP(lookahead=4),
    }


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def clip(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)


def train(policy: str, rank: int, ranks: int, rounds: int, pass_s: Callable[[float], None], pause_s: float) -> Outcome:
    """Train on this rank. ``pass_s`` moves its clock; ``pause_s`` is real time, for signals are real.

    The pause is a micro-batch's, times the rank, and lets non-blocking rounds end early.
    """
    torch.manual_seed(100 + rank)  # ranks start apart: the broadcast has something to do
    net = Net().double()
    x, y = samples()
    balance = LoadBalance(policies(ranks)[policy](), global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=5, stop_at=rounds)
    optimizer = DistributedOptimizer(sgd(net), balance, net.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: clip(list(net.parameters())))
    seen: list[list[int]] = [[] for _ in range(rounds)]
    sizes = set()
    epochs: list[int] = []
    planned: list[tuple[int, ...]] = []

    def observe(finished: FinishedRound) -> None:
        epochs.append(finished.epoch)
        planned.append(finished.plan.samples)

    balancer_of(balance).observer = observe
    while balance.rounds < rounds:
        for index in loader:
            seen[balance.rounds] += index.tolist()
            sizes.add(len(index))
            pass_s(1e-3 * len(index) * (1 + 2 * rank))
            if balance.policy.name.endswith("non-blocking"):
                time.sleep(pause_s * rank)
            optimizer.zero_grad()
            functional.mse_loss(net(x[index]), y[index]).backward()
            optimizer.step()
    balance.close()
    return Outcome(flat(net), seen, epochs, planned, sorted(sizes))


def reference(rounds: list[list[int]]) -> torch.Tensor:
    """The parameters of one process that does all samples of each round at once."""
    torch.manual_seed(100)
    net = Net().double()
    x, y = samples()
    optimizer = sgd(net)
    net.unused.grad = torch.zeros_like(net.unused)  # ranks agree on zero where gradients are summed
    for index in rounds:
        optimizer.zero_grad(set_to_none=False)
        functional.mse_loss(net(x[index]), y[index]).backward()
        clip(list(net.parameters()))
        optimizer.step()
    return flat(net)


def flat(net: Net) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def compared(outcomes: list[Outcome]) -> dict[str, Any]:
    """What all ranks did, in order of rank, beside the single process."""
    together = list(zip(*(outcome.seen for outcome in outcomes), strict=True))
    rounds = [[i for part in parts for i in part] for parts in together]
    first, expected = outcomes[0], reference(rounds)
    return {
        # Relative to the largest parameter: a tensor that happens to be near zero has no digits to lose.
        "difference": float((first.parameters - expected).abs().max() / expected.abs().max()),
        "between_ranks": max(float((o.parameters - first.parameters).abs().max()) for o in outcomes),
        "rounds": [sorted(r) for r in rounds],
        "epochs": first.epochs,
        "planned": first.planned,
        "shares": [list(map(len, parts)) for parts in together],
        "idle": [sum(not of_round for of_round in outcome.seen) for outcome in outcomes],
        "sizes": [outcome.sizes for outcome in outcomes],
    }
