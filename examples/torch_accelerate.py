"""Recognise handwritten digits in a loop that uses Hugging Face's accelerate, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_accelerate.py

It needs accelerate and scikit-learn. ``accelerate launch`` starts it as well. The Accelerator wraps the model with DDP,
chooses the precision (bfloat16 needs no scaler), runs backward passes, clips and prints on one rank. It prepares
neither loader nor schedule: it would cut batches equally, and step a schedule once for each rank. ``--slow RANK`` slows
one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from torch_hooks import BalancedLoader, LoadBalance, average_by_samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=options.mixed_precision)
    rank, ranks = accelerator.process_index, accelerator.num_processes
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
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))

    balance = LoadBalance("lb-bsp", global_batch=128)
    loader = BalancedLoader(training, balance, shuffle=True, seed=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, options.epochs * len(loader))

    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            images, labels = (part.to(accelerator.device) for part in batch)
            if rank == options.slow:
                time.sleep(2e-4 * len(images))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(balance.scale(loss))
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()

        model.eval()
        images, labels = Subset(test, range(rank, len(test), ranks))[:]
        with torch.no_grad():
            right = (model(images.to(accelerator.device)).argmax(1).cpu() == labels).double().mean()
        right = average_by_samples(right, len(labels))
        batches = " + ".join(map(str, balance.plan))
        accelerator.print(f"epoch {epoch + 1}: accuracy {right:.3f}, batches {batches}", flush=True)

    accelerator.end_training()


if __name__ == "__main__":
    main()
