"""One rank of `report_splits.py`: equal batches, LB-BSP and a split set by hand, block after block."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import demo_rank
import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import TensorDataset

from hvd_hetero.allocation import proportional
from hvd_hetero.policies import LBBSP, Policy
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import pin_to_core, report, slow_down
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH = 128
WARM_UP = 5


class HandSet(Policy):
    """Always the same shares."""

    name = "hand-set"
    measures = False

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = shares

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        """Return the shares, in one micro-batch each."""
        return RoundPlan.of(self.shares)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        """Return the same again."""
        return plan


def train(policy: str | Policy, path: Path, rounds: int, data: TensorDataset, slowness: object) -> None:
    """Train a new network for so many rounds, and record it."""
    model, pace = demo_rank.network(), demo_rank.Pace(slowness)
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, telemetry=path)
    loader = BalancedLoader(data, balance, shuffle=True, seed=0, stop_at=rounds)
    optimizer = DistributedOptimizer(demo_rank.sgd(model), balance, model.named_parameters())
    while balance.rounds < rounds:
        for x, y in loader:
            optimizer.zero_grad()
            pace.gradient(model, x, y)
            optimizer.step()
    balance.close()
    hvd.allreduce(torch.zeros(1), name=f"end of {path.name}")


def by_hand(path: Path) -> list[int]:
    """Return shares by the speeds that a recorded run showed."""
    run = read_run(path).after(WARM_UP)
    speeds = np.median(run.samples / (run.compute_s + run.input_s), axis=0)
    return [int(x) for x in proportional(speeds, GLOBAL_BATCH)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    pin_to_core(hvd.rank())
    data = TensorDataset(*demo_rank.images(6 * GLOBAL_BATCH + GLOBAL_BATCH // 3, seed=2))  # short last rounds
    slowness = slow_down(options.slow if hvd.rank() == hvd.size() - 1 else 1.0)
    described = hvd.allgather_object(slowness.describe())
    with slowness:
        for cycle in range(options.cycles):
            files = {name: options.out / f"{name}-{cycle}.jsonl" for name in ("bsp", "lb-bsp", "hand-set")}
            train("bsp", files["bsp"], options.rounds, data, slowness)
            train(LBBSP(), files["lb-bsp"], options.rounds, data, slowness)
            split = by_hand(files["lb-bsp"]) if hvd.rank() == 0 else None
            shares = hvd.broadcast_object(split, root_rank=0, name="shares")
            train(HandSet(shares), files["hand-set"], options.rounds, data, slowness)
            if hvd.rank() == 0:
                print(f"cycle {cycle + 1}: hand-set {shares}", flush=True)
    report({"slowness": described})


if __name__ == "__main__":
    main()
