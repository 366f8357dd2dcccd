"""One rank of the resume test: a job that saves after every round, and a job that goes on from each of its states.

The clock is the test's own, and moves with the samples computed and with nothing else: so plans that follow measured
speeds are the same in every run, and parameters can be compared bit by bit. For the same reason the processor and the
memory that are read as free, on which forecasts build, are always the same, and signals of rounds that end early come
from a script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pool import serve
from ranks import hvd
from simulated import SimulatedClock
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import hvd_hetero.measurement.speed_meter
import hvd_hetero.session
from hvd_hetero.measurement.readings import Resources
from hvd_hetero.policies import LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive
from hvd_hetero.session import balancer_of
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

ROUNDS = 10
GLOBAL_BATCH = 12
SAMPLES = 12 * 3 + 5
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 5, generator=GENERATOR)
Y = X.sum(1, keepdim=True)
# A new process would not trust its first rounds again, and its plans would follow later than those of the other job.
hvd_hetero.measurement.speed_meter._WARM_UP_ROUNDS = 0


class SteadyMachine:
    """Takes the place of the meter of free processor and memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        pass

    def read(self) -> Resources:
        return Resources(cpu=0.9 - 0.3 * hvd.rank(), memory=0.5)


hvd_hetero.session.ResourceMeter = SteadyMachine


class Script:
    """Rank 1 is told after one or two of its micro-batches that the round is over."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}

    def raise_signal(self, round: int) -> None:
        pass

    def raised(self, round: int) -> bool:
        self._asked[round] = self._asked.get(round, 0) + 1
        return hvd.rank() == 1 and self._asked[round] > round % 2


class Samples(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return X[i], Y[i], i


class Stream(IterableDataset):
    """All samples in an order of each epoch's own, or each rank's part of them."""

    def __init__(self, step: int = 1, first: int = 0) -> None:
        self._step, self._first, self._epoch = step, first, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        return ((X[i], Y[i], i) for i in order[self._first :: self._step])


DATA: dict[str, Callable[[LoadBalance], BalancedLoader]] = {
    "0 workers": lambda balance: BalancedLoader(Samples(), balance, shuffle=True, seed=4),
    "2 workers": lambda balance: BalancedLoader(Samples(), balance, shuffle=True, seed=4, num_workers=2),
    # Where what is left at the end of a pass makes a round only together with samples that are still to come back.
    "whole rounds": lambda balance: BalancedLoader(
        Samples(), balance, shuffle=True, seed=4, num_workers=1, drop_last=True
    ),
    "whole stream": lambda balance: BalancedLoader(Stream(), balance, stream="whole"),
    "shards": lambda balance: BalancedLoader(
        Stream(hvd.size(), hvd.rank()), balance, stream="shard", rounds_per_epoch=4
    ),
}
STOPS = {"0 workers": range(1, ROUNDS)}
LATE = 3, 6, 9  # else fewer, and late: each stop, and each epoch that follows one, forks workers again
POLICIES: dict[str, Callable[[], Policy]] = {
    "lb-bsp": lambda: LBBSP("narx"),
    "self-adaptive": lambda: SelfAdaptive(total=6, every=2),
    "non-blocking": lambda: NonBlocking(3),
    "elastic-bsp": lambda: ElasticBSP(lookahead=3),
}


class Job:
    def __init__(self, policy: str, data: str, clock: SimulatedClock) -> None:
        torch.manual_seed(0)
        self.clock = clock
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        self.balance = LoadBalance(POLICIES[policy](), global_batch=GLOBAL_BATCH)
        if balancer_of(self.balance).signals is not None:
            balancer_of(self.balance).signals = Script()
        self.loader = DATA[data](self.balance)
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.05), self.balance, self.model.named_parameters()
        )
        self.plans: list[tuple[int, ...]] = []
        self.visits: list[list[int]] = []
        self.epochs: list[int] = []
        self._mine: list[int] = []
        balancer_of(self.balance).observer = self._note

    def _note(self, finished: Any) -> None:
        self.plans.append(finished.plan.samples)
        self.epochs.append(finished.epoch)
        self.visits.append(self._mine)
        self._mine = []

    def run(self, until: int) -> None:
        self.loader.stop_at = until
        while self.balance.rounds < until:
            for x, y, index in self.loader:
                self._mine += index.tolist()
                self.clock.pass_s(1e-3 * len(x) * (1 + 2 * hvd.rank()))
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "balance": self.balance.state_dict(), "loader": self.loader.state_dict(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.balance.load_state_dict(state["balance"])
        self.loader.load_state_dict(state["loader"])

    def outcome(self) -> dict[str, Any]:
        visits = hvd.allgather_object(self.visits)
        end = torch.cat([p.detach().flatten() for p in self.model.parameters()]).double()
        return {
            "plans": self.plans, "epochs": self.epochs, "end": end.tolist(),
            "visits": [sorted(i for part in visits for i in part[r]) for r in range(len(self.visits))],
        }  # fmt: skip


def saves(policy: str, data: str) -> dict[str, Any]:
    """A job of all rounds, and one that saves its state on the way."""
    whole = Job(policy, data, CLOCK)
    whole.run(ROUNDS)
    job = Job(policy, data, CLOCK)
    for stop in STOPS.get(data, LATE):
        job.run(stop)
        state = job.state()
        if hvd.rank() == 0:
            torch.save(state, DIRECTORY / f"{policy}, {data}, {stop}.pt")
    job.run(ROUNDS)
    return {"whole": whole.outcome(), "stopping": job.outcome()}


def resumes(policy: str, data: str) -> dict[str, Any]:
    """Jobs that go on from each of those states."""
    outcome = {}
    for stop in STOPS.get(data, LATE):
        job = Job(policy, data, CLOCK)
        job.load(torch.load(DIRECTORY / f"{policy}, {data}, {stop}.pt"))
        job.run(ROUNDS)
        outcome[str(stop)] = job.outcome()
    return outcome


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, DIRECTORY = sys.argv[1], Path(sys.argv[2])
    CLOCK = SimulatedClock()
    do = {"save": saves, "resume": resumes}[mode]
    serve(hvd, {f"{policy}, {data}": partial(do, policy, data) for policy in POLICIES for data in DATA})
