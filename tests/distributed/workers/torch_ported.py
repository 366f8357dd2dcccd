"""One rank of training loops in the shapes that other people's scripts have, with one sample more than whole rounds."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_common import refusal

from hvd_hetero.policies import BSP, NonBlocking
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, SyncBatchNorm, average_by_samples

BATCH = 4  # of a rank
SAMPLES = 2 * BATCH * 2 + 1  # on two ranks: a round of 8, and one of 9
EPOCHS = 2
GENERATOR = torch.Generator().manual_seed(5)
IMAGES = torch.randn(SAMPLES, 1, 6, 6, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)
DATA = TensorDataset(IMAGES, LABELS)


def net(seed: int = 0, norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4) if norm else torch.nn.Identity(), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.Linear(64, 3),
    ).double()  # fmt: skip


def rounds_of_one_process() -> Iterator[list[int]]:
    """The samples of each update."""
    for _ in range(EPOCHS):
        yield list(range(BATCH * 2))
        yield list(range(BATCH * 2, SAMPLES))


def flat(*models: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def outcome(mine: torch.Tensor, alone: torch.Tensor, start: torch.Tensor, **more: Any) -> dict[str, Any]:
    everywhere = hvd.allgather(mine[None], name="spread")
    return {
        "off": float((mine - alone).abs().max()),
        "spread": float((everywhere - everywhere[0]).abs().max()),
        "moved": float((start - alone).abs().max()),
        **more,
    }


def horovods_mnist() -> dict[str, Any]:
    """Broadcasts before wrapping; test data by a sampler, whose metrics are averaged between the epochs."""
    model = net()
    balance = LoadBalance("bsp", global_batch=BATCH * hvd.size())
    train_loader = BalancedLoader(DATA, balance)
    test_sampler = DistributedSampler(DATA, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(DATA, batch_size=5, sampler=test_sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = DistributedOptimizer(
        optimizer, balance, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        train_loader.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss = 0.0
        for data, target in test_loader:
            test_loss += functional.cross_entropy(model(data), target, reduction="sum").item()
        losses.append(hvd.allreduce(torch.tensor(test_loss / len(test_sampler)), name="avg_loss").item())
    alone = net()
    single = torch.optim.SGD(alone.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    for index in rounds_of_one_process():
        single.zero_grad()
        functional.cross_entropy(alone(IMAGES[index]), LABELS[index]).backward()
        single.step()
    return outcome(flat(model), flat(alone), flat(net()), losses=losses)


class ImageNetScript:
    """Warm-up for every batch, metrics for every batch, checkpoints of rank 0, parts of a batch one after the other."""

    warm_up_epochs = 1.5

    def __init__(self, directory: str, parts: int) -> None:
        self.model = net()
        self.file = os.path.join(directory, "checkpoint.pt")
        self.balance = LoadBalance(BSP(max_micro_batch=BATCH // parts), global_batch=BATCH * hvd.size())
        self.loader = BalancedLoader(DATA, self.balance)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.optimizer = DistributedOptimizer(optimizer, self.balance, named_parameters=self.model.named_parameters())
        self.optimizer.register_step_pre_hook(self.adjust_learning_rate)
        self.epoch = 0

    def adjust_learning_rate(self, *_: object) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.balance.rounds)

    def rate(self, rounds: int) -> float:
        """Of the update with that number; they are counted from 1."""
        return 0.1 * min(1.0, rounds / (self.warm_up_epochs * len(self.loader)))

    def train(self) -> dict[str, float]:
        sums, samples = {"loss": 0.0, "accuracy": 0.0}, 0
        for data, target in self.loader:
            self.optimizer.zero_grad()
            output = self.model(data)
            loss = functional.cross_entropy(output, target)
            loss.backward()
            self.optimizer.step()
            sums["loss"] += loss.item() * len(data)
            sums["accuracy"] += (output.argmax(1) == target).sum().item()
            samples += len(data)
        return average_by_samples({name: total / max(samples, 1) for name, total in sums.items()}, samples)

    def save(self) -> None:
        if hvd.rank() == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.file)

    def resume(self) -> None:
        """On rank 0 alone, once the optimizer is wrapped; then as in Horovod's scripts."""
        if hvd.rank() == 0:
            checkpoint = torch.load(self.file)
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)


