"""One rank of `benchmarks/reliability_throughput.py`: train, and die when it is this rank's turn."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from _reliability_job import Log, meet, telemetry, told
from torch.utils.data import TensorDataset

from hvd_hetero.testing.hosts import HOSTS, add_host
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState

FEATURES = 32
WARM_UP_ROUNDS = 20


class Plan:
    """When ranks die and come, in seconds since 1970: all ranks know, and a mark says what has happened."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.directory = job, Path(job["directory"])
        self._begins = self.directory / "begins"
        self._marked: set[str] = set()

    def begin(self) -> None:
        """Measure from now on, unless that has begun."""
        if not self._begins.exists():
            part = self._begins.with_suffix(".part")
            part.write_text(str(time.time()))
            part.rename(self._begins)

    def over(self) -> bool:
        """Return whether all is measured."""
        job, begins_at = self.job, self._begins_at()
        return begins_at is not None and time.time() > begins_at + 2 * job["calm_s"] + job["seconds"]

    def strike(self, rank: int, size: int) -> None:
        """End this process if it is its turn; let a rank join if it is time for that."""
        begins_at, job = self._begins_at(), self.job
        if begins_at is None:
            return
        since_s = time.time() - begins_at - job["calm_s"]
        # Faults come in the middle of each interval. One that finds a rank still missing waits, or is left out.
        due = min(int(since_s / job["every"] + 0.5), int(job["seconds"] // job["every"]))
        for number in range(due):
            if self._struck_s(number) > job["after_s"] and self._first("host", number):
                add_host(os.environ[HOSTS])
        chosen = random.Random(due).randrange(job["ranks"])
        if due > 0 and rank == chosen and size == job["ranks"] and self._first("fault", due - 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def _struck_s(self, number: int) -> float:
        """Return the seconds since that fault; 0 if it has not struck."""
        mark = self.directory / f"fault.{number}"
        if f"host.{number}" in self._marked or not mark.exists() or not (words := mark.read_text().split()):
            return 0.0
        return time.time() - float(words[0])

    def _begins_at(self) -> float | None:
        return float(self._begins.read_text()) if self._begins.exists() else None

    def _first(self, what: str, number: int) -> bool:
        if (name := f"{what}.{number}") in self._marked:
            return False
        self._marked.add(name)
        try:
            with open(self.directory / name, "x") as mark:
                mark.write(f"{time.time()} {os.getpid()} kill\n")
        except FileExistsError:
            return False
        return True


def main() -> None:
    told()
    job = json.loads(sys.argv[1])
    meet(job)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = max(1, job["parameters"] // (FEATURES + 2))
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, 1, bias=False)
    )
    data = TensorDataset(torch.randn(job["rounds_per_epoch"] * job["global_batch"], FEATURES))
    plan, log = Plan(job), Log(job["directory"])
    state = TorchState(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), rounds_per_commit=job["rounds_per_commit"]
    )  # fmt: skip

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        balance = LoadBalance(
            job["policy"], global_batch=job["global_batch"], telemetry=telemetry(job, state.resets)
        )  # fmt: skip
        loader = BalancedLoader(data, balance, shuffle=True, seed=1)
        optimizer = DistributedOptimizer(state.optimizer, balance, model.named_parameters())
        state.follow(balance, loader)
        if hvd.rank() == 0:
            log(membership=state.resets, begins=balance.rounds, rank=0, size=hvd.size())
            log.rounds(balance._session.balancer, membership=state.resets)
        while True:
            for (x,) in loader:
                plan.strike(hvd.rank(), hvd.size())
                time.sleep(len(x) * job["sample_s"])  # a device's work, which takes no core of this machine
                optimizer.zero_grad()
                model(x[:1]).square().mean().backward()
                optimizer.step()
            if hvd.rank() == 0 and balance.rounds >= WARM_UP_ROUNDS:
                plan.begin()
            if hvd.broadcast_object(plan.over(), root_rank=0, name="over"):
                break

    train(state)


if __name__ == "__main__":
    main()
