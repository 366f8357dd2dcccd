"""Train a transformer by Hugging Face's Trainer on sequences of unequal length, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/torch_transformers.py

It needs transformers, accelerate and scikit-learn, and downloads nothing: a small BERT reads the 1,797 digits of
scikit-learn as text, a "word" of each bright pixel (its place and its brightness). So digits have 16 to 36 words, and
are padded in each batch by the data collator. With a checkpoint of yours, ``from_pretrained`` takes the place of the
configuration. The Trainer wraps the model with DDP, clips, steps and schedules, as always. ``--slow RANK`` slows one
rank down, to see the batches follow. ``--accumulate K`` does each batch in K parts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from torch_hooks import LoadBalance, average_by_samples
from torch_hooks.trainer import BalancedTrainer

Sample = tuple[torch.Tensor, int]


class Slow(BertForSequenceClassification):
    """A model that takes its time for each sample."""

    seconds = 0.0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        time.sleep(self.seconds * len(named["input_ids"]) if self.training else 0.0)
        return super().forward(*inputs, **named)


class PrintAccuracy(TrainerCallback):
    """Print the accuracy after each epoch."""

    def __init__(self, balance: LoadBalance, test: list[Sample]) -> None:
        self.balance, self.test = balance, test

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        mine = padded(self.test[args.process_index :: args.world_size])
        labels = mine.pop("labels")
        model.eval()
        with torch.no_grad():
            right = (model(**mine).logits.argmax(1) == labels).double().mean()
        right = average_by_samples(right, len(labels))
        if state.is_world_process_zero:
            batches = " + ".join(map(str, self.balance.plan))
            print(f"epoch {state.epoch:.0f}: accuracy {right:.3f}, batches {batches}", flush=True)


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
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a round")
    parser.add_argument("--slow", type=int, help="a rank that takes 3 ms more per sample")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, num_train_epochs=options.epochs, learning_rate=1e-3, warmup_steps=10, max_grad_norm=1.0,
            use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[], disable_tqdm=True,
            logging_strategy="no", remove_unused_columns=False, gradient_accumulation_steps=options.accumulate,
            per_device_train_batch_size=32,  # what a rank's memory holds; its share is what it can finish in time
        )  # fmt: skip
        torch.set_num_threads(1)
        torch.manual_seed(0)
        samples = sentences()
        config = BertConfig(
            vocab_size=1 + 4 * 64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, num_labels=10, initializer_range=0.1, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = Slow(config)
        model.seconds = 3e-3 if arguments.process_index == options.slow else 0.0
        trainer = BalancedTrainer(
            model=model, args=arguments, train_dataset=samples[:1500], data_collator=padded,
            balance=LoadBalance("lb-bsp", global_batch=32),  # which is the default policy
        )  # fmt: skip
        trainer.add_callback(PrintAccuracy(trainer.balance, samples[1500:]))
        trainer.train()
        trainer.balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
