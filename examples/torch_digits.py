"""Recognise handwritten digits on ranks of unequal speed: a whole PyTorch script.

    horovodrun -np 2 python examples/torch_digits.py

It needs scikit-learn, which holds the 1,797 digits. Every rank trains on what it can finish in time; the result is
the same as in one process with a batch of 128.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--telemetry", help="write one JSON line per round to this file")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None] / 16
    y = torch.from_numpy(digits.target)
    training, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip

    balance = LoadBalance(options.policy, global_batch=128, telemetry=options.telemetry)
    loader = BalancedLoader(training, balance, shuffle=True, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())

    for epoch in range(options.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            balance.scale(functional.cross_entropy(model(images), labels)).backward()
            optimizer.step()

        # Each rank evaluates every n-th sample, and the counts are summed, so that samples weigh alike.
        model.eval()
        mine = slice(hvd.rank(), None, hvd.size())
        with torch.no_grad():
            right = (model(test[0][mine]).argmax(1) == test[1][mine]).sum()
        right = hvd.allreduce(right, op=hvd.Sum, name="right")
        if hvd.rank() == 0:
            split = " + ".join(map(str, balance.plan))
            print(f"epoch {epoch + 1}: accuracy {right.item() / len(test[1]):.3f}, batches {split}", flush=True)


if __name__ == "__main__":
    main()
