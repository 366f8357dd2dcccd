"""One rank of `worth.py`: trainings of LB-BSP one after the other, each at other paces."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvd_hetero.policies import LBBSP
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

FIXED_S = 0.008
JITTER = 0.02


def network() -> torch.nn.Module:
    """Return a network of 0.7 MB that takes next to no time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 128))


def train(slope_s: float, path: Path, rounds: int, global_batch: int) -> None:
    """Train so many rounds; x samples take this rank ``slope_s`` x + ``FIXED_S``, with some scatter."""
    epoch = 10 * global_batch + global_batch // 3  # its last round is short, and tells the fixed cost
    inputs = torch.randn(epoch, 32, generator=torch.Generator().manual_seed(0))  # alike on all ranks
    data = TensorDataset(inputs, torch.zeros(epoch, dtype=torch.int64))
    model, scatter = network(), np.random.default_rng(hvd.rank())
    balance = LoadBalance(LBBSP(), global_batch=global_batch, telemetry=path)
    loader = BalancedLoader(data, balance, shuffle=True, seed=0, stop_at=rounds)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    while balance.rounds < rounds:
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            time.sleep((slope_s * len(x) + FIXED_S) * scatter.lognormal(0.0, JITTER))
            loss.backward()
            optimizer.step()
    balance.close()
    hvd.allreduce(torch.zeros(1), name=f"end of {path.name}")


def main() -> None:
    trainings, rounds, global_batch = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    torch.set_num_threads(1)
    for slopes_s, path in trainings:
        train(slopes_s[hvd.rank()], Path(path), rounds, global_batch)
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks: {Path(path).stem}", flush=True)


if __name__ == "__main__":
    main()
