"""What stands around a training loop, on one rank: batch norm over all, mixed precision, compression."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from every_round import EveryRoundAnother
from ranks import DEVICE, OVER_TORCH, hvd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch_common import flat, spread

from hvd_hetero.policies import Policy, StaticAllocation
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.session import balancer_of
from hvd_hetero.telemetry import Telemetry, read_ledger
from hvd_hetero.telemetry.ledger_reader import seed_generators
from hvd_hetero.testing.rank import RUN_DIR
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance, SyncBatchNorm

SAMPLES, ROUNDS = 25, 12
GENERATOR = torch.Generator(torch.get_default_device()).manual_seed(3)
X = torch.randn(SAMPLES, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def static() -> Policy:
    return StaticAllocation([1, 3, 2, 1][: hvd.size()])


class Job:
    def __init__(
        self, policy: Policy, model: torch.nn.Module, rounds: int = ROUNDS, normalises: bool = False, **options: Any
    ) -> None:
        self.balance = LoadBalance(policy, global_batch=12)
        self.model = model = SyncBatchNorm.convert_sync_batchnorm(model, self.balance) if normalises else model
        dtype = next(model.parameters()).dtype
        data = TensorDataset(X[:24].to(dtype), Y[:24].to(dtype), torch.arange(24))
        self.loader = BalancedLoader(data, self.balance, shuffle=True, stop_at=rounds)
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = DistributedOptimizer(inner, self.balance, model.named_parameters(), **options)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        while self.balance.rounds < self.loader.stop_at:
            for batch in self.loader:
                self.optimizer.zero_grad()
                yield batch

    def plain(self) -> torch.nn.Module:
        for x, y, _ in self.batches():
            functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
        return self.model


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return float((flat(a) - flat(b)).abs().max())


def an_infinity_on_one_rank_is_skipped_by_all() -> dict:
    steps: list[int] = []
    job = Job(static(), net(torch.float64))
    job.optimizer.register_step_post_hook(lambda *_: steps.append(job.balance.rounds))
    scaler = GradScaler(DEVICE, optimizer=job.optimizer, init_scale=1024.0, growth_interval=1000)
    for x, y, _ in job.batches():
        infinite = job.balance.rounds == 3 and hvd.rank() == 1
        scaler.scale(functional.mse_loss(job.model(x), y) * (math.inf if infinite else 1.0)).backward()
        scaler.step(job.optimizer)
        scaler.update()
    return {
        "spread": spread(job.model),
        "scales": hvd.allgather_object(scaler.get_scale()),
        "missing": sorted(set(range(1, ROUNDS + 1)) - set(steps)),
    }


def bfloat16_autocast() -> dict:
    """Parameters stay float32, losses fall, and ranks hold the same bits."""
    job = Job(static(), net())
    for x, y, _ in job.batches():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            prediction = job.model(x)
        assert prediction.dtype == torch.bfloat16
        functional.mse_loss(prediction.float(), y).backward()
        job.optimizer.step()
    plain = Job(static(), net()).plain()
    losses = [functional.mse_loss(m(X.float()), Y.float()).item() for m in (net(), job.model, plain)]
    return {"losses": losses, "spread": spread(job.model), "off": difference(job.model, plain)}


def compression() -> dict:
    """Gradients in 16 bits are near those in 32; samples are counted exactly, though no half holds their number."""
    narrow = Job(static(), net(), compression=hvd.Compression.fp16).plain()
    wide = Job(static(), net(), compression=hvd.Compression.none).plain()
    model = torch.nn.Linear(1, 1)
    count = 2049 + 3 * hvd.rank()
    balance = LoadBalance("bsp", global_batch=4101)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, balance, compression=hvd.Compression.fp16)
    balance.batch(count)
    functional.mse_loss(model(torch.ones(count, 1)), torch.zeros(count, 1)).backward()
    optimizer.step()
    return {
        "difference": difference(narrow, wide),
        "spread": spread(narrow),
        "counted": balancer_of(balance).finished.table.column("samples").tolist(),
    }


class Uneven(Policy):
    """One micro-batch for each, of another size in every round."""

    name = "uneven"
    round = 0

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        shares = [1 + (self.round + 3 * i) % 5 for i in range(workers - 1)]
        return RoundPlan.of([*shares, global_batch - sum(shares)], None)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.round += 1
        return self.first(plan.workers, plan.total)


class UnevenShares(Uneven):
    shares_alone: ClassVar[bool] = True


def normed() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 6)), torch.nn.Conv1d(1, 3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4, momentum=None),
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 1),
    ).double()  # fmt: skip
    with torch.no_grad():
        for layer in (model[2], model[6]):
            layer.weight.uniform_(0.5, 2.0)
            layer.bias.uniform_(-1.0, 1.0)
    return model


def batch_norm_over_all_ranks() -> dict:
    rounds = 20
    job = Job(Uneven(), normed(), rounds, normalises=True)
    model = job.model
    seen: list[list[int]] = [[] for _ in range(rounds)]
    for x, y, index in job.batches():
        seen[job.balance.rounds] += index.tolist()
        functional.mse_loss(model(x), y).backward()
        job.optimizer.step()
    parts = hvd.allgather_object(seen)
    alone = normed()
    single = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for r in range(rounds):
        index = [i for part in parts for i in part[r]]
        single.zero_grad()
        functional.mse_loss(alone(X[index]), Y[index]).backward()
        single.step()
    pairs = zip(model.state_dict().items(), alone.state_dict().items(), strict=True)
    differences = {name: float((a - b).abs().max()) for (name, a), (other, b) in pairs if name == other}
    model.eval()
    alone.eval()
    return {
        "differences": differences,
        "names": len(alone.state_dict()),
        "moved": difference(alone, normed()),
        "evaluated": (model(X) - alone(X)).abs().max().item(),
        "shares": [[len(part[r]) for part in parts] for r in range(rounds)],
        "spread": spread(model),
    }


def dropping() -> torch.nn.Module:
    torch.manual_seed(2)
    layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).double()


def loss_with_random_numbers(model: torch.nn.Module, index: torch.Tensor | list[int]) -> torch.Tensor:
    """Return a loss that draws numbers from PyTorch, NumPy and Python, as dropout and mixup do."""
    return functional.mse_loss(model(X[index] * np.random.uniform(0.5, 1.5) + random.random()), Y[index])


def a_ledger_is_replayed() -> dict:
    """Train with evaluations between epochs, by our reducer and beside the user's; replay it on rank 0."""
    return {name: replayed(name) for name in ("own", "beside")}


