"""One rank of `benchmarks/default.py --ranks`: train beside ranks that sleep, and report splits and times."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import numpy as np
import torch
from default import ENTRANTS, LOOKS, REAL, SHARE, TURN
from torch.utils.data import TensorDataset

from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

STEP_S, FEATURES = 0.04, 16


class Sleeps(torch.nn.Linear):
    """A layer that takes as long for each batch but for a share of its time, which goes with the samples."""

    def __init__(self, phi: float, scatter: float, seed: list[int]) -> None:
        super().__init__(FEATURES, FEATURES)
        self.phi, self.scatter, self.chance, self.slowness = phi, scatter, np.random.default_rng(seed), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        luck = self.chance.lognormal(-0.5 * self.scatter**2, self.scatter)
        time.sleep(self.slowness * luck * STEP_S * (self.phi + (1.0 - self.phi) * len(x) / SHARE))
        return super().forward(x)


def main() -> None:
    kind, entrant, phi, scatter, seed, rounds = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, plans = Sleeps(phi, scatter, [int(seed), rank]), []
    balance = LoadBalance(ENTRANTS[entrant].policy(), global_batch=SHARE * ranks)
    balance.on_round(lambda record: plans.append(tuple(record["samples"])))
    loader = BalancedLoader(TensorDataset(torch.randn(SHARE * ranks * int(rounds), FEATURES)), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    began_at = 0.0
    for number, (x,) in enumerate(loader):
        if number == LOOKS:
            began_at = time.perf_counter()
        turn = number // TURN if kind == "switching" else 0
        model.slowness = REAL[kind][(rank + turn) % ranks]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    seconds = (time.perf_counter() - began_at) / (rounds - LOOKS)
    balance.close()
    splits = sum(a != b for a, b in pairwise(plans))
    report({"least": min(map(min, plans), default=0), "splits": splits, "round_s": seconds})  # of rank 0 alone
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
