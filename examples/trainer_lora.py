"""Fine-tune a language model by a LoRA adapter on ranks of unequal speed, and stop early by a shared evaluation.

    torchrun --nproc-per-node 2 examples/trainer_lora.py

It needs transformers, accelerate and peft, and downloads nothing: the model is small and random, and the texts are
those of ``torch_text.py``. Only the adapter is trained and reduced. Each word of all ranks counts alike. After each
epoch the ranks share the evaluation by their speeds; all see the same figures, so they stop in the same epoch, and load
the same best checkpoint. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch_text import PADDING, WORDS, texts
from trainer_text import Slow, padded
from transformers import EarlyStoppingCallback, LlamaConfig, TrainerCallback, TrainingArguments

from torch_hooks import LoadBalance
from torch_hooks.trainer import BalancedTrainer


class PrintAccuracy(TrainerCallback):
    """Print what an evaluation has found, and the batches."""

    def __init__(self, balance: LoadBalance) -> None:
        self.balance = balance

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero:
            batches = " + ".join(map(str, self.balance.plan))
            print(f"epoch {state.epoch:.0f}: accuracy {metrics['eval_accuracy']:.3f}, batches {batches}", flush=True)


def accuracy(found: Any) -> dict[str, float]:
    """Return how many of the next words are guessed."""
    guessed, following = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((guessed == following)[following != PADDING].mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8, help="at most")
    parser.add_argument("--slow", type=int, help="a rank that takes 0.1 ms more per word")
    parser.add_argument("--out", default="trainer_lora", help="a folder for checkpoints, the same on all ranks")
    options = parser.parse_args()

    arguments = TrainingArguments(
        options.out, num_train_epochs=options.epochs, learning_rate=1e-2, use_cpu=not torch.cuda.is_available(),
        report_to=[], disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        per_device_train_batch_size=64, per_device_eval_batch_size=32, label_names=["labels"],
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="accuracy", ddp_find_unused_parameters=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, test = ([{"input_ids": text} for text in texts(count, seed)] for count, seed in ((1500, 1), (200, 2)))
    model = Slow(LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ))  # fmt: skip
    model.seconds = 1e-4 if arguments.process_index == options.slow else 0.0
    adapter = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head", "embed_tokens"])
    trainer = BalancedTrainer(
        model=get_peft_model(model, adapter), args=arguments, train_dataset=training, eval_dataset=test,
        data_collator=padded, compute_metrics=accuracy, callbacks=[EarlyStoppingCallback(2)],
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        balance=LoadBalance("lb-bsp", global_batch=64),
    )  # fmt: skip
    trainer.add_callback(PrintAccuracy(trainer.balance))
    trainer.train()
    trainer.balance.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