def horovods_imagenet(parts: int = 1) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        script = ImageNetScript(directory, parts)
        first = script.train()
        script.save()
        state = script.balance.state_dict()
        other = ImageNetScript(directory, parts)
        other.balance.load_state_dict(state)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.fill_(float(hvd.rank()))
        other.resume()
        second = other.train()
    alone, rates, losses = net(), [], []
    single = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for number, index in enumerate(rounds_of_one_process()):
        single.param_groups[0]["lr"] = script.rate(number + 1)
        rates.append(single.param_groups[0]["lr"])
        single.zero_grad()
        loss = functional.cross_entropy(alone(IMAGES[index]), LABELS[index])
        loss.backward()
        single.step()
        losses.append(loss.item() * len(index))
    means = [sum(losses[i : i + len(script.loader)]) / SAMPLES for i in (0, len(script.loader))]
    return outcome(
        flat(other.model), flat(alone), flat(net()),
        losses_off=[abs(first["loss"] - means[0]), abs(second["loss"] - means[1])], rates=len(set(rates)),
    )  # fmt: skip


def horovods_imagenet_in_parts() -> dict[str, Any]:
    return horovods_imagenet(parts=2)


class Numbered(Dataset):
    """Images with their numbers, from which the noise of each is drawn: whoever holds it draws the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return IMAGES[i].flatten(), i


def noise(numbers: torch.Tensor, epoch: int) -> torch.Tensor:
    draws = [torch.Generator().manual_seed(100 * epoch + int(i)) for i in numbers]
    return torch.stack([torch.randn(4, generator=draw, dtype=torch.float64) for draw in draws])


def adversaries(norm: bool = False) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(1)
    discriminator = torch.nn.Sequential(
        torch.nn.Linear(36, 8, bias=not norm), torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity(),
        torch.nn.LeakyReLU(0.2), torch.nn.Linear(8, 1), torch.nn.Sigmoid(),
    )  # fmt: skip
    generator = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=not norm), torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity(),
        torch.nn.ReLU(), torch.nn.Linear(8, 36), torch.nn.Tanh(),
    )  # fmt: skip
    return discriminator.double(), generator.double()


def dcgan_step(
    d: torch.nn.Module, g: torch.nn.Module, optimizer_d: Any, optimizer_g: Any, real: torch.Tensor, z: torch.Tensor
) -> None:
    """Two backward passes of the one, and one of the other, which goes through the first, too."""
    ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
    d.zero_grad()
    functional.binary_cross_entropy(d(real), ones).backward()
    fake = g(z)
    functional.binary_cross_entropy(d(fake.detach()), zeros).backward()
    optimizer_d.step()
    g.zero_grad()
    functional.binary_cross_entropy(d(fake), ones).backward()
    optimizer_g.step()


def dcgan(norm: bool = False) -> dict[str, Any]:
    """With a norm over all ranks, too, which needs data on each."""
    d, g = adversaries(norm)
    balance = LoadBalance("lb-bsp", global_batch=BATCH * hvd.size())
    if norm:
        d, g = (SyncBatchNorm.convert_sync_batchnorm(m, balance, name) for m, name in ((d, "d"), (g, "g")))
    loader = BalancedLoader(Numbered(), balance)
    optimizer_d = DistributedOptimizer(
        torch.optim.Adam(d.parameters(), lr=0.02, betas=(0.5, 0.999)), balance, d.named_parameters()
    )
    optimizer_g = DistributedOptimizer(
        torch.optim.Adam(g.parameters(), lr=0.02, betas=(0.5, 0.999)), balance.also(), g.named_parameters()
    )
    bodies = 0
    for epoch in range(EPOCHS):
        for real, numbers in loader:
            dcgan_step(d, g, optimizer_d, optimizer_g, real, noise(numbers, epoch))
            bodies += 1
    alone_d, alone_g = adversaries(norm)
    single_d = torch.optim.Adam(alone_d.parameters(), lr=0.02, betas=(0.5, 0.999))
    single_g = torch.optim.Adam(alone_g.parameters(), lr=0.02, betas=(0.5, 0.999))
    for number, index in enumerate(rounds_of_one_process()):
        z = noise(torch.tensor(index), number // 2)
        dcgan_step(alone_d, alone_g, single_d, single_g, IMAGES[index].flatten(1), z)
    return outcome(
        flat(d, g), flat(alone_d, alone_g), flat(*adversaries(norm)), bodies=hvd.allgather_object(bodies),
        rounds=balance.rounds,
    )  # fmt: skip


def dcgan_with_batch_norm() -> dict[str, Any]:
    return dcgan(norm=True)


def two_optimizers_of_one_loss() -> dict[str, Any]:
    """Of one backward pass, and so in rounds of several micro-batches, too."""

    def optimizers(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[4].parameters(), lr=0.02)

    model = net()
    balance = LoadBalance(BSP(max_micro_batch=3), global_batch=BATCH * hvd.size())
    loader = BalancedLoader(DATA, balance)
    first, second = optimizers(model)
    first = DistributedOptimizer(first, balance)
    second = DistributedOptimizer(second, balance.also())
    for _ in range(EPOCHS):
        for data, target in loader:
            functional.cross_entropy(model(data), target).backward()
            first.step()
            second.step()
    alone = net()
    singles = optimizers(alone)
    for index in rounds_of_one_process():
        alone.zero_grad()
        functional.cross_entropy(alone(IMAGES[index]), LABELS[index]).backward()
        for single in singles:
            single.step()
    return outcome(flat(model), flat(alone), flat(net()))


def clipped(
    model: torch.nn.Module, clip: Callable[..., object] = torch.nn.utils.clip_grad_norm_
) -> Callable[..., None]:
    """A step hook."""

    def hook(*_: object) -> None:
        clip(model.parameters(), 0.1)

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


def hugging_face(policy: Any = "bsp") -> dict[str, Any]:
    """The order backward, step, zero_grad; clipping; a schedule for every step."""
    model = net()
    balance = LoadBalance(policy, global_batch=BATCH * hvd.size())
    loader = BalancedLoader(DATA, balance)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), balance)
    scheduler = linear_decay(optimizer)
    optimizer.register_step_pre_hook(clipped(model))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    for _ in range(EPOCHS):
        for data, target in loader:
            loss = functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(flat(model), flat(alone_with_clipping_and_decay()), flat(net()), rate=scheduler.get_last_lr()[0])


def hugging_face_accumulates() -> dict[str, Any]:
    return hugging_face(BSP(max_micro_batch=3))


def accelerates() -> dict[str, Any]:
    """Its optimizer, its ``backward`` and its clipping; the loader is not prepared, which is sharing out already."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    balance = LoadBalance("bsp", global_batch=BATCH * hvd.size())
    loader = BalancedLoader(DATA, balance)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), balance)
    scheduler = linear_decay(optimizer)
    optimizer.register_step_pre_hook(clipped(model, accelerator.clip_grad_norm_))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(EPOCHS):
        for data, target in loader:
            loss = functional.cross_entropy(model(data), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return outcome(flat(model), flat(alone_with_clipping_and_decay()), flat(net()), processes=accelerator.num_processes)


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


Step = Callable[[torch.nn.Module, DistributedOptimizer, torch.Tensor, torch.Tensor], object]


def plain(model: torch.nn.Module, optimizer: DistributedOptimizer, data: torch.Tensor, target: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def a_metric_averaged(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    hvd.allreduce(plain(model, optimizer, *batch), name="train_loss")


def a_metric_averaged_by_samples(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    average_by_samples(plain(model, optimizer, *batch), len(batch[0]))


def a_schedule(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    plain(model, optimizer, *batch)
    optimizer.param_groups[0]["lr"] *= 0.9


def a_warm_up(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    optimizer.param_groups[0]["lr"] *= 1.1
    plain(model, optimizer, *batch)


def weights_clamped(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    plain(model, optimizer, *batch)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def gradients_clipped(model: torch.nn.Module, optimizer: DistributedOptimizer, *batch: torch.Tensor) -> None:
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    if optimizer.synchronize():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with optimizer.skip_synchronize():
        optimizer.step()


def trained(step: Step, policy: Any = "bsp") -> None:
    """Two epochs with this step in the body of the loop."""
    model = net()
    balance = LoadBalance(policy, global_batch=BATCH * hvd.size())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), balance)
    loader = BalancedLoader(DATA, balance)
    for _ in range(EPOCHS):
        for data, target in loader:
            step(model, optimizer, data, target)
    assert balance.rounds == EPOCHS * len(loader)


def another_training() -> None:
    """With data of its own making."""
    d, g = adversaries()
    balance, other = (LoadBalance("bsp", global_batch=BATCH * hvd.size()) for _ in range(2))
    optimizer_d = DistributedOptimizer(torch.optim.SGD(d.parameters(), lr=0.1), balance)
    optimizer_g = DistributedOptimizer(torch.optim.SGD(g.parameters(), lr=0.1), other)
    for real, numbers in BalancedLoader(Numbered(), balance):
        d(real).mean().backward()
        optimizer_d.step()
        other.batch(len(real))
        g(noise(numbers, 0)).mean().backward()
        optimizer_g.step()


def mistakes() -> dict[str, str]:
    """In the body of a loop, which runs as often on all ranks."""
    steps: list[Step] = [
        a_metric_averaged, a_metric_averaged_by_samples, a_schedule, a_warm_up, weights_clamped, gradients_clipped,
    ]  # fmt: skip
    return {
        **{step.__name__: refusal(lambda step=step: trained(step)) for step in steps},
        "another_training": refusal(another_training),
    }


def several_optimizers_refused() -> dict[str, str]:
    def train(policy: Any, order: str) -> None:
        d, g = adversaries()
        balance = LoadBalance(policy, global_batch=BATCH * hvd.size())
        loader = BalancedLoader(Numbered(), balance)
        optimizers = {
            "d": DistributedOptimizer(torch.optim.SGD(d.parameters(), lr=0.1), balance),
            "g": DistributedOptimizer(torch.optim.SGD(g.parameters(), lr=0.1), balance.also()),
        }
        for real, numbers in loader:
            losses = {"d": lambda: d(real).mean(), "g": lambda: -d(g(noise(numbers, 0))).mean()}  # noqa: B023
            for which in order:
                losses[which]().backward()
                optimizers[which].step()

    def balance(policy: Any = "bsp") -> LoadBalance:
        return LoadBalance(policy, global_batch=BATCH * hvd.size())

    def twice() -> None:
        serves = balance()
        for _ in range(2):
            DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=0.1), serves)

    return {
        "twice": refusal(twice),
        "other order": refusal(lambda: train("bsp", "gd")),
        "forgotten": refusal(lambda: train("bsp", "d")),
        "in turn, in micro-batches": refusal(lambda: train(BSP(max_micro_batch=2), "dg")),
        "non-blocking": refusal(lambda: balance(NonBlocking(4)).also()),
        "of the second": refusal(lambda: balance().also().also()),
        "the loader of the second": refusal(lambda: BalancedLoader(DATA, balance().also())),
    }


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    horovods_mnist, horovods_imagenet, horovods_imagenet_in_parts, dcgan, dcgan_with_batch_norm,
    two_optimizers_of_one_loss, hugging_face, hugging_face_accumulates, accelerates, lightning, transformers_trainer,
    mistakes, several_optimizers_refused,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in SCENARIOS})
