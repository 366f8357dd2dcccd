"""Recognise handwritten digits on ranks of unequal speed that Ray starts: a whole PyTorch script.

    RAY_DEDUP_LOGS=0 python examples/torch_ray.py

It starts Ray on this machine, or uses the cluster that ``RAY_ADDRESS`` names. It needs Horovod, Ray, and scikit-learn,
which holds the 1,797 digits. It trains as ``torch_digits.py`` does; only what is below ``if __name__`` differs.
"""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import ray
import torch
from horovod.ray import RayExecutor
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance


def train(policy: str, epochs: int, slow: int | None, telemetry: str | None) -> float:
    """Train on one rank, and return the accuracy."""
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

    balance = LoadBalance(policy, global_batch=128, telemetry=telemetry)
    loader = BalancedLoader(training, balance, shuffle=True, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())

    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            if hvd.rank() == slow:
                time.sleep(2e-4 * len(images))
            optimizer.zero_grad()
            balance.scale(functional.cross_entropy(model(images), labels)).backward()
            optimizer.step()

        model.eval()
        mine = slice(hvd.rank(), None, hvd.size())
        with torch.no_grad():
            right = (model(test[0][mine]).argmax(1) == test[1][mine]).sum()
        accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test[1])
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: accuracy {accuracy:.3f}, batches {' + '.join(map(str, balance.plan))}", flush=True
            )
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    parser.add_argument("--telemetry", help="write one JSON line per round to this file, on the machine of rank 0")
    options = parser.parse_args()

    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=options.ranks)
    executor.start()
    accuracies = executor.run(train, [options.policy, options.epochs, options.slow, options.telemetry])
    executor.shutdown()
    print(f"{len(accuracies)} ranks are done, with an accuracy of {accuracies[0]:.3f}")
