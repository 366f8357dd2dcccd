"""Train a language model by Hugging Face's Trainer on texts of unequal length, on ranks of unequal speed.

    torchrun --nproc-per-node 2 examples/trainer_text.py

It needs transformers and accelerate, and downloads nothing: the texts are made here, as in ``torch_text.py``. For them
a user writes ``train_sampling_strategy="batch_rebalance"``. The Trainer would divide texts by a formula among equal
ranks; here ranks learn what a text costs by its length, and each gets what it can read in time. Each word of all ranks
counts alike, as the Trainer itself sees to. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch_text import PADDING, WORDS, texts
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from torch_hooks import LoadBalance, average_by_samples
from torch_hooks.trainer import BalancedTrainer


class Slow(LlamaForCausalLM):
    """A model that takes its time for each word."""

    seconds = 0.0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        time.sleep(self.seconds * named["input_ids"].numel() if self.training else 0.0)
        return super().forward(*inputs, **named)


class PrintAccuracy(TrainerCallback):
    """Print how many of the next words are guessed after each epoch."""

    def __init__(self, balance: LoadBalance, test: list[dict[str, torch.Tensor]]) -> None:
        self.balance, self.test = balance, test

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        mine = padded(self.test[args.process_index :: args.world_size])
        following = mine.pop("labels")[:, 1:]
        model.eval()
        with torch.no_grad():
            guessed = model(**mine).logits[:, :-1].argmax(2)
        right = (guessed == following)[following != PADDING].double().mean()
        right = average_by_samples(right, int((following != PADDING).sum()))
        if state.is_world_process_zero:
            batches = " + ".join(map(str, self.balance.plan))
            print(f"epoch {state.epoch:.0f}: accuracy {right:.3f}, batches {batches}", flush=True)


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one batch, as long as its longest text."""
    words = [text["input_ids"] for text in batch]
    labels = pad_sequence(words, batch_first=True, padding_value=PADDING)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != PADDING).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a round")
    parser.add_argument("--slow", type=int, help="a rank that takes 0.1 ms more per word")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, num_train_epochs=options.epochs, learning_rate=3e-3, use_cpu=not torch.cuda.is_available(),
            save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
            gradient_accumulation_steps=options.accumulate, train_sampling_strategy="batch_rebalance",
            per_device_train_batch_size=64,  # what a rank's memory holds; its share is what it can finish in time
        )  # fmt: skip
        torch.set_num_threads(1)
        torch.manual_seed(0)
        training, test = ([{"input_ids": text} for text in texts(count, seed)] for count, seed in ((1500, 1), (200, 2)))
        model = Slow(LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        ))  # fmt: skip
        model.seconds = 1e-4 if arguments.process_index == options.slow else 0.0
        trainer = BalancedTrainer(
            model=model, args=arguments, train_dataset=training, data_collator=padded,
            balance=LoadBalance("lb-bsp", global_batch=64),  # which is the default policy
        )  # fmt: skip
        trainer.add_callback(PrintAccuracy(trainer.balance, test))
        trainer.train()
        trainer.balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
