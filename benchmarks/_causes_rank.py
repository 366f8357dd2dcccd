"""One rank of `causes.py`: train a small network while one rank is slow for a known cause."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import torch
from torch.nn import functional

from hvd_hetero.testing import CpuQuota, pin_to_core
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH, SAMPLES, FEATURES, CLASSES = 1024, 16384, 1024, 16
WARM_UP = 10  # rounds, after which rank 0 knows how many fill the time

# A process that computes for a share of the time, until its parent has ended or its time is over.
COMPETITOR = """
import os, sys, time
parent, end, share = os.getppid(), time.monotonic() + float(sys.argv[1]), float(sys.argv[3])
os.nice(int(sys.argv[2]))
while os.getppid() == parent and time.monotonic() < end:
    began = time.monotonic()
    sum(range(100_000))
    time.sleep((time.monotonic() - began) * (1 / share - 1))
"""


class Samples(torch.utils.data.Dataset):
    """Random samples, each of which takes ``delay_s`` to fetch."""

    def __init__(self, delay_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self._delay_s = delay_s

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a batch, whose samples are fetched one after the other."""
        if self._delay_s:
            time.sleep(self._delay_s * len(indices))
        return list(zip(self._x[indices], self._y[indices], strict=True))


@contextmanager
def hit(cause: str, strength: float, seconds: float) -> Iterator[None]:
    """Hold this process to a share of a core, or let processes of such a niceness compete for its core."""
    if cause == "quota":
        with CpuQuota(strength, period_us=20_000):
            yield
    elif cause in ("competitor", "turns"):
        niceness, share = (int(strength), 1.0) if cause == "competitor" else (0, strength)
        command = [sys.executable, "-c", COMPETITOR, str(seconds), str(niceness), str(share)]
        competitor = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            competitor.kill()
            competitor.wait()
    else:
        yield


def train(balance: LoadBalance, slow: argparse.Namespace | None, seconds: float) -> None:
    """Train for about so many seconds."""
    delay_s = slow.strength * 1e-3 if slow and slow.cause == "loader" else 0.0
    extra = slow.strength if slow and slow.cause == "work" else 0.0
    in_turns = slow is not None and slow.cause == "turns"
    loader = BalancedLoader(Samples(delay_s), balance, shuffle=True, seed=0, drop_last=True, stop_at=WARM_UP)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, CLASSES)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(sgd, balance, model.named_parameters())
    weights, owed = torch.randn(FEATURES, FEATURES), 0.0
    began = time.perf_counter()
    for epoch in range(10_000):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            owed += (
                4.0 if in_turns and balance.rounds % hvd.size() == hvd.rank() else extra
            )  # how many more products of this batch to do; a step is about two
            while owed >= 1.0:
                x @ weights
                owed -= 1.0
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if balance.rounds == WARM_UP == loader.stop_at:
            each_s = (time.perf_counter() - began) / WARM_UP
            loader.stop_at = WARM_UP + hvd.broadcast_object(max(int(seconds / each_s), 1), root_rank=0)
        elif balance.rounds >= loader.stop_at:
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cause", required=True)
    parser.add_argument("--strength", type=float, required=True)
    parser.add_argument("--slow", type=int, required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--telemetry", required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    pin_to_core(hvd.local_rank() if hvd.local_size() > 1 else hvd.rank())
    slow = options if options.cause == "turns" or hvd.rank() == options.slow else None
    with hit(slow.cause if slow else "", options.strength, 4 * options.seconds + 60):
        balance = LoadBalance(options.policy, global_batch=GLOBAL_BATCH, telemetry=options.telemetry)
        train(balance, slow, options.seconds)
        balance.close()


if __name__ == "__main__":
    main()
