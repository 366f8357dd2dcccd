"""One rank of `slow_loader.py`: equal batches and LB-BSP in turn, while the last rank's loader is slow."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH, SAMPLES, COMPUTE_S = 64, 64 * 6 + 20, 1e-3  # an epoch ends with a short round; 1 ms a sample


class Samples(torch.utils.data.Dataset):
    """Samples of ones, each of which takes ``delay_s`` to fetch."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """Return a batch, whose samples are fetched one after the other."""
        time.sleep(self._delay_s * len(indices))
        return list(torch.ones(len(indices), 1))


def train(policy: str, path: Path, options: argparse.Namespace) -> None:
    """Train a new model for some rounds, and record it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, telemetry=path)
    delay_s = options.load_ms * 1e-3 if hvd.rank() == hvd.size() - 1 else 0.0
    loader = BalancedLoader(
        Samples(delay_s), balance, shuffle=True, seed=0, stop_at=options.rounds, num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(sgd, balance, model.named_parameters())
    while balance.rounds < options.rounds:
        for x in loader:
            optimizer.zero_grad()
            time.sleep(COMPUTE_S * len(x))
            functional.mse_loss(model(x), x).backward()
            optimizer.step()
    balance.close()
    hvd.allreduce(torch.zeros(1), name=f"end of {path.name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-ms", type=float, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    for cycle in range(options.cycles):
        for policy in options.policies:
            train(policy, options.out / f"{policy}-{cycle}.jsonl", options)


if __name__ == "__main__":
    main()
