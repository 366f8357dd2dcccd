"""Recognise handwritten digits with Lightning's Trainer, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_lightning.py

It needs pytorch-lightning and scikit-learn. The Trainer wraps the module with DDP, clips and steps. It gets a loader of
ours, and a callback that weighs the gradient. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import pytorch_lightning
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from torch_hooks import BalancedLoader, EvaluationLoader, LoadBalance
from torch_hooks.lightning import ScaleLoss


class Digits(pytorch_lightning.LightningModule):
    """A small network with the methods that a Trainer calls."""

    def __init__(self, balance: LoadBalance, slow: int | None) -> None:
        super().__init__()
        self.balance, self.slow, self.accuracy = balance, slow, MeanMetric()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        images, labels = batch
        if torch.distributed.get_rank() == self.slow:
            time.sleep(2e-4 * len(images))
        return functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def validation_step(self, batch: Any, number: int) -> None:
        images, labels = batch
        self.accuracy.update((self.net(images).argmax(1) == labels).double())
        self.log("accuracy", self.accuracy)  # of the samples of all ranks

    def on_validation_end(self) -> None:
        if torch.distributed.get_rank() == 0 and not self.trainer.sanity_checking:
            right, batches = self.trainer.callback_metrics["accuracy"], " + ".join(map(str, self.balance.plan))
            print(f"epoch {self.current_epoch + 1}: accuracy {right:.3f}, batches {batches}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None] / 16
    y = torch.from_numpy(digits.target)
    training, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

    balance = LoadBalance("lb-bsp", global_batch=128)
    trainer = pytorch_lightning.Trainer(
        accelerator="gpu" if gpu else "cpu", strategy="ddp", devices=torch.distributed.get_world_size(),
        gradient_clip_val=5.0, max_epochs=options.epochs, callbacks=[ScaleLoss(balance)],
        enable_progress_bar=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    loader = BalancedLoader(training, balance, shuffle=True, seed=0)
    trainer.fit(Digits(balance, options.slow), loader, EvaluationLoader(test, balance))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