def replayed(reducer: str) -> dict:
    path = Path(os.environ[RUN_DIR], f"{reducer}.jsonl")
    policy = EveryRoundAnother(3) if reducer == "own" else UnevenShares()
    model, telemetry = dropping(), Telemetry(path, ledger=True)
    balance = LoadBalance(policy, global_batch=20, telemetry=telemetry)
    loader = BalancedLoader(torch.arange(SAMPLES - 1), balance, shuffle=True)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained = model
    if reducer == "own":
        optimizer = DistributedOptimizer(optimizer, balance, model.named_parameters())
    elif OVER_TORCH:
        trained = DistributedDataParallel(model)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(8):
        for index in loader:
            optimizer.zero_grad()
            balance.scale(loss_with_random_numbers(trained, index)).backward()
            optimizer.step()
        balance.evaluate(TensorDataset(X), lambda batch: {"mean": model(batch[0]).mean() * random.random()})
    balance.close()
    if hvd.rank() > 0:
        return {}
    again = dropping()
    alone = torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9)
    parts = [*read_ledger(path)]
    for part in parts:
        seed_generators(part.seed)
        (part.share * loss_with_random_numbers(again, part.indices)).backward()
        if part.last:
            alone.step()
            alone.zero_grad()
    return {
        "difference": difference(model, again),
        "moved": difference(model, dropping()),
        "shares": len({(part.rank, len(part.indices)) for part in parts}),
        "visits": sorted(i for part in parts for i in part.indices),
    }


CASES = {
    each.__name__: each
    for each in (
        an_infinity_on_one_rank_is_skipped_by_all, bfloat16_autocast, compression, batch_norm_over_all_ranks,
        a_ledger_is_replayed,
    )
}  # fmt: skip
