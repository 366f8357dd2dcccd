"""A rank of ``looking_on.py``: the same training without and with looking on, in alternating blocks.

Arguments: a folder for telemetry, the number of pairs, and the steps of a block.
"""

from __future__ import annotations

import statistics
import sys
import time

import horovod.torch as hvd
import torch
from _alternating import STOCK, STOCK_S, alternate

from hvd_hetero.rounds import FinishedRound
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
        self.looking_on_s = 0.0
        """Seconds that the training thread has spent in what looks on, since ``shares`` was last added to."""
        self.shares: list[float] = []
        """The block's share of time, for each block."""
        balancer = self.balance._session.balancer
        if (observer := balancer.observer) is not None:

            def timed(finished: FinishedRound) -> None:
                begin = time.perf_counter()
                observer(finished)
                self.looking_on_s += time.perf_counter() - begin

            balancer.observer = timed

    def block(self, steps: int) -> float:
        """Train a block and return its median seconds per step."""
        hvd.allreduce(torch.zeros(1), name="block")
        took, self.looking_on_s = [], 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            samples = self.balance.batch_size
            self.balance.batch(samples)
            self.optimizer.zero_grad()
            time.sleep(STEP_S)
            self.model(self.x[:samples]).square().mean().backward()
            self.optimizer.step()
            took.append(time.perf_counter() - begin)
        self.shares.append(self.looking_on_s / sum(took))
        return statistics.median(took)


def main() -> None:
    folder, pairs, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    torch.set_num_threads(1)
    kinds = {
        STOCK: Training(),
        "telemetry": Training(telemetry=f"{folder}/telemetry.jsonl"),
        "both": Training(telemetry=f"{folder}/both.jsonl", progress=True),
    }
    found = alternate(pairs, "pair", kinds, steps)
    for each in kinds.values():
        each.balance.close()
    # The first block of each is a warm-up.
    report({"seconds": found.pop(STOCK_S), **{kind: [found[kind], kinds[kind].shares[1:]] for kind in found}})


if __name__ == "__main__":
    main()
