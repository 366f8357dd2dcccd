"""One rank of `benchmarks/reliability.py`: train elastically under faults, and log what it sees."""

from __future__ import annotations

import json
import sys
import time

import horovod.torch as hvd
import torch
from _reliability_job import (
    MOMENTUM,
    RATE,
    REAL_S,
    SEED,
    Clock,
    Log,
    end,
    faults_of_job,
    global_batch,
    meet,
    policy_of,
    seconds_per_sample,
    telemetry,
    told,
)  # fmt: skip
from torch.utils.data import Dataset, IterableDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, x @ torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] + 0.1 * torch.randn(
        samples, 1, generator=generator, dtype=torch.float64
    )


def network() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Linear(6, 1).double()


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


def main() -> None:
    told()
    job = json.loads(sys.argv[1])
    meet(job)
    hvd.init()
    torch.set_num_threads(1)
    clock, log = Clock(), Log(job["directory"])
    faults = faults_of_job(job, clock)
    needs_s = seconds_per_sample(job["seconds_per_sample"])
    model = network()
    rate = job.get("rate", RATE)
    state = TorchState(
        model, torch.optim.SGD(model.parameters(), lr=rate, momentum=job.get("momentum", MOMENTUM)),
        rounds_per_commit=job["rounds_per_commit"], scale_learning_rate="per_rank_batch" in job, seen=[],
    )  # fmt: skip

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        balance = LoadBalance(
            policy_of(job["policy"], hvd.size()), global_batch=global_batch(job, hvd.size()),
            sync=job.get("sync", "allreduce"), telemetry=telemetry(job, state.resets),
        )  # fmt: skip
        balance._session.balancer.meter.batch.clock = clock
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
            needs_s=needs_s, rate=rate, prefix=balance._session.prefix, at_s=time.monotonic(), seen=len(state.seen),
        )  # fmt: skip
        log.rounds(balance._session.balancer, membership=state.resets)
        loader.stop_at = end(job, state.resets, balance.rounds)
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


if __name__ == "__main__":
    main()
