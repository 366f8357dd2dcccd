"""Recognise handwritten digits on ranks that may die and join during training: a whole PyTorch script.

    cp examples/hosts.txt ~/hosts.txt
    HOSTS=~/hosts.txt horovodrun -np 3 --min-np 1 --max-np 4 --host-discovery-script examples/discover_hosts.sh \
        --network-interface lo python examples/torch_elastic.py

Each rank prints the number of its process. End one with ``kill -9``: the others go on from the last commit. Or let one
more join: ``echo 127.0.0.0001:1 >> ~/hosts.txt``. Each rank has its own host name, because Horovod gives up the whole
host of a rank that has failed; all these names mean this machine. It needs scikit-learn, which holds the digits.
"""

from __future__ import annotations

import argparse
import os

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.elastic import TorchState


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=400)  # a minute or more: time to end a rank by hand
    parser.add_argument("--rounds-per-commit", type=int, default=5)
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

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        # Everything that depends on the ranks is made again after every reset; the rest is in the state.
        balance = LoadBalance(options.policy, global_batch=128)
        loader = BalancedLoader(training, balance, shuffle=True, seed=0)
        optimizer = DistributedOptimizer(state.optimizer, balance, named_parameters=model.named_parameters())
        state.follow(balance, loader)
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()} after round {balance.rounds}", flush=True)

        for epoch in range(loader.epoch_at_hand, options.epochs):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                balance.scale(functional.cross_entropy(model(images), labels)).backward()
                optimizer.step()

            model.eval()
            mine = slice(hvd.rank(), None, hvd.size())
            with torch.no_grad():
                right = (model(test[0][mine]).argmax(1) == test[1][mine]).sum()
            right = hvd.allreduce(right, op=hvd.Sum, name="right")
            if hvd.rank() == 0:
                split = " + ".join(map(str, balance.plan))
                print(f"epoch {epoch + 1}: accuracy {right.item() / len(test[1]):.3f}, batches {split}", flush=True)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(TorchState(model, optimizer, rounds_per_commit=options.rounds_per_commit))


if __name__ == "__main__":
    main()
