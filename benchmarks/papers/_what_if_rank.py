"""One rank of ``what_if.py``: computes by sleeping m x + b for each micro-batch, under one policy after the other."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--slopes-ms", type=float, nargs="+", required=True)
    parser.add_argument("--fixed-ms", type=float, nargs="+", required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--dataset", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    slope_ms = options.slopes_ms[hvd.rank()]
    for fixed_ms in options.fixed_ms:
        for policy in options.policies:
            train(options, policy, slope_ms / 1e3, fixed_ms / 1e3, options.out / f"{policy}.{fixed_ms:g}.jsonl")


def train(options: argparse.Namespace, policy: str, slope_s: float, fixed_s: float, telemetry: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance(policy, global_batch=options.global_batch, telemetry=telemetry)
    x = torch.randn(options.dataset, 1)
    loader = BalancedLoader(TensorDataset(x, 2 * x), balance, shuffle=True, seed=0)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), balance, model.named_parameters())
    for _ in range(options.epochs):
        for x, y in loader:
            time.sleep(slope_s * len(x) + fixed_s)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    balance.close()
    if hvd.rank() == 0:
        print(json.dumps({"done": telemetry.name}), flush=True)
    hvd.allreduce(torch.zeros(1), name=f"end of {telemetry.name}")


if __name__ == "__main__":
    main()
