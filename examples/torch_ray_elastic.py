"""Recognise handwritten digits on ranks of Ray that may die and join during training: a whole PyTorch script.

    ray start --head --num-cpus 1
    ray start --address 127.0.0.1:6379 --node-ip-address 127.0.0.2 --num-cpus 1 --temp-dir ~/ray2
    RAY_DEDUP_LOGS=0 python examples/torch_ray_elastic.py

Each rank prints the number of its process. End one with ``kill -9``: the others go on from the last commit. Or let one
more join, by another ``ray start`` at 127.0.0.3. Horovod gives up the whole node of a rank that has failed, so each
rank has its own; here all of them are this machine. ``ray stop`` ends them. It needs Horovod, Ray, and scikit-learn,
which holds the digits.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import horovod.torch as hvd
import ray
import torch
from horovod.ray import ElasticRayExecutor
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState


def rank(policy: str, epochs: int, rounds_per_commit: int) -> float:
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

    @hvd.elastic.run
    def train(state: TorchState) -> float:
        # Everything that depends on the ranks is made again after every reset; the rest is in the state.
        balance = LoadBalance(policy, global_batch=128)
        loader = BalancedLoader(training, balance, shuffle=True, seed=0)
        optimizer = DistributedOptimizer(state.optimizer, balance, named_parameters=model.named_parameters())
        state.follow(balance, loader)
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()} after round {balance.rounds}", flush=True)

        accuracy = 0.0
        for epoch in range(loader.epoch_at_hand, epochs):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                balance.scale(functional.cross_entropy(model(images), labels)).backward()
                optimizer.step()

            model.eval()
            mine = slice(hvd.rank(), None, hvd.size())
            with torch.no_grad():
                right = (model(test[0][mine]).argmax(1) == test[1][mine]).sum()
            accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test[1])
            if hvd.rank() == 0:
                split = " + ".join(map(str, balance.plan))
                print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}, batches {split}", flush=True)
        return accuracy

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return train(TorchState(model, optimizer, rounds_per_commit=rounds_per_commit))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nics", default="lo", help="the interface by which nodes reach each other")
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=400)  # a minute or more: time to end a rank by hand
    parser.add_argument("--rounds-per-commit", type=int, default=5)
    options = parser.parse_args()

    ray.init()
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=4, nics={options.nics})
    executor = ElasticRayExecutor(settings)
    executor.start()
    accuracies = executor.run(partial(rank, options.policy, options.epochs, options.rounds_per_commit))
    print(f"{len(accuracies)} ranks are done, with an accuracy of {accuracies[0]:.3f}")
