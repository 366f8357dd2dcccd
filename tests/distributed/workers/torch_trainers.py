"""Trainings by other people's trainers, beside one process that does the same batches."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

from ranks import hvd

from hvd_hetero.testing.rank import RUN_DIR

for name in ("RANK", "LOCAL_RANK"):
    os.environ[name] = os.environ["HOROVOD_RANK"]
os.environ |= {"WORLD_SIZE": os.environ["HOROVOD_SIZE"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import pytorch_lightning  # noqa: E402 - it looks at these variables
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from pool import serve  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch_beside import Indexed, Shifting  # noqa: E402
from torch_common import refusal  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from hvd_hetero import late_tables  # noqa: E402
from hvd_hetero.policies import Goodput  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from torch_hooks import BalancedLoader, EvaluationLoader, LoadBalance  # noqa: E402
from torch_hooks.lightning import ScaleLoss  # noqa: E402
from torch_hooks.trainer import BalancedTrainer  # noqa: E402

BATCH, SAMPLES, VALIDATED, RATE, CLIP = 12, 12 * 4 + 3, 17, 1e-2, 0.5
SHAPE: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "tokens":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    if kind == "adapter":
        return get_peft_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), LoraConfig(task_type="CAUSAL_LM", r=2)).double()
    return BertForSequenceClassification(
        BertConfig(**SHAPE, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).double()


def batch_of(kind: str, indices: list[int]) -> dict[str, torch.Tensor]:
    """Sentences of unequal lengths; in some, half of the words are no targets."""
    lengths = [length_of(i) for i in indices]
    words, labels = torch.zeros(len(indices), max(lengths), dtype=torch.long), torch.tensor([i % 3 for i in indices])
    for row, i, length in zip(words, indices, lengths, strict=True):
        row[:length] = torch.randint(1, 23, (length,), generator=torch.Generator().manual_seed(i))
    if kind != "samples":
        labels = words.masked_fill(words == 0, -100)
        labels[[i % 4 == 0 for i in indices], :4] = -100
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels}


def length_of(i: int) -> int:
    return 4 + 7 * i % 9


def texts(samples: int) -> list[Any]:
    """Samples whose lengths a Trainer finds."""
    return [{"input_ids": [0] * length_of(i), "index": i} for i in range(samples)]


def indices(parts: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    for begin, end in parts:
        yield from ({"index": i} for i in range(begin, end))


def numbers(samples: int) -> Any:
    """A stream of Hugging Face's, of unequal shards."""
    ends = [0, 20, 21, 34, 34, samples]
    return datasets.IterableDataset.from_generator(indices, gen_kwargs={"parts": list(pairwise(ends))})


def trainer_of(kind: str, seen: list[list[int]], micro_batches: int, **options: Any) -> BalancedTrainer:
    data = options.pop("data", texts if "train_sampling_strategy" in options else Indexed)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        seen.append([each if data is Indexed else each["index"] for each in samples])
        return batch_of(kind, seen[-1])

    balance = options.pop("balance", None) or LoadBalance(Shifting(max_micro_batch=[9, 10]), global_batch=BATCH)
    of_loader = {name: options.pop(name) for name in ("cost_of", "stream") if name in options}
    arguments = TrainingArguments(
        os.path.join(os.environ[RUN_DIR], options.pop("path", "none")), use_cpu=True, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=micro_batches, optim="adamw_torch", learning_rate=RATE, max_grad_norm=CLIP,
        lr_scheduler_type="constant", remove_unused_columns=False,
        **{"save_strategy": "no", "logging_steps": 1} | options,
    )  # fmt: skip
    return BalancedTrainer(
        model_of(kind), arguments, train_dataset=data(SAMPLES), eval_dataset=Indexed(7) if data is numbers else data(7),
        data_collator=collate, balance=balance, **of_loader,
    )  # fmt: skip


