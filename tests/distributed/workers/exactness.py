"""One rank of the exactness test: trains under several policies and compares with a plain single-process run.

Every sample is its own index, so what was visited is written down from the batches themselves. The oracle shares no
code with the project: rank 0 gathers the indices that the ranks really saw and repeats the training on their union,
round by round, with plain PyTorch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import horovod.torch as hvd
import numpy as np
import torch
from simulated import SimulatedClock
from torch.nn import functional

from hvd_hetero.communication import buckets as division
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive, StaticAllocation
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.gradients import buckets

# Sizes at which a small model takes every way of a large one: weights go alone and are weighed as they arrive.
buckets._AT_ONCE, division.ALONE, division.MEMBERS = 100, 200, 2
ROUNDS = 100
CLIP = 0.5
PAUSE_S = 5e-3  # a micro-batch, times the rank: real time, for the signals are real that end non-blocking rounds early
GLOBAL_BATCH = 12
SAMPLES = 12 * 8 + 2  # nine rounds an epoch; the last one has two samples, so with three ranks one has none
FEATURES = 6


class EveryRoundAnother(Policy):
    """Splits that change every round, several micro-batches, and now and then a rank without data."""

    name = "every-round-another"

    def __init__(self) -> None:
        self.round = 0

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        return self._plan(workers, global_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.round += 1
        return self._plan(plan.workers, plan.total)

    def _plan(self, workers: int, total: int) -> RoundPlan:
        rng = np.random.default_rng(self.round)
        cuts = np.sort(rng.integers(0, total + 1, workers - 1))
        samples = np.diff(cuts, prepend=0, append=total)
        return RoundPlan(
            tuple(int(x) for x in samples), tuple(int(rng.integers(1, min(x, 4) + 1)) if x else 0 for x in samples)
        )


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


ZERO_GRAD_FIRST = "zero_grad first"
OTHER_ORDERS = ("zero_grad last", "zero_grad of the model last", "zero_grad in the middle, in place", "no zero_grad")
OPTIMIZERS: dict[str, Callable] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@dataclass
class Outcome:
    net: Net
    seen: list[list[int]]
    """this rank's samples, per round"""
    epochs: list[int]
    """of each round"""
    planned: list[tuple[int, ...]]
    """of each round: every rank's samples"""
    idle: int
    sizes: list[int]


def samples(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x.sum(1, keepdim=True)).to(dtype)


def clip(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)


def train(
    policy: Policy, optimizer_name: str, dtype: torch.dtype, clock: SimulatedClock, order: str = ZERO_GRAD_FIRST
) -> Outcome:
    torch.manual_seed(100 + hvd.rank())  # ranks start apart: the broadcast has something to do
    net = Net().to(dtype)
    x, y = samples(dtype)
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=5, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(OPTIMIZERS[optimizer_name](net.parameters()), balance, net.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: clip(list(net.parameters())))
    seen: list[list[int]] = [[] for _ in range(ROUNDS)]
    sizes = []
    epochs: list[int] = []
    planned: list[tuple[int, ...]] = []

    def observe(finished: FinishedRound) -> None:
        epochs.append(finished.epoch)
        planned.append(finished.plan.samples)

    balance.session.balancer.observer = observe
    while balance.rounds < ROUNDS:
        for index in loader:
            seen[balance.rounds] += index.tolist()
            sizes.append(len(index))
            clock.pass_s(1e-3 * len(index) * (1 + 2 * hvd.rank()))
            time.sleep(PAUSE_S * hvd.rank() * (policy.name == "non-blocking"))
            body(net, optimizer, order, x[index], y[index])
    balance.close()
    return Outcome(net, seen, epochs, planned, sum(not s for s in seen), sizes)


def body(net: Net, optimizer: DistributedOptimizer, order: str, x: torch.Tensor, y: torch.Tensor) -> None:
    if order == ZERO_GRAD_FIRST:
        optimizer.zero_grad()
    loss = functional.mse_loss(net(x), y)
    if order == "zero_grad in the middle, in place":
        optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    if order == "zero_grad last":
        optimizer.zero_grad()
    elif order == "zero_grad of the model last":
        net.zero_grad()


