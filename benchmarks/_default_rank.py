"""One rank of `benchmarks/default.py --ranks`: train with LB-BSP beside an equal rank, and report the splits."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hvd_hetero.policies import LBBSP
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

SHARE, STEP_S, FEATURES = 64, 0.04, 16


class Sleeps(torch.nn.Linear):
    """A layer that takes as long for each batch but for a share of its time, which goes with the samples."""

    def __init__(self, phi: float, scatter: float, seed: list[int]) -> None:
        super().__init__(FEATURES, FEATURES)
        self.phi, self.scatter, self.chance = phi, scatter, np.random.default_rng(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        luck = self.chance.lognormal(-0.5 * self.scatter**2, self.scatter)
        time.sleep(luck * STEP_S * (self.phi + (1.0 - self.phi) * len(x) / SHARE))
        return super().forward(x)


def main() -> None:
    phi, scatter, seed, rounds = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, plans = Sleeps(phi, scatter, [seed, rank]), []
    balance = LoadBalance(LBBSP(), global_batch=SHARE * ranks)
    balance.on_round(lambda record: plans.append(tuple(record["samples"])))
    loader = BalancedLoader(TensorDataset(torch.randn(SHARE * ranks * rounds, FEATURES)), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    balance.close()
    splits = sum(a != b for a, b in pairwise(plans))
    report({"least": min(map(min, plans), default=0), "splits": splits})  # only rank 0 hears of rounds
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