def together(seen: list[list[int]], micro_batches: int, skip: int = 0) -> tuple[list[list[int]], int]:
    """Samples of each round on all ranks, and how many splits there were."""
    parts = [seen[at : at + micro_batches] for at in range(skip, len(seen), micro_batches)]
    everywhere = list(zip(*hvd.allgather_object(parts, name="parts"), strict=True))
    assert all(len(part) == micro_batches for ranks in everywhere for part in ranks)
    rounds = [[i for part in ranks for batch in part for i in batch] for ranks in everywhere]
    return rounds, len({tuple(sum(map(len, part)) for part in ranks) for ranks in everywhere})


def reference(kind: str, rounds: list[list[int]]) -> tuple[torch.Tensor, list[float]]:
    model, losses = model_of(kind), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for indices in rounds:
        optimizer.zero_grad()
        loss = model(**batch_of(kind, indices)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss))
    return flat(model), losses


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def each_once(rounds: list[list[int]], epochs: int) -> bool:
    samples = [i for indices in rounds for i in indices]
    return sorted(samples) == sorted(list(range(SAMPLES)) * epochs)


def trained(kind: str, micro_batches: int, **more: Any) -> dict[str, Any]:
    """Two epochs, with an evaluation in the midst of each."""
    seen: list[list[int]] = []
    options = more | {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    trainer = trainer_of(kind, seen, micro_batches, num_train_epochs=2, **options)
    evaluated = trainer.evaluation_loop
    count: list[int] = []

    def evaluate(*args: Any, **named: Any) -> Any:
        before = len(seen)
        outcome = evaluated(*args, **named)
        count.append(len(seen) - before)
        del seen[before:]  # batches of the evaluation
        return outcome

    trainer.evaluation_loop = evaluate  # type: ignore[method-assign]
    trainer.train()
    largest = max(map(len, seen))
    rounds, splits = together(seen, micro_batches)
    expected, losses = reference(kind, rounds)
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "difference": float((flat(trainer.model) - expected).abs().max()),
        "losses": max(abs(log - loss) for log, loss in zip(logged, losses, strict=True)),
        "splits": splits,
        "rounds": len(rounds),
        "once": each_once(rounds, 2),
        "evaluated": len(count),
        "steps": trainer.state.global_step,
        "planned": trainer.state.max_steps,
        "largest": hvd.allgather_object(largest, name="largest"),
    }


class Fails(torch.autograd.Function):
    """Runs out of memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")


def out_of_memory(kind: str, micro_batches: int, *, backward: bool = False) -> dict[str, Any]:
    """From round 3 on, rank 0 holds two samples. ``backward``: once that shows in the round's first backward pass."""
    seen: list[list[int]] = []
    trainer = trainer_of(kind, seen, micro_batches, num_train_epochs=2)
    balance, failed = balancer_of(trainer.balance), []
    forward, collate, done = trainer.model.forward, trainer.data_collator, defaultdict[int, set[int]](set)

    @wraps(forward)
    def fails(*args: Any, **named: Any) -> Any:
        if not (trainer.model.training and hvd.rank() == 0 and len(named["input_ids"]) > 2 and balance.rounds >= 3):
            return forward(*args, **named)
        failed.append(len(named["input_ids"]))
        if backward and len(failed) == 1:
            outcome = forward(*args, **named)
            outcome.loss = Fails.apply(outcome.loss)
            return outcome
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    def noted(samples: list[Any]) -> Any:
        batch = collate(samples)
        done[balance.rounds].update(seen[-1])  # a sample may be read again, in a part
        return batch

    trainer.model.forward, trainer.data_collator = fails, noted
    trainer.train()
    everywhere = hvd.allgather_object(dict(done), name="done")
    rounds = [sorted(i for of_rank in everywhere for i in of_rank[number]) for number in range(len(done))]
    expected, losses = reference(kind, rounds)
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "difference": float((flat(trainer.model) - expected).abs().max()),
        "losses": max(abs(log - loss) for log, loss in zip(logged, losses, strict=True)),
        "once": each_once(rounds, 2),
        "failed": hvd.allgather_object(len(failed), name="failed")[0],
        "largest": hvd.allgather_object(max(balance.plan().sizes(0)), name="largest"),
    }


