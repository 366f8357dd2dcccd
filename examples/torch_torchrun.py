"""Recognise handwritten digits on ranks of unequal speed, with PyTorch alone: no Horovod is needed.

    torchrun --nproc-per-node 2 examples/torch_torchrun.py

It needs scikit-learn, which holds the 1,797 digits. Every rank trains on what it can finish in time; the result is
the same as in one process with a batch of 128. ``--slow RANK`` slows one rank down, to see the batches follow. With
``--save FILE`` a training that was ended goes on from there: end a rank by ``kill -9`` under
``torchrun --max-restarts 3 …``.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, SavedTraining


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    parser.add_argument("--telemetry", help="write one JSON line per round to this file")
    parser.add_argument("--save", help="keep the training in this file, and go on from it")
    options = parser.parse_args()

    torch.distributed.init_process_group()  # on GPUs: init_process_group("cpu:gloo,cuda:nccl")
    rank = torch.distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None] / 16
    y = torch.from_numpy(digits.target)
    training, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip

    balance = LoadBalance(options.policy, global_batch=128, telemetry=options.telemetry)
    loader = BalancedLoader(training, balance, shuffle=True, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())

    if options.save:
        saved = SavedTraining(options.save, balance, loader, rounds_per_save=5, model=model, optimizer=optimizer)

    for epoch in range(loader.epoch_at_hand, options.epochs):
        model.train()
        for images, labels in loader:
            if rank == options.slow:
                time.sleep(2e-4 * len(images))
            optimizer.zero_grad()
            balance.scale(functional.cross_entropy(model(images), labels)).backward()
            optimizer.step()

        model.eval()
        found = balance.evaluate(test, lambda batch: {"right": (model(batch[0]).argmax(1) == batch[1]).double().mean()})
        if rank == 0:
            batches = " + ".join(map(str, balance.plan))
            print(f"epoch {epoch + 1}: accuracy {found['right']:.3f}, batches {batches}", flush=True)

    if options.save:
        saved.save()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
