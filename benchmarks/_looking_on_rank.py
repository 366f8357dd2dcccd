"""A rank of ``looking_on.py``: the same training without and with looking on, in alternating blocks.

Arguments: a folder for telemetry, the number of pairs, and the steps of a block.
"""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch
from _alternating import STOCK, STOCK_S, alternate

from hvd_hetero.testing import report
from torch_hooks import DistributedOptimizer, LoadBalance

FEATURES, BATCH, STEP_S = 64, 16, 0.05


class Training:
    """A linear model and its own LoadBalance."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(FEATURES, 1)
        self.balance = LoadBalance("lb-bsp", global_batch=BATCH * hvd.size(), **options)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer = DistributedOptimizer(sgd, self.balance, self.model.named_parameters())
        self.x = torch.randn(BATCH * hvd.size(), FEATURES)

    def block(self, steps: int) -> float:
        """Train a block and return its mean seconds per step."""
        hvd.allreduce(torch.zeros(1), name="block")
        begin = time.perf_counter()
        for _ in range(steps):
            samples = self.balance.batch_size
            self.balance.batch(samples)
            self.optimizer.zero_grad()
            time.sleep(STEP_S)
            self.model(self.x[:samples]).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - begin) / steps


def main() -> None:
    folder, pairs, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    torch.set_num_threads(1)
    kinds = {
        STOCK: Training(),
        "telemetry": Training(telemetry=f"{folder}/telemetry.jsonl"),
        "view": Training(progress=True),
        "both": Training(telemetry=f"{folder}/both.jsonl", progress=True),
    }
    found = alternate(pairs, "pair", kinds, steps)
    for each in kinds.values():
        each.balance.close()
    report({"seconds": found.pop(STOCK_S), **found})


if __name__ == "__main__":
    main()
