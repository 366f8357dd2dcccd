"""One rank of ``validation.py``: trains under a policy, its CPU limited by a quota; rank 0 writes the telemetry."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from demo_rank import images, network, sgd

from hvd_hetero.testing import CpuQuota, pin_to_core
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", nargs="+", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--shares", type=float, nargs="+", required=True)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    if options.pin:
        pin_to_core(hvd.rank())
    data = TensorDataset(*images(20 * options.global_batch, seed=2))
    share = options.shares[hvd.rank()]
    # At a share of 1 no group at all: being in one also changes how the scheduler weighs a process.
    with CpuQuota(share if share < 1 else None):
        for block in range(options.blocks):
            for policy in options.policies:
                train(options, policy, block, data)


def train(options: argparse.Namespace, policy: str, block: int, data: TensorDataset) -> None:
    model = network()
    balance = LoadBalance(policy, global_batch=options.global_batch, telemetry=options.out / f"{policy}.{block}.jsonl")
    loader = BalancedLoader(data, balance, shuffle=True, seed=0, stop_at=options.rounds)
    optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
    while balance.rounds < options.rounds:
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    balance.close()
    if hvd.rank() == 0:
        print(json.dumps({"policy": policy, "block": block}), flush=True)
    hvd.allreduce(torch.zeros(1), name=f"end of {policy} {block}")


if __name__ == "__main__":
    main()
