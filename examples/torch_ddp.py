"""Recognise handwritten digits under DistributedDataParallel or FSDP2, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py --shard

It needs scikit-learn, which holds the 1,797 digits. The reducer stays as it is: the loader gives each rank what it can
finish in time, and ``balance.scale`` weighs the loss, so the result is that of one process with a batch of 128.
``--slow RANK`` slows one rank down, to see the batches follow. ``--accumulate K`` does each batch in K parts.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from torch_hooks import BalancedLoader, LoadBalance


class Slow(torch.nn.Identity):
    """A layer that takes its time for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x) if self.training else 0.0)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--shard", action="store_true", help="FSDP2 in the place of DistributedDataParallel")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a round")
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    parser.add_argument("--telemetry", help="write JSON lines to this file")
    options = parser.parse_args()

    torch.distributed.init_process_group()  # on GPUs: init_process_group("cpu:gloo,cuda:nccl")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None] / 16
    y = torch.from_numpy(digits.target)
    training, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        Slow(2e-4 if rank == options.slow else 0.0),
        torch.nn.Linear(16 * 4 * 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip
    if options.shard:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in list(model.children()):
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    balance = LoadBalance(options.policy, global_batch=128, telemetry=options.telemetry)
    loader = BalancedLoader(training, balance, shuffle=True, seed=0, micro_batches=options.accumulate)

    for epoch in range(options.epochs):
        model.train()
        for images, labels in loader:
            with balance.accumulate(model):  # without --accumulate it changes nothing
                balance.scale(functional.cross_entropy(model(images), labels)).backward()
            if balance.round_complete:
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        found = balance.evaluate(test, lambda batch: {"right": (model(batch[0]).argmax(1) == batch[1]).double().mean()})
        if rank == 0:
            batches = " + ".join(map(str, balance.plan))
            print(f"epoch {epoch + 1}: accuracy {found['right']:.3f}, batches {batches}", flush=True)

    balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
