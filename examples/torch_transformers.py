"""Train a transformer of Hugging Face's library on sequences of unequal length, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_transformers.py

It needs transformers and scikit-learn, and downloads nothing: a small BERT reads the 1,797 digits of scikit-learn as
text, a "word" of each bright pixel (its place and its brightness). So digits have 16 to 36 words, and are padded in
each batch by ``collate_fn``. With a checkpoint of yours, ``from_pretrained`` takes the place of the configuration.
``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, average_by_samples

Sample = tuple[torch.Tensor, int]


def sentences() -> list[Sample]:
    """Return the digits as words and labels; word 0 is padding."""
    digits = load_digits()
    samples = []
    for image, label in zip(digits.images, digits.target, strict=True):
        bright = torch.from_numpy(image).flatten().long() // 4  # 0 to 4
        places = bright.nonzero()[:, 0]
        samples.append((4 * places + bright[places], int(label)))
    return samples


def padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Return one batch, as long as its longest sentence."""
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--slow", type=int, help="a rank that takes 1 ms more per sample")
    options = parser.parse_args()

    torch.distributed.init_process_group()  # on GPUs: init_process_group("cpu:gloo,cuda:nccl")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = sentences()
    training, test = samples[:1500], samples[1500:]

    config = BertConfig(
        vocab_size=1 + 4 * 64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=10, initializer_range=0.1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)

    balance = LoadBalance("lb-bsp", global_batch=32)
    loader = BalancedLoader(
        training, balance, shuffle=True, seed=0, collate_fn=padded, samples_of=lambda batch: len(batch["labels"])
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(optimizer, balance, named_parameters=model.named_parameters())
    schedule = get_linear_schedule_with_warmup(optimizer, 10, options.epochs * len(loader))

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: schedule.step())

    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            if rank == options.slow:
                time.sleep(1e-3 * len(batch["labels"]))
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

        model.eval()
        mine = padded(list(Subset(test, range(rank, len(test), ranks))))
        labels = mine.pop("labels")
        with torch.no_grad():
            right = (model(**mine).logits.argmax(1) == labels).double().mean()
        right = average_by_samples(right, len(labels))
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {right:.3f}, batches {' + '.join(map(str, balance.plan))}", flush=True)

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