def reference(rounds: list[list[int]], optimizer_name: str, dtype: torch.dtype) -> Net:
    torch.manual_seed(100)
    net = Net().to(dtype)
    x, y = samples(dtype)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    net.unused.grad = torch.zeros_like(net.unused)  # ranks agree on zero where Horovod synchronises it
    for index in rounds:
        optimizer.zero_grad(set_to_none=False)
        functional.mse_loss(net(x[index]), y[index]).backward()
        clip(list(net.parameters()))
        optimizer.step()
    return net


def difference(a: Net, b: Net) -> float:
    """The largest, relative to the largest parameter: a tensor that happens to be near zero has no digits to lose."""
    p, q = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (a, b))
    return float((p - q).abs().max() / q.abs().max())


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    n = hvd.size()
    clock = SimulatedClock()
    policies = {
        "bsp": BSP,
        "bsp in micro-batches": lambda: BSP(max_micro_batch=2),
        "lb-bsp": LBBSP,
        "static": lambda: StaticAllocation([3, 1, 2, 1][:n]),
        "static, one rank without data": lambda: StaticAllocation([0, 3, 1, 1][:n]),
        "every round another": EveryRoundAnother,
        "self-adaptive": lambda: SelfAdaptive(total=3 * n),
        "non-blocking": lambda: NonBlocking(GLOBAL_BATCH // n),
        "elastic-bsp": lambda: ElasticBSP(lookahead=4),
    }
    usual = torch.float64, ZERO_GRAD_FIRST
    cases = [(p, "momentum", *usual) for p in policies]
    cases += [("every round another", "adam", *usual)]
    float32 = ("bsp", "static", "every round another", "non-blocking")
    cases += [(p, "momentum", torch.float32, ZERO_GRAD_FIRST) for p in float32]
    orders = [("bsp", order) for order in OTHER_ORDERS]
    orders += [("every round another", order) for order in OTHER_ORDERS if "model" not in order]  # in rounds of several
    orders += [(policy, "zero_grad last") for policy in ("lb-bsp", "bsp in micro-batches", "elastic-bsp")]
    cases += [(policy, "momentum", torch.float64, order) for policy, order in orders]
    if n == 4:  # twice the cores that a small machine has: the policies whose rounds differ most
        cases = [case for case in cases if case[0] in ("lb-bsp", "non-blocking", "elastic-bsp", "every round another")]
        cases = [case for case in cases if case[1:] == ("momentum", *usual)]
    results = []
    for policy, optimizer_name, dtype, order in cases:
        outcome = train(policies[policy](), optimizer_name, dtype, clock, order)
        parts = hvd.allgather_object(outcome.seen)
        rounds = [[i for part in parts for i in part[r]] for r in range(ROUNDS)]
        flat = torch.cat([p.detach().flatten() for p in outcome.net.parameters()])
        everywhere = hvd.allgather(flat[None].contiguous(), name="parameters")
        results.append(
            {
                "policy": policy,
                "optimizer": optimizer_name,
                "dtype": str(dtype),
                "order": order,
                "difference": difference(outcome.net, reference(rounds, optimizer_name, dtype)),
                "between_ranks": float((everywhere - everywhere[0]).abs().max()),
                "rounds": [sorted(r) for r in rounds],
                "epochs": outcome.epochs,
                "planned": outcome.planned,
                "shares": [[len(part[r]) for part in parts] for r in range(ROUNDS)],
                "idle": hvd.allgather_object(outcome.idle),
                "sizes": hvd.allgather_object(sorted(set(outcome.sizes))),
            }
        )
    if hvd.rank() == 0:
        report({"rounds_per_epoch": math.ceil(SAMPLES / GLOBAL_BATCH), "samples": SAMPLES, "cases": results})


if __name__ == "__main__":
    main()
