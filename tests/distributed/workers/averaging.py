"""Synchronisers that average parameters, on one rank: each against an oracle that holds all ranks' models.

The oracle shares no code with the project: rank 0 gathers the samples of every micro-batch that the ranks really saw,
and repeats each rank's steps, and the averaging between them, with plain PyTorch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ranks import DEVICE, hvd
from simulated import SimulatedClock
from torch.nn import functional
from torch_common import flat

from hvd_hetero.policies import ElasticBSP, NonBlocking, Policy, StaticAllocation
from hvd_hetero.session import balancer_of
from hvd_hetero.topology import matcha, ring
from hvd_hetero.topology.mixing import MatchaMixing, Mixing
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

ROUNDS = 20
GLOBAL_BATCH = 24
SAMPLES = 24 * 6 + 3
RATE = 0.05
# Times the rank and a fifth: of a sample; and of a micro-batch where rounds end early, which noise would end alike.
PAUSE_S, LONGER_S = 1e-3, 5e-3

GENERATOR = torch.Generator(torch.get_default_device()).manual_seed(3)
X = torch.randn(SAMPLES, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))

Rounds = list[list[list[int]]]  # per round, per micro-batch: the samples
Models = list[torch.nn.Module]
Steps = list[torch.optim.Optimizer]


class Indexed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return i


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, index: Any) -> torch.Tensor:
    return functional.mse_loss(model(X[index]), Y[index])


def passes(seconds: float) -> None:
    """Let real time pass, for signals are real, and that of a clock that moves with nothing else."""
    time.sleep(seconds)
    if isinstance(time.perf_counter, SimulatedClock):
        time.perf_counter.pass_s(seconds)


def train(policy: Policy, sync: str | Mixing, make: Callable) -> tuple[torch.nn.Module, Rounds, Any]:
    model = network()
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, sync=sync)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=1, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(make(model), balance, model.named_parameters())
    seen: Rounds = [[] for _ in range(ROUNDS)]
    while balance.rounds < ROUNDS:
        for index in loader:
            seen[balance.rounds].append(index.tolist())
            ends_early = balancer_of(balance).work.plan.ends == "first"
            passes((LONGER_S if ends_early else PAUSE_S * len(index)) * (0.2 + hvd.rank()))
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
    mixing = balance._session.mixing
    balance.close()
    return model, seen, mixing


def mix(models: Models, weights: np.ndarray) -> None:
    """x_i <- sum_j W_ij x_j."""
    with torch.no_grad():
        for tensors in zip(*(m.parameters() for m in models), strict=True):
            mixed = torch.einsum("ij,j...->i...", torch.from_numpy(weights).to(DEVICE), torch.stack(tensors))
            for tensor, new in zip(tensors, mixed, strict=True):
                tensor.copy_(new)


def gradient(model: torch.nn.Module, micro_batches: list[list[int]], factor: float) -> None:
    """The sum over the samples, times the factor."""
    model.zero_grad(set_to_none=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for index in micro_batches:
        (loss_of(model, index) * len(index) * factor).backward()


def with_neighbours(models: Models, steps: Steps, parts: list[Rounds], mixing: Any) -> None:
    n = len(models)
    for r in range(ROUNDS):
        total = sum(len(i) for part in parts for i in part[r])
        for rank, model in enumerate(models):
            gradient(model, parts[rank][r], n / total)
        mix(models, np.array([[mixing.row(i, r).get(j, 0.0) for j in range(n)] for i in range(n)]))
        for step in steps:
            step.step()


def with_local_updates(models: Models, steps: Steps, parts: list[Rounds], mixing: Any) -> None:
    for r in range(ROUNDS):
        done = np.array([sum(map(len, part[r])) for part in parts], dtype=float)
        for rank, (model, step) in enumerate(zip(models, steps, strict=True)):
            for index in parts[rank][r]:
                step.zero_grad()
                loss_of(model, index).backward()
                step.step()
        weights = np.tile(done / done.sum(), (len(models), 1))
        mix(models, weights)
        states = [[step.state[p] for p in model.parameters()] for model, step in zip(models, steps, strict=True)]
        for of_parameter in zip(*states, strict=True):
            for key in of_parameter[0]:
                mean = sum(w * state[key] for w, state in zip(weights[0], of_parameter, strict=True))
                for state in of_parameter:
                    state[key] = mean.clone().to(state[key].dtype)


def with_the_papers_rate(models: Models, steps: Steps, parts: list[Rounds], mixing: Any) -> None:
    """g = (1 / X) sum_i (S_i / x_i) G_i, every round planned for the global batch but those at the end of an epoch."""
    each = GLOBAL_BATCH // len(models)
    left = SAMPLES
    for r in range(ROUNDS):
        planned = min(GLOBAL_BATCH, left)
        whole = planned == GLOBAL_BATCH
        for rank, model in enumerate(models):
            done = sum(map(len, parts[rank][r]))
            assigned = each if whole else done
            gradient(model, parts[rank][r], done / max(assigned, 1) / planned)
        for tensors in zip(*(m.parameters() for m in models), strict=True):
            total = sum(p.grad for p in tensors)
            for p in tensors:
                p.grad = total.clone()
        for step in steps:
            step.step()
        left -= sum(len(i) for part in parts for i in part[r])
        left = left or SAMPLES


def strangers(mixing: Any, n: int) -> list[tuple[int, int]]:
    """Pairs of ranks that never take anything from each other, whatever links a round has."""
    met = {(i, j) for r in range(ROUNDS) for i in range(n) for j in mixing.row(i, r)}
    return [(i, j) for i in range(n) for j in range(i) if not {(i, j), (j, i)} & met]


def case(policy: Callable[[], Policy], sync: Any, make: Callable, oracle: Callable) -> dict | None:
    n = hvd.size()
    model, seen, mixing = train(policy(), sync, make)
    parts = hvd.allgather_object(seen, name="seen")
    everywhere = hvd.allgather(flat(model)[None].contiguous(), name="parameters")
    if hvd.rank() != 0:
        return None
    models = [copy.deepcopy(network()) for _ in range(n)]
    oracle(models, [make(m) for m in models], parts, mixing)
    expected = torch.stack([flat(m) for m in models])
    visited = [[i for part in parts for m in part[r] for i in m] for r in range(ROUNDS)]
    return {
        "samples": SAMPLES,
        "difference": float((everywhere - expected).abs().max() / expected.abs().max()),
        "first_mix": [] if mixing is None else [[mixing.row(i, 0).get(j, 0.0) for j in range(n)] for i in range(n)],
        "strangers": [] if mixing is None else strangers(mixing, n),
        "between_ranks": float((everywhere - everywhere[0]).abs().max()),
        "done": [[sum(map(len, part[r])) for part in parts] for r in range(ROUNDS)],
        "visited": visited,
        "epochs": [int(before) // SAMPLES for before in np.cumsum([0, *map(len, visited[:-1])])],
    }


def half() -> MatchaMixing:
    return MatchaMixing(matcha(ring(hvd.size()), budget=0.6), seed=3)


CASES: dict[str, Callable[[], Any]] = {
    "static, d-psgd": lambda: case(
        lambda: StaticAllocation([1, 3, 2, 1][: hvd.size()]), "d-psgd", sgd, with_neighbours
    ),
    "non-blocking, matcha": lambda: case(lambda: NonBlocking(4), half(), sgd, with_neighbours),
    "elastic-bsp, local, momentum": lambda: case(
        lambda: ElasticBSP(4, updates="local"), "allreduce", sgd, with_local_updates
    ),
    "elastic-bsp, local, adam": lambda: case(
        lambda: ElasticBSP(4, updates="local"), "allreduce", adam, with_local_updates
    ),
    "non-blocking, n/N": lambda: case(lambda: NonBlocking(5, scaling="n/N"), "allreduce", sgd, with_the_papers_rate),
}
