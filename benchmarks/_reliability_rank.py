"""What each rank of `benchmarks/reliability.py` does: train elastically, have faults happen, write down what it saw.

Time is the script's own: computing a sample takes as long as the host is said to need, waiting and moving data nothing,
and what really passes (milliseconds) is nothing beside it. So plans are of the faults and not of the machine's load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import Dataset, IterableDataset

from hvd_hetero import testing
from hvd_hetero.policies import LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive, StaticAllocation, resolve_policy
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState

SEED = 5
RATE, MOMENTUM = 0.05, 0.9  # unless the job says otherwise
REAL_S = 2e-3  # that a micro-batch takes: no job is over before it hears of a new host


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, x @ torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] + 0.1 * torch.randn(
        samples, 1, generator=generator, dtype=torch.float64
    )


def network() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Linear(6, 1).double()


def policy_of(name: str) -> Policy:
    """By the names that the tables have. Two of them depend on the number of ranks, so they are made anew each time."""
    made: dict[str, Any] = {
        "static": lambda: StaticAllocation([2, *[1] * (hvd.size() - 1)]),
        "self-adaptive": lambda: SelfAdaptive(total=12, every=4),
        "non-blocking": lambda: NonBlocking(3),
        "elastic-bsp": lambda: ElasticBSP(lookahead=3),
        "elastic-bsp, local": lambda: ElasticBSP(lookahead=3, updates="local"),
        "lb-bsp, ema": lambda: LBBSP("ema"),
        "lb-bsp, narx": lambda: LBBSP("narx"),
    }
    return made[name]() if name in made else resolve_policy(name)


class Samples(Dataset):
    def __init__(self, samples: int) -> None:
        self._x, self._y = data(samples)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._x[i], self._y[i], i


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self._samples = Samples(samples)

    def __iter__(self):
        return (self._samples[i] for i in range(len(self._samples)))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Log:
    """One line per event, written at once: a killed rank leaves what it had."""

    def __init__(self, directory: str) -> None:
        self._file = open(Path(directory) / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def meet(directory: Path) -> None:
    """Wait for the others of the start without Horovod, whose patience is the time in which it notices a death."""
    (directory / f"here.{os.environ['HOROVOD_HOSTNAME']}").touch()
    while len(list(directory.glob("here.*"))) < int(os.environ["HOROVOD_SIZE"]):
        time.sleep(0.02)


def main() -> None:
    job = json.loads(sys.argv[1])
    meet(Path(job["directory"]))
    hvd.init()
    torch.set_num_threads(1)
    clock, log = Clock(), Log(job["directory"])
    faults = testing.Faults(job["directory"], clock=clock, sleep=lambda s: clock.pass_s(s * job.get("slept_s", 1.0)))
    for kind, options in job["faults"]:
        getattr(faults, kind)(**options)
    needs = job["seconds_per_sample"]
    name = os.environ["HOROVOD_HOSTNAME"]
    needs_s = needs[(len(name) - len("127.0.0.1")) % len(needs)]  # by the number of the host
    model = network()
    rate = job.get("rate", RATE)
    state = TorchState(
        model, torch.optim.SGD(model.parameters(), lr=rate, momentum=job.get("momentum", MOMENTUM)),
        rounds_per_commit=job["rounds_per_commit"], scale_learning_rate="per_rank_batch" in job, seen=[],
    )  # fmt: skip

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        batch = job["per_rank_batch"] * hvd.size() if "per_rank_batch" in job else job["global_batch"]
        balance = LoadBalance(policy_of(job["policy"]), global_batch=batch, sync=job.get("sync", "allreduce"))
        balance.balancer._clock = balance.balancer.pace._clock = clock
        if job.get("stream"):
            loader = BalancedLoader(Stream(job["samples"]), balance, stream=job["stream"])
        else:
            workers = job.get("num_workers", 0)
            loader = BalancedLoader(Samples(job["samples"]), balance, shuffle=True, seed=SEED, num_workers=workers)
        optimizer = DistributedOptimizer(state.optimizer, balance, model.named_parameters())
        state.follow(balance, loader)
        faults.attach(balance, state)
        rate = optimizer.param_groups[0]["lr"]
        log(
            membership=state.resets, begins=balance.rounds, rank=hvd.rank(), size=hvd.size(), plan=balance.plan,
            needs_s=needs_s, rate=rate, prefix=balance.prefix, at_s=time.monotonic(), seen=len(state.seen),
        )  # fmt: skip
        balance.balancer.observer = lambda finished: log(
            membership=state.resets, finished=finished.round, plan=finished.plan.samples, at_s=time.monotonic(),
            told=finished.table.figures("samples_per_s"),
        )  # fmt: skip
        loader.stop_at = _end(job, hvd.size(), balance)
        for epoch in range(loader.epoch_at_hand, job["epochs"]):
            for x, y, index in loader:
                here = {"membership": state.resets, "round": balance.rounds, "epoch": epoch}
                clock.pass_s(len(x) * needs_s)
                time.sleep(REAL_S)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                log(**here, samples=index.tolist())
            if loader.stop_at is not None and balance.rounds >= loader.stop_at:
                break
            state.seen.append(epoch)
        log(membership=state.resets, ends=balance.rounds)
        if job.get("sync", "allreduce") != "allreduce":
            optimizer.average_parameters()

    train(state)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    # Into the log: two processes may have begun with one number of a rank, by which launch() would know them.
    log(parameters=parameters, size=hvd.size(), resets=state.resets, seen=state.seen)


def _end(job: dict[str, Any], size: int, balance: LoadBalance) -> int | None:
    """Some jobs end so many rounds after they have so many ranks, whenever that is."""
    if "rounds_once_of_size" not in job or size != job["rounds_once_of_size"][0]:
        return None
    return int(balance.rounds + job["rounds_once_of_size"][1])


if __name__ == "__main__":
    main()