def evaluated(samples: int, policy: Any = None) -> dict[str, Any]:
    """Figures and predictions of unequal parts, beside those of one process; it trains before, to learn speeds."""
    trainer = trainer_of("samples", [], 1, num_train_epochs=1, per_device_eval_batch_size=4)
    trainer.train()
    balancer = balancer_of(trainer.balance)
    balancer.finished = replace(balancer.finished, table=balancer.finished.table.replaced("samples_per_s", [3.0, 1.0]))
    shapes: list[Any] = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {"right": float((found.predictions.argmax(1) == found.label_ids).mean()), "rank": float(hvd.rank())}

    trainer.compute_metrics = metrics
    model, before = trainer.model, torch.get_rng_state()
    outcome, predicted = trainer.evaluate(Indexed(samples)), trainer.predict(Indexed(samples))
    kept = bool((before == torch.get_rng_state()).all())
    model.eval()
    with torch.no_grad():
        alone = model(**batch_of("samples", list(range(samples))))
    right = (alone.logits.argmax(1).numpy() == predicted.label_ids).mean()
    return {
        "figures": {name: outcome[f"eval_{name}"] for name in ("loss", "right", "rank")},
        "expected": {"loss": float(alone.loss), "right": float(right), "rank": 0.0},
        "apart": float(np.abs(alone.logits.numpy() - predicted.predictions).max()),
        "labels": predicted.label_ids.tolist() == [i % 3 for i in range(samples)],
        "shapes": shapes,
        "random state kept": kept,
        "restored": trainer.compute_metrics is metrics,
        "fails": refusal(lambda: trainer.evaluate(Broken(samples))),
    }


class Broken(Indexed):
    """Its last sample, which rank 1 has, cannot be read."""

    def __getitem__(self, i: int) -> int:
        if i == self.samples - 1:
            raise ValueError(f"sample {i} is not there")
        return i


