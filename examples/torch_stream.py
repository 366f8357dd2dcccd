"""Train on a stream of Hugging Face's datasets, on ranks of unequal speed; run again, it goes on where it was.

    torchrun --nproc-per-node 2 examples/torch_stream.py --save run.pt --rounds 40
    torchrun --nproc-per-node 3 examples/torch_stream.py --save run.pt --rounds 120 --workers 1

It needs datasets and scikit-learn, and downloads nothing: the stream has the 1,797 digits of scikit-learn in 12 shards.
``load_dataset(…, streaming=True)`` takes its place. Shards are handed out to ranks by number, each sample once an
epoch, and the state of the stream is saved with the rest. ``--trainer`` is the same with transformers' Trainer, whose
checkpoints are in the folder ``--save``. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from torch_hooks import BalancedLoader, LoadBalance, SavedTraining

GLOBAL_BATCH = 64


class Digits(torch.nn.Module):
    """A small network, which takes its time for each sample on a slow rank."""

    def __init__(self, slow_s: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.slow_s = slow_s

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.slow_s * len(pixels))
        logits = self.layers(pixels)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def shards(firsts: list[int]) -> Iterator[dict[str, Any]]:
    digits = load_digits()
    for first in firsts:
        for image, label in zip(digits.data[first::12], digits.target[first::12], strict=True):
            yield {"pixels": (image / 16).tolist(), "labels": int(label)}


def batch(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = torch.tensor([sample["pixels"] for sample in samples], dtype=torch.float32)
    return {"pixels": pixels, "labels": torch.tensor([sample["labels"] for sample in samples])}


def by_loop(model: Digits, stream: Any, balance: LoadBalance, options: argparse.Namespace) -> None:
    """Train under DistributedDataParallel."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    reduced = DistributedDataParallel(model)
    loader = BalancedLoader(stream, balance, stream="shard", num_workers=options.workers, collate_fn=batch)
    saved = SavedTraining(options.save, balance, loader, model=model, optimizer=optimizer)
    loader.stop_at = options.rounds
    while balance.rounds < options.rounds:
        for inputs in loader:
            optimizer.zero_grad()
            balance.scale(reduced(**inputs)["loss"]).backward()
            optimizer.step()
    saved.save()


def by_trainer(model: Digits, stream: Any, balance: LoadBalance, options: argparse.Namespace) -> None:
    """Train by transformers' Trainer, which saves at the end, too."""
    from transformers import TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from torch_hooks.trainer import BalancedTrainer

    arguments = TrainingArguments(
        options.save, max_steps=options.rounds, save_steps=options.rounds, learning_rate=3e-3, report_to=[],
        per_device_train_batch_size=GLOBAL_BATCH, dataloader_num_workers=options.workers, disable_tqdm=True,
        lr_scheduler_type="constant", logging_strategy="no", remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = BalancedTrainer(
        model, arguments, train_dataset=stream, data_collator=batch, balance=balance, stream="shard"
    )
    last = get_last_checkpoint(options.save) if os.path.isdir(options.save) else None
    trainer.train(resume_from_checkpoint=last)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", required=True, help="a file, or the Trainer's folder")
    parser.add_argument("--rounds", type=int, default=120, help="of all runs together")
    parser.add_argument("--workers", type=int, default=0, help="processes that read the stream")
    parser.add_argument("--trainer", action="store_true", help="transformers' Trainer in the place of a loop")
    parser.add_argument("--slow", type=int, help="a rank that takes 2 ms more per sample")
    options = parser.parse_args()

    torch.distributed.init_process_group()  # on GPUs: init_process_group("cpu:gloo,cuda:nccl")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Digits(2e-3 if torch.distributed.get_rank() == options.slow else 0.0)
    stream = datasets.IterableDataset.from_generator(shards, gen_kwargs={"firsts": list(range(12))})
    balance = LoadBalance(global_batch=GLOBAL_BATCH)
    (by_trainer if options.trainer else by_loop)(model, stream, balance, options)
    model.slow_s = 0.0
    everything = batch(list(stream))
    right = (model(**everything)["logits"].argmax(1) == everything["labels"]).double().mean()
    if torch.distributed.get_rank() == 0:
        print(f"round {options.rounds}: accuracy {right:.3f}, batches {' + '.join(map(str, balance.plan))}", flush=True)
    balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
