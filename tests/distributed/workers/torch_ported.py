"""One rank of other people's trainers around our optimizer, with one sample more than whole rounds."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch.nn import functional
from torch.utils.data import TensorDataset
from torch_common import flat

from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

BATCH = 4  # of a rank
SAMPLES = 2 * BATCH * 2 + 1  # on two ranks: a round of 8, and one of 9
EPOCHS = 2
GENERATOR = torch.Generator().manual_seed(5)
IMAGES = torch.randn(SAMPLES, 1, 6, 6, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)
DATA = TensorDataset(IMAGES, LABELS)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    ).double()  # fmt: skip


def rounds_of_one_process() -> Iterator[list[int]]:
    """The samples of each update."""
    for _ in range(EPOCHS):
        yield list(range(BATCH * 2))
        yield list(range(BATCH * 2, SAMPLES))


def outcome(mine: torch.Tensor, alone: torch.Tensor, start: torch.Tensor, **more: Any) -> dict[str, Any]:
    everywhere = hvd.allgather(mine[None], name="spread")
    return {
        "off": float((mine - alone).abs().max()),
        "spread": float((everywhere - everywhere[0]).abs().max()),
        "moved": float((start - alone).abs().max()),
        **more,
    }


def clipped(model: torch.nn.Module) -> Callable[..., None]:
    """A step hook."""

    def hook(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return hook


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 7))


def alone_with_clipping_and_decay() -> torch.nn.Module:
    alone = net()
    single = torch.optim.AdamW(alone.parameters(), lr=0.02)
    scheduler = linear_decay(single)
    for index in rounds_of_one_process():
        functional.cross_entropy(alone(IMAGES[index]), LABELS[index]).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        single.step()
        scheduler.step()
        single.zero_grad()
    return alone


def lightning() -> dict[str, Any]:
    """Its Trainer, which calls ``step(closure)``; one process each, as far as it knows."""
    import pytorch_lightning

    balance = LoadBalance("bsp", global_batch=BATCH * hvd.size())

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen = 0

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            data, target = batch
            self.seen += len(data)
            return functional.cross_entropy(self.net(data), target)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = DistributedOptimizer(torch.optim.AdamW(self.parameters(), lr=0.02), balance)
            scheduler = linear_decay(optimizer)
            optimizer.register_step_pre_hook(clipped(self))
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
            return optimizer

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, train_dataloaders=BalancedLoader(DATA, balance))
    return outcome(
        flat(module), flat(alone_with_clipping_and_decay()), flat(net()), seen=hvd.allgather_object(module.seen),
        rounds=balance.rounds,
    )  # fmt: skip


def transformers_trainer() -> dict[str, Any]:
    """It clips in its loop, at infinity where told not to: in a hook instead, as the page on porting says."""
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, data: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": functional.cross_entropy(self.net(data), labels)}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> BalancedLoader:  # type: ignore[override]
            return loader

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return dict(zip(("data", "labels"), torch.utils.data.default_collate(samples), strict=True))

    model = Model()
    balance = LoadBalance("bsp", global_batch=BATCH * hvd.size())
    loader = BalancedLoader(DATA, balance, collate_fn=collate, weight_of=lambda batch: len(batch["labels"]))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), balance)
    scheduler = linear_decay(optimizer)
    optimizer.register_step_pre_hook(clipped(model))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    constant = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(net().parameters(), lr=1.0), lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, num_train_epochs=EPOCHS, max_grad_norm=0, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, optimizers=(optimizer, constant))
        trainer.accelerator.clip_grad_norm_ = lambda *_, **__: None  # type: ignore[method-assign]
        trainer.train()
    return outcome(flat(model), flat(alone_with_clipping_and_decay()), flat(net()), rounds=balance.rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {"lightning": lightning, "transformers": transformers_trainer})