def stopped_early() -> dict[str, Any]:
    """A training that an evaluation on unequal parts stops, and whose best checkpoint is loaded, on all ranks."""
    trainer = trainer_of(
        "samples", [], 1, num_train_epochs=9, path="early", save_strategy="epoch", eval_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer.add_callback(EarlyStoppingCallback(1))
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    best = trainer.state.best_global_step
    return {"losses": losses, "steps": trainer.state.global_step, "best": best, "flat": flat(trainer.model).tolist()}


def resumed(micro_batches: int) -> dict[str, Any]:
    """Trainings that stop in an epoch's midst, or end, and go on from their checkpoint, beside one that does not."""
    whole = trainer_of("tokens", [], micro_batches, num_train_epochs=3)
    whole.train()
    seen: list[list[int]] = []
    path = f"resumed{micro_batches}"
    trainer_of(
        "tokens", seen, micro_batches, max_steps=6, path=path, save_strategy="steps", save_steps=2,
    ).train()  # fmt: skip
    rounds, _ = together(seen, micro_batches)
    torch.distributed.barrier()
    again: list[list[int]] = []
    options = {"num_train_epochs": 3, "path": path, "logging_steps": 1}
    second = trainer_of("tokens", again, micro_batches, **options)
    assert len(second.get_train_dataloader()) >= 2, "whoever looks at it before changes nothing"
    second.train(resume_from_checkpoint=os.path.join(os.environ[RUN_DIR], path, "checkpoint-6"))
    rest, _ = together(again, micro_batches)
    return {
        "apart": float((flat(whole.model) - flat(second.model)).abs().max()),
        "once": each_once(rounds + rest, 3),
        "rounds": [len(rounds), len(rest)],
        "epochs": [log["epoch"] for log in second.state.log_history if "loss" in log][-2:],
    }


def streamed(stream: str, micro_batches: int) -> dict[str, Any]:
    """A training of two epochs of a stream, and one that stops in the midst of the second and is resumed."""
    options = {
        "data": numbers, "stream": stream, "max_steps": 8, "path": f"streamed {stream}", "save_strategy": "steps",
        "save_steps": 5,
    }  # fmt: skip
    former: list[list[int]] = []
    first = trainer_of("tokens", former, micro_batches, **options)
    first.train()
    latter: list[list[int]] = []
    second = trainer_of("tokens", latter, micro_batches, **options | {"dataloader_num_workers": 1})
    second.train(resume_from_checkpoint=os.path.join(os.environ[RUN_DIR], options["path"], "checkpoint-5"))
    whole, rest = together(former, micro_batches)[0], together(latter, micro_batches)[0]
    both = whole[:5] + rest
    return {
        "difference": float((flat(first.model) - reference("tokens", whole)[0]).abs().max()),
        "resumed: difference": float((flat(second.model) - reference("tokens", both)[0]).abs().max()),
        "once": [each_once(rounds[:4], 1) and each_once(rounds[4:], 1) for rounds in (whole, both)],
        "steps": [first.state.global_step, second.state.global_step],
    }


def by_cost(micro_batches: int, **how: Any) -> dict[str, Any]:
    """Equal shares, which then hold unequal numbers of samples."""
    return trained("tokens", micro_batches, balance=LoadBalance("bsp", global_batch=BATCH), **how)


def options() -> dict[str, Any]:
    """What a loader of the Trainer's own would heed."""
    trainer = trainer_of("tokens", [], 1, num_train_epochs=1, dataloader_drop_last=True, dataloader_num_workers=1)
    trainer.train()
    return {"steps": trainer.state.global_step, "rounds_ahead": balancer_of(trainer.balance).planner.rounds_ahead}


def adapting() -> LoadBalance:
    return LoadBalance("bsp", global_batch=Goodput(start=BATCH, least=BATCH, most=2 * BATCH))


def bounded(size: int, policy: Any) -> dict[str, Any]:
    return trained("samples", 1, per_device_train_batch_size=size, balance=LoadBalance(policy, global_batch=BATCH))


def too_small(size: int, micro_batches: int) -> str:
    options = {"per_device_train_batch_size": size, "num_train_epochs": 1}
    balance = LoadBalance(Shifting(), global_batch=BATCH)
    return refusal(lambda: trainer_of("samples", [], micro_batches, balance=balance, **options).train())


def refused() -> dict[str, str]:
    def of(**options: Any) -> str:
        return refusal(lambda: trainer_of("tokens", [], 1, **options))

    return {
        "tokens of a rank": of(average_tokens_across_devices=False),
        "too small": too_small(5, 1),
        "too small, in parts": too_small(1, 3),
        "lightning, too small": refusal(lambda: fitted(Module(), [], 1, policy=Shifting([3, 4]), max_epochs=1)),
        "lightning, too small, in parts": refusal(
            lambda: fitted(Module(), [], 3, policy=Shifting({"cpu": 1}), max_epochs=1)
        ),
        "a batch that adapts": of(balance=adapting()),
        "lightning and a batch that adapts": refusal(lambda: ScaleLoss(adapting())),
        "a size that is found": of(auto_find_batch_size=True),
        "lightning divides otherwise": refusal(lambda: fitted(Module(), [], 1, divided_by=3, max_epochs=1)),
        "lightning and a stream": refusal(lambda: fitted(Module(), [], 1, data=Stream(), max_epochs=1)),
        "a checkpoint of another trainer": refusal(elsewhere),
    }


class Module(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0)


class Validated(Module):
    """Logs its loss over the validation data, and notes what one process would log."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[tuple[float, float]] = []
        self.parts: list[list[int]] = [[]]
        self.val_loss = MeanMetric()

    def validation_step(self, batch: Any, number: int) -> None:
        self.parts[-1].extend(batch)
        self.val_loss.update(loss_of(self.net, batch), len(batch))
        self.log("val_loss", self.val_loss)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:  # of two batches
            self.parts = [[]]
            return
        self.alone = float(loss_of(self.net, range(VALIDATED)))
        self.parts.append([])

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.figures.append((float(self.trainer.callback_metrics["val_loss"]), self.alone))


def loss_of(net: torch.nn.Module, indices: Any) -> torch.Tensor:
    x = torch.tensor([[i % 3, i % 5, i % 7] for i in indices], dtype=torch.float64)
    return functional.mse_loss(net(x), x.sin().sum(1, keepdim=True))


def by_hand(rounds: list[list[int]]) -> torch.Tensor:
    module = Module()
    optimizer = module.configure_optimizers()
    for indices in rounds:
        optimizer.zero_grad()
        loss_of(module.net, indices).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
    return flat(module)


def lightning(micro_batches: int) -> dict[str, Any]:
    whole, seen, policy = Module(), [], Shifting([4, 3])
    fitted(whole, seen, micro_batches, policy=policy, max_epochs=3)
    rounds, splits = together(seen, micro_batches)
    path = os.path.join(os.environ[RUN_DIR], f"lightning{micro_batches}")
    first, second = Module(), Module()
    former: list[Any] = []
    save = pytorch_lightning.callbacks.ModelCheckpoint(path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    fitted(first, former, micro_batches, save, policy=policy, max_steps=6)
    torch.distributed.barrier()
    latter: list[Any] = []
    fitted(second, latter, micro_batches, policy=policy, max_epochs=3, resume=os.path.join(path, "step=6.ckpt"))
    both = together(former, micro_batches)[0] + together(latter, micro_batches)[0]
    own = [float(loss_of(Module().net, seen[0]))]
    return {
        "difference": float((flat(whole) - by_hand(rounds)).abs().max()),
        "splits": splits,
        "largest": hvd.allgather_object(max(map(len, seen)), name="largest"),
        "once": each_once(rounds, 3),
        "logs its own loss": whole.losses[:1] == own,
        "resumed: apart": float((flat(second) - flat(whole)).abs().max()),
        "resumed: once": each_once(both, 3),
    }


def lightning_validates() -> dict[str, Any]:
    """Early stopping and the best checkpoint by a loss over all ranks' parts, in the midst of epochs, too."""
    module, seen = Validated(), []
    path = os.path.join(os.environ[RUN_DIR], "best")
    save = pytorch_lightning.callbacks.ModelCheckpoint(path, monitor="val_loss", save_top_k=1, filename="{step}")
    stop = pytorch_lightning.callbacks.EarlyStopping("val_loss", patience=2)
    fitted(module, seen, 1, save, stop, max_epochs=6, val_check_interval=2, validates=True)
    rounds, _ = together(seen, 1)
    return {
        "apart": max(abs(told - alone) for told, alone in module.figures),
        "figures": [told for told, _ in module.figures],
        "parts": hvd.allgather_object(module.parts, name="validated"),
        "best": os.path.basename(save.best_model_path),
        "trained": len(rounds),
    }


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def elsewhere() -> None:
    options = {"data": numbers, "max_steps": 4, "path": "elsewhere", "save_strategy": "steps", "save_steps": 2}
    trainer_of("tokens", [], 1, **options).train()
    path = Path(os.environ[RUN_DIR], "elsewhere", "checkpoint-2")
    torch.distributed.barrier()
    if not hvd.rank():
        (path / "stream.pt").unlink()
    torch.distributed.barrier()
    trainer_of("tokens", [], 1, **options).train(resume_from_checkpoint=str(path))


def lightning_streamed() -> dict[str, Any]:
    """Two epochs of a stream of unknown length; and one that is stopped in the second, and goes on."""
    path = os.path.join(os.environ[RUN_DIR], "lightning, streamed")
    modules, seen = [Module(), Module()], [[], []]
    save = pytorch_lightning.callbacks.ModelCheckpoint(path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    fitted(modules[0], seen[0], 2, save, data=numbers(SAMPLES), max_steps=8)
    torch.distributed.barrier()
    resume = os.path.join(path, "step=6.ckpt")
    fitted(modules[1], seen[1], 2, data=numbers(SAMPLES), max_steps=8, resume=resume)
    whole, rest = together(seen[0], 2)[0], together(seen[1], 2)[0]
    both = whole[:6] + rest
    return {
        "once": [each_once(rounds[:4], 1) and each_once(rounds[4:], 1) for rounds in (whole, both)],
        "difference": float((flat(modules[0]) - by_hand(whole)).abs().max()),
        "resumed: difference": float((flat(modules[1]) - by_hand(both)).abs().max()),
    }


def fitted(
    module: Module,
    seen: list[Any],
    micro_batches: int,
    *callbacks: Any,
    resume: str | None = None,
    divided_by: int | None = None,
    data: Any = None,
    policy: Any = None,
    validates: bool = False,
    **options: Any,
) -> None:
    def collate(samples: list[Any]) -> list[int]:
        seen.append([each["index"] if isinstance(each, dict) else each for each in samples])
        return seen[-1]

    balance = LoadBalance(policy or Shifting(), global_batch=BATCH)
    order = {"stream": "whole"} if data else {"shuffle": True, "seed": 5}
    loader = BalancedLoader(
        data or Indexed(SAMPLES), balance, micro_batches=micro_batches, collate_fn=collate, **order
    )  # fmt: skip
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=hvd.size(), logger=False,
        accumulate_grad_batches=divided_by or micro_batches,
        gradient_clip_val=CLIP, enable_progress_bar=False, enable_checkpointing=bool(callbacks),
        callbacks=[ScaleLoss(balance), *callbacks], enable_model_summary=False, **options,
    )  # fmt: skip
    validation = EvaluationLoader(Indexed(VALIDATED), balance, 4, collate_fn=list) if validates else None
    trainer.fit(module, loader, validation, ckpt_path=resume)


def cases() -> dict[str, Callable[[], Any]]:
    late_tables._SUM_CPU_S = 0.0
    return {
        "refused": refused,
        "options": options,
        "bound by the Trainer": lambda: bounded(7, Shifting()),
        "bound by the Trainer, tight": lambda: bounded(6, Shifting()),
        "bound by name": lambda: bounded(2, Shifting(max_micro_batch={"cpu": 9})),
        "costs, group_by_length": lambda: by_cost(3, train_sampling_strategy="group_by_length"),
        "costs, cost_of": lambda: by_cost(1, cost_of=[length_of(i) for i in range(SAMPLES)]),
        "tokens, k = 1": lambda: trained("tokens", 1),
        "adapter, k = 2": lambda: trained("adapter", 2, balance=LoadBalance(Shifting([5, 4]), global_batch=BATCH)),
        "samples, k = 3": lambda: trained("samples", 3),
        "out of memory, tokens, k = 1": lambda: out_of_memory("tokens", 1),
        "out of memory, samples, k = 2": lambda: out_of_memory("samples", 2),
        "out of memory, adapter, k = 2, backward": lambda: out_of_memory("adapter", 2, backward=True),
        "resumed": lambda: resumed(3),
        "stream, whole": lambda: streamed("whole", 2),
        "stream, shard": lambda: streamed("shard", 2),
        "lightning, stream": lightning_streamed,
        "lightning": lambda: lightning(3),
        "lightning validates": lightning_validates,
        "evaluated": lambda: [evaluated(samples) for samples in (23, 2, 1)],
        "stopped early": stopped_early,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, cases())
