"""One rank of ``validation.py``: all policies train in turn, an epoch each, computing by sleep or under a quota.

The turns run through the policies forwards, then backwards, so that a machine that changes its pace favours none. While
the others train a policy rests: rank 0 records for how long, since the next round's record counts that time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from demo_rank import images, network, sgd

from hvd_hetero.testing import CpuQuota, pin_to_core
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

Batch = tuple[torch.Tensor, torch.Tensor]


class Training:
    """One policy's training, an epoch at a time."""

    def __init__(
        self, policy: str, global_batch: int, telemetry: Path, data: TensorDataset, model: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    ) -> None:  # fmt: skip
        self._balance = LoadBalance(policy, global_batch=global_batch, telemetry=telemetry)
        self._loader = BalancedLoader(data, self._balance, shuffle=True, seed=0)
        self._optimizer = DistributedOptimizer(sgd(model), self._balance, model.named_parameters())
        self._model, self._loss = model, loss
        self._left_s = time.perf_counter()
        self._cpu_s = self._main_s = self._held_s = self._samples = 0.0
        self.rested: dict[int, float] = {}
        """Seconds before each round in which others trained."""

    def epoch(self, held_back_s: Callable[[], float]) -> None:
        """Train for an epoch."""
        self.rested[self._balance.rounds] = time.perf_counter() - self._left_s
        cpu_s, main_s, held_s = time.process_time(), time.thread_time(), held_back_s()
        for batch in self._loader:
            self._optimizer.zero_grad()
            self._loss(self._model, batch).backward()
            self._optimizer.step()
            self._samples += len(batch[0])
        self._cpu_s += time.process_time() - cpu_s
        self._main_s += time.thread_time() - main_s
        self._held_s += held_back_s() - held_s
        self._left_s = time.perf_counter()

    def used(self) -> dict[str, float]:
        """Processor seconds of this rank, of its main thread, and seconds that its quota held it back."""
        return {"samples": self._samples, "cpu_s": self._cpu_s, "main_s": self._main_s, "held_s": self._held_s}

    def close(self) -> None:
        """End the training."""
        self._balance.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--dataset", type=int, required=True)
    parser.add_argument("--slopes-ms", type=float, nargs="+", help="sleep so long for a sample, on each rank …")
    parser.add_argument("--fixed-ms", type=float, default=0.0, help="… and so long for a micro-batch")
    parser.add_argument("--shares", type=float, nargs="+", help="of a core, on each rank")
    parser.add_argument("--pin", action="store_true")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    if options.pin:
        pin_to_core(hvd.rank())
    # At a share of 1 no group at all: being in one also changes how the scheduler weighs a process.
    share = options.shares[hvd.rank()] if options.shares else 1.0
    quota = CpuQuota(share) if share < 1 else None
    with quota or nullcontext():
        train(options, lambda: held_back_s(quota))


def train(options: argparse.Namespace, held: Callable[[], float]) -> None:
    trainings = {policy: training(options, policy) for policy in options.policies}
    for turn in range(options.epochs):
        for policy in options.policies[:: -1 if turn % 2 else 1]:
            hvd.allreduce(torch.zeros(1), name=f"turn {turn} of {policy}")
            trainings[policy].epoch(held)
            if hvd.rank() == 0:
                print(json.dumps({"policy": policy, "turn": turn}), flush=True)
    for each in trainings.values():
        each.close()
    found = {policy: {"rested": each.rested, **each.used()} for policy, each in trainings.items()}
    (options.out / f"rank.{hvd.rank()}.json").write_text(json.dumps(found))


def training(options: argparse.Namespace, policy: str) -> Training:
    telemetry = options.out / f"{policy}.jsonl"
    if not options.slopes_ms:
        data = TensorDataset(*images(options.dataset, seed=2))
        return Training(policy, options.global_batch, telemetry, data, network(), entropy)
    slope_s, fixed_s = options.slopes_ms[hvd.rank()] / 1e3, options.fixed_ms / 1e3

    def slept(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        time.sleep(slope_s * len(batch[0]) + fixed_s)
        return functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    x = torch.randn(options.dataset, 1)
    data = TensorDataset(x, 2 * x)
    return Training(policy, options.global_batch, telemetry, data, torch.nn.Linear(1, 1), slept)


def entropy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def held_back_s(quota: CpuQuota | None) -> float:
    """Return how long the quota has held this process back, summed over processors."""
    if quota is None or quota.group is None:
        return 0.0
    lines = (quota.group / "cpu.stat").read_text().split("\n")
    figures = dict(line.split() for line in lines if line)
    return int(figures["throttled_time"]) / 1e9 if "throttled_time" in figures else int(figures["throttled_usec"]) / 1e6


if __name__ == "__main__":
    main()
