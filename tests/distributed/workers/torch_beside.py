"""Ranks whose gradients are reduced by DDP, FSDP2 or Horovod's own optimizer, with scaled losses."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pool import serve
from ranks import OVER_TORCH, hvd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_common import refusal

from hvd_hetero import late_tables
from hvd_hetero.policies import BSP, LBBSP, Goodput, Policy, StaticAllocation, goodput
from hvd_hetero.policies.policy import checked_micro_batch
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.session import balancer_of
from hvd_hetero.telemetry import read_run
from hvd_hetero.testing import CpuQuota
from hvd_hetero.testing.rank import RUN_DIR
from hvd_hetero.tools.report.build import report_of
from torch_hooks import BalancedLoader, LoadBalance, SavedTraining

SAMPLES, FEATURES, GLOBAL_BATCH, ROUNDS = 12 * 8 + 2, 6, 12, 30
CLIP = 0.5


class Shifting(Policy):
    """Other shares after each table, of one sample at least."""

    name = "shifting"
    shares_alone: ClassVar[bool] = True

    def __init__(self, max_micro_batch: Any = None) -> None:
        self.tables = 0
        if max_micro_batch is not None:
            self.max_micro_batch = checked_micro_batch(max_micro_batch)

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        return self._plan(workers, global_batch)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.tables += 1
        return self._plan(plan.workers, plan.total)

    def _plan(self, workers: int, total: int) -> RoundPlan:
        cuts = np.sort(np.random.default_rng(self.tables).choice(total - 1, workers - 1, replace=False)) + 1
        return RoundPlan.of(np.diff(cuts, prepend=0, append=total))


class Walking(Goodput):
    """Another batch after every table, whatever it costs."""

    def chosen(self, total: int, between: Any, seconds: Any) -> int:
        sizes = (12, 9, 18, 24)
        return sizes[(sizes.index(total) + 1) % len(sizes)]


def walking(learning_rate: Literal["adascale", "square-root"] = "adascale") -> Walking:
    return Walking(start=GLOBAL_BATCH, least=9, most=24, learning_rate=learning_rate)


class Indexed(torch.utils.data.Dataset):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> int:
        return i


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(FEATURES, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.outer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    optimizer: str = "momentum"
    policy: Callable[[], Policy] = Shifting
    micro_batches: int | None = None
    accumulate: bool = True
    clip: bool = False
    penalty: bool = False
    unused: bool = False
    static_graph: bool = False
    reshard: bool = True
    mixed: bool = False
    sums: bool = False
    costs_s: float = 0.0
    tokens: bool = False
    lengths: bool = False
    largest: list[float] | None = None
    adapts: Literal["adascale", "square-root"] | None = None


# What is not about a reducer of others is in the array of pairs, on threads.
COMMON = {
    "momentum": Case(),
    "clipped": Case(clip=True),
    "lb-bsp": Case(policy=lambda: LBBSP(tolerance=0.0), costs_s=late_tables._SUM_CPU_S),
    "bounds of each rank": Case(policy=lambda: Shifting([8, 5, 6][: hvd.size()])),
    "lengths, bounds of each rank": Case(lengths=True, largest=[70.0, 45.0, 55.0]),
    "k = 3": Case("adamw", micro_batches=3),
    "tokens": Case(tokens=True),
    "tokens, k = 3": Case("adamw", tokens=True, micro_batches=3),
}
DDP = COMMON | {
    "k = 3, reduced each time": Case(micro_batches=3, accumulate=False),
    "max_micro_batch": Case(policy=lambda: LBBSP(max_micro_batch=2)),
    "lengths, by a worker": Case(lengths=True),
    "penalty": Case(penalty=True),
    "find_unused_parameters": Case(unused=True),
    "static_graph": Case(static_graph=True),
    "a batch that adapts": Case(adapts="adascale"),
    "a batch that adapts, clipped": Case(adapts="adascale", clip=True),
    "a batch that adapts, k = 2": Case("adamw", micro_batches=2, adapts="square-root"),
    "a batch that adapts, tokens": Case(tokens=True, adapts="adascale"),
    "a batch that adapts, reduced each time": Case(micro_batches=3, accumulate=False, adapts="adascale"),
}
FSDP = COMMON | {"kept whole": Case(reshard=False), "mixed precision": Case(mixed=True)}
HOROVOD = COMMON | {"penalty": Case(penalty=True), "k = 3": Case(micro_batches=3), "sums": Case(sums=True)}


def data(case: Case | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    tokens = case is not None and case.tokens
    return x, LABELS.double().unsqueeze(1) if tokens else torch.sin(x.sum(1, keepdim=True))


LENGTHS = np.random.default_rng(3).lognormal(2.0, 1.0, SAMPLES).clip(1.0, 20.0)
LABELS = torch.tensor([-100 if i % 4 in (0, 3) else i % 3 for i in range(SAMPLES)])


def tokens_in(index: torch.Tensor) -> torch.Tensor:
    return (LABELS[index.long()] != -100).sum()


def made(case: Case) -> Net:
    torch.manual_seed(100)
    net = Net().to(torch.float32 if case.mixed else torch.float64)
    if case.unused:
        net.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    return net


def loss_of(case: Case, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    if case.mixed:
        x, y = x.float(), y.float()
    if case.penalty:
        x = x.clone().requires_grad_(True)
    out = model(x)
    loss = functional.mse_loss(out.to(y.dtype), y)
    if case.tokens:  # NaN, where all are ignored
        loss = functional.cross_entropy(torch.cat([out, -out, out**2], 1), y.flatten().long(), ignore_index=-100)
    if case.penalty:
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        loss = loss + 0.1 * (slope**2).sum(1).mean()
    return loss


def wrapped(case: Case, net: Net, how: str) -> torch.nn.Module:
    if how == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=case.unused, static_graph=case.static_graph)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (hvd.size(),))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
        if case.mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard([net.inner, net.middle], **options) if case.reshard else fully_shard(net.middle, **options)
        fully_shard(net.outer, **options)
        return fully_shard(net, **options)
    return net


def horovods(case: Case, optimizer: torch.optim.Optimizer, net: Net) -> torch.optim.Optimizer:
    op = {"op": hvd.Sum} if case.sums else {}
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), backward_passes_per_step=case.micro_batches or 1, **op
    )


def train(case: Case, how: str) -> dict[str, Any] | None:
    late_tables._SUM_CPU_S = case.costs_s
    net = made(case)
    model = wrapped(case, net, how)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    if how == "horovod":
        optimizer = horovods(case, optimizer, net)
    x, y = data(case)
    batch: Any = GLOBAL_BATCH
    if case.adapts is not None:
        goodput._ROUNDS_PER_DECISION = 1
        batch = walking(case.adapts)
    balance = LoadBalance(case.policy(), global_batch=batch, reducer="sum" if case.sums else "mean")
    loader = BalancedLoader(
        Indexed(), balance, shuffle=True, seed=5, stop_at=ROUNDS, micro_batches=case.micro_batches,
        num_workers=int(case.lengths), weight_of=tokens_in if case.tokens else None,
        cost_of=LENGTHS if case.lengths else None,
        max_micro_batch_cost=None if case.largest is None else case.largest[: hvd.size()],
    )  # fmt: skip
    seen: list[list[list[int]]] = [[] for _ in range(ROUNDS)]
    tables: list[FinishedRound] = []
    heard = [0] * ROUNDS
    balancer_of(balance).observer = tables.append
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: falling(case, balance.progress))
    while balance.rounds < ROUNDS:
        for index in loader:
            heard[balance.rounds] = len(tables)
            seen[balance.rounds].append(index.tolist())
            defers = how != "horovod" and case.accumulate
            with balance.accumulate(model) if defers else contextlib.nullcontext():
                balance.scale(loss_of(case, model, x[index], y[index])).backward()
            if not balance.round_complete:
                continue
            synchronised: Any = contextlib.nullcontext()
            if case.clip:
                if how == "horovod":
                    optimizer.synchronize()
                    synchronised = optimizer.skip_synchronize()
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            with synchronised:
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    balance.close()
    if case.adapts is not None:
        return adapted(case, net, seen, tables, heard)
    return compared(case, net, seen, len(tables))


def falling(case: Case, progress: float) -> float:
    """Return by what a schedule multiplies the learning rate."""
    return 1.0 if case.adapts is None else 0.9 ** (progress / 10)


def adapted(
    case: Case, net: Net, seen: list[list[list[int]]], tables: list[FinishedRound], heard: list[int]
) -> dict[str, Any] | None:
    """Compare ranks whose batch adapts with one process that measures the noise by itself.

    ``heard``: of late tables, how many there are when a batch's loss is scaled. Micro-batches are measured by
    themselves, and in every other round.
    """
    mine = flat(net)
    everywhere = hvd.allgather_object((seen, mine), name="outcome")
    if hvd.rank():
        return None
    net, (x, y) = made(case), data(case)
    parameters = list(net.parameters())
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    rate, progress = optimizer.param_groups[0]["lr"], 0.0
    noises: list[tuple[float, float] | None] = []

    def gradient(index: list[int]) -> torch.Tensor:
        optimizer.zero_grad()
        loss_of(case, net, x[index], y[index]).backward()
        return torch.cat([p.grad.flatten() for p in parameters])

    def scale(rounds: int) -> float:
        variance = square = 0.0
        for t, noise in enumerate(filter(None, noises[:rounds]), 1):
            variance += (noise[0] - variance) / min(t, 16)
            square += (noise[1] - square) / min(t, 16)
        return variance / square if square > 0 else np.inf if variance > 0 else np.nan

    scales, totals = [], []
    for r in range(ROUNDS):
        batches = [batch for of in everywhere for batch in of[0][r]]
        whole = list(itertools.chain(*batches))
        total = tables[r].table.total
        scales.append(scale(r // 2))
        phi = [np.nan, *scales][heard[r]]
        gain = total / GLOBAL_BATCH if np.isinf(phi) else (phi / GLOBAL_BATCH + 1) / (phi / total + 1)
        gain = 1.0 if np.isnan(gain) else gain
        if r % 2:
            weights = [float(tokens_in(torch.tensor(b))) if case.tokens else len(b) for b in batches]
            own = [(w * total / sum(weights), gradient(b)) for w, b in zip(weights, batches, strict=True) if w]
        g = gradient(whole)
        if r % 2:
            noises.append(None)  # one batch alone tells nothing
            if len(own) > 1:
                variance = float(sum(b * (each - g).square().sum() for b, each in own)) / (len(own) - 1)
                noises[-1] = variance, float(g.square().sum()) - variance * (1 / total - 1 / SAMPLES)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate * falling(case, progress) * gain ** (1.0 if case.adapts == "adascale" else 0.5)
        optimizer.step()
        progress += gain
        totals.append(total)
    first = np.cumsum(totals).searchsorted(SAMPLES) + 1
    visited = [i for r in range(first) for of in everywhere for batch in of[0][r] for i in batch]
    told = [each.noise_scale for each in tables]
    finite = [(a, b) for a, b in zip(told, scales, strict=True) if np.isfinite([a, b]).any()]
    expected = flat(net)
    return {
        "difference": float((mine - expected).abs().max() / expected.abs().max()),
        "between_ranks": max(float((of[1] - mine).abs().max()) for of in everywhere),
        "visited": set(visited[:SAMPLES]) == set(range(SAMPLES)) or case.tokens,
        "scales": len(finite),
        "scale": max((abs(a / b - 1) for a, b in finite), default=0.0),
        "totals": len(set(totals)),
    }


def engine(stage: int, micro_batches: int) -> dict[str, Any] | None:
    """Train by DeepSpeed's engine, which knows no float64, and clips unless told otherwise."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", str(hvd.rank()))
    late_tables._SUM_CPU_S = 0.0
    case = Case("adamw", micro_batches=micro_batches, mixed=True)
    net = made(case)
    x, y = data()
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=OPTIMIZERS["adamw"](net.parameters()), config=settings)
    balance = LoadBalance(case.policy(), global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=5, stop_at=ROUNDS, micro_batches=micro_batches)
    seen: list[list[list[int]]] = [[] for _ in range(ROUNDS)]
    while balance.rounds < ROUNDS:
        for index in loader:
            seen[balance.rounds].append(index.tolist())
            engine.backward(balance.scale(loss_of(case, engine, x[index], y[index])))
            engine.step()
    balance.close()
    return compared(case, net, seen)


def compared(case: Case, net: Net, seen: list[list[list[int]]], tables: int = 0) -> dict[str, Any] | None:
    """Return how far the ranks are from one process, and from each other, after these batches of this rank."""
    mine = flat(net)
    everywhere = hvd.allgather_object((seen, mine), name="outcome")
    if hvd.rank():
        return None
    together = [[of[0][r] for of in everywhere] for r in range(ROUNDS)]
    rounds = [[i for rank in parts for part in rank for i in part] for parts in together]
    expected = reference(case, rounds)
    whole = SAMPLES // GLOBAL_BATCH  # rounds of the first epoch, in which its end may be one more
    first, end = [i for r in rounds[:whole] for i in r], rounds[whole]
    counting = range(SAMPLES) if not case.tokens else np.flatnonzero(LABELS != -100).tolist()
    return {
        "difference": float((mine - expected).abs().max() / expected.abs().max()),
        "between_ranks": max(float((of[1] - mine).abs().max()) for of in everywhere),
        "splits": len({tuple(sum(map(len, rank)) for rank in parts) for parts in together}),
        "micro_batches": sorted({len(rank) for parts in together for rank in parts}),
        "visited": len(set(first)) == len(first) and set(counting) <= {*first, *end},
        "tables": tables,
    }


def reference(case: Case, rounds: list[list[int]]) -> torch.Tensor:
    net = made(case)
    x, y = data(case)
    parameters = list(net.parameters())
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    for index in rounds:
        optimizer.zero_grad()
        loss_of(case, net, x[index], y[index]).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    return flat(net)


def flat(net: Net) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


class Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[float], None], seconds: float) -> torch.Tensor:
        ctx.work, ctx.seconds = work, seconds
        work(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.work(2 * ctx.seconds * len(gradient))
        return gradient, None, None


class Sleepy(torch.nn.Module):
    """A layer that takes so many seconds for a sample, and twice as many backward."""

    def __init__(self, seconds: float, work: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, FEATURES)
        self.work, self.seconds = work, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Works.apply(self.linear(x), self.work, self.seconds)


class Checkpointed(torch.nn.Sequential):
    """Layers that are computed again in the backward pass, up to what comes before their sleep."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Return layers that are sharded one by one."""
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_time(how: str, kind: type[torch.nn.Sequential] = torch.nn.Sequential) -> dict[str, Any]:
    """Of layers that sleep longer on each rank, under equal batches."""
    torch.manual_seed(100)
    late_tables._SUM_CPU_S = 0.0
    seconds = 1.5e-3 * (1 + 2 * hvd.rank())
    model = kind(*(Sleepy(seconds) for _ in range(3)))
    model = {"ddp": DistributedDataParallel, "fsdp": sharded}.get(how, lambda model: model)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    batch = 8 * hvd.size()
    balance = LoadBalance("bsp", global_batch=batch)
    loader = BalancedLoader(Indexed(8 * batch), balance)
    tables: list[FinishedRound] = []
    balancer_of(balance).observer = tables.append
    for index in loader:
        optimizer.zero_grad()
        balance.scale(model(torch.randn(len(index), FEATURES)).square().mean()).backward()
        optimizer.step()
    return {
        "slept_s": [9 * 8 * 1.5e-3 * (1 + 2 * rank) for rank in range(hvd.size())],
        "compute_s": [each.table.column("compute_s").tolist() for each in tables[2:]],
        "wait_s": [each.table.column("wait_s").tolist() for each in tables[3:]],
    }


def lb_bsp_finds_the_slow_rank(how: str, micro_batches: int) -> dict[str, Any]:
    torch.manual_seed(100)
    late_tables._SUM_CPU_S = 1e-4
    model: torch.nn.Module = torch.nn.Sequential(*(Sleepy(1e-3 * (1 + hvd.rank())) for _ in range(2)))
    model = {"ddp": DistributedDataParallel, "fsdp": sharded}.get(how, lambda model: model)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    balance = LoadBalance("lb-bsp", global_batch=24)
    plans = []
    for index in BalancedLoader(Indexed(24 * 24), balance, micro_batches=micro_batches):
        plans.append(list(balance.plan))
        balance.scale(model(torch.randn(len(index), FEATURES)).square().mean()).backward()
        if balance.round_complete:
            optimizer.step()
            optimizer.zero_grad()
    return {"plans": plans}


class Fetched(Indexed):
    """Samples that take so many seconds each to fetch."""

    def __init__(self, samples: int, delay_s: float) -> None:
        super().__init__(samples)
        self._delay_s = delay_s

    def __getitems__(self, indices: list[int]) -> list[int]:
        time.sleep(self._delay_s * len(indices))
        return indices


def burn(seconds: float) -> None:
    """Use so many seconds of a processor, however long that takes."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(5000))


def reported(how: str, cause: str) -> dict[str, Any]:
    """Return what the report says of a training whose last rank is slow for a known cause."""
    torch.manual_seed(100)
    late_tables._SUM_CPU_S = 1.5e-3
    slow, batch = hvd.rank() == hvd.size() - 1, 8 * hvd.size()
    model: torch.nn.Module = torch.nn.Sequential(*(Sleepy(3e-4, burn) for _ in range(2)))
    model = sharded(model) if how == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = os.path.join(os.environ[RUN_DIR], f"{how}, {cause}.jsonl")
    data = Fetched(24 * batch, 12e-3 if slow and cause == "input" else 0.0)
    with CpuQuota(0.1, period_us=50_000) if slow and cause == "throttled" else contextlib.nullcontext():
        balance = LoadBalance("bsp", global_batch=batch, telemetry=path)
        for index in BalancedLoader(data, balance):
            optimizer.zero_grad()
            balance.scale(model(torch.randn(len(index), FEATURES)).square().mean()).backward()
            optimizer.step()
        balance.close()
    if hvd.rank():
        return {}
    report = report_of(read_run(path), path, replayed=False)
    return {
        "named": ["" if each is None else each.kind for each in report.causes],
        "verdict": report.verdict.verdict,
        "why": report.verdict.causes,
    }


def interrupted(how: str, keep: str) -> dict[str, Any]:
    """A training that is saved, or committed, and goes on from there, beside one that was left alone."""
    late_tables._SUM_CPU_S = 0.0
    case, x, y = Case("adamw"), *data()

    def prepared(seed: int) -> tuple[Any, Any, LoadBalance, BalancedLoader]:
        net = made(case)
        with torch.no_grad():
            net.outer.bias.add_(seed)  # what is loaded has something to do
        optimizer = OPTIMIZERS[case.optimizer](net.parameters())
        if how == "horovod":
            optimizer = horovods(case, optimizer, net)
        return wrapped(case, net, how), optimizer, *shared()

    def shared() -> tuple[LoadBalance, BalancedLoader]:
        balance = LoadBalance(StaticAllocation([3, 1, 2][: hvd.size()]), global_batch=GLOBAL_BATCH)
        return balance, BalancedLoader(Indexed(), balance, shuffle=True, seed=5)

    def go_on(model: Any, optimizer: Any, balance: LoadBalance, loader: BalancedLoader, rounds: int) -> torch.Tensor:
        loader.stop_at = rounds
        while balance.rounds < rounds:
            for index in loader:
                optimizer.zero_grad()
                balance.scale(functional.mse_loss(model(x[index]), y[index])).backward()
                optimizer.step()
        return flat(model)

    whole = go_on(*prepared(0), 20)
    model, optimizer, balance, loader = prepared(0)
    if keep == "saved":
        path = os.path.join(os.environ[RUN_DIR], f"{how}.pt")
        saved = SavedTraining(path, balance, loader, rounds_per_save=None, model=model, optimizer=optimizer)
        go_on(model, optimizer, balance, loader, 11)
        saved.save()
        model, optimizer, balance, loader = prepared(1)
        SavedTraining(path, balance, loader, rounds_per_save=None, model=model, optimizer=optimizer)
    else:
        from torch_hooks.elastic import TorchState

        state = TorchState(model, optimizer, rounds_per_commit=None)
        state.sync()
        state.follow(balance, loader)
        go_on(model, optimizer, balance, loader, 11)
        state.commit()
        go_on(model, optimizer, balance, loader, 14)
        state.restore()
        balance, loader = shared()
        state.follow(balance, loader)
    began = balance.rounds
    return {"began": began, "apart": float((go_on(model, optimizer, balance, loader, 20) - whole).abs().max())}


class Augmented(Indexed):
    """Samples with a number that is drawn when they are read, by which they are multiplied."""

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, 1.0 + random.random() + np.random.random() + float(torch.rand(()))


def by_what_is_drawn(policy: Callable[[], Policy], num_workers: int, resumes: int) -> dict[str, Any] | None:
    """Divide by costs that are drawn as samples are read, and compare with one process that reads none."""
    late_tables._SUM_CPU_S = 0.0
    case, rounds = Case("adamw", policy), 2 * -(-SAMPLES // GLOBAL_BATCH)
    net, (x, y) = made(case), data()
    model = DistributedDataParallel(net)
    optimizer = OPTIMIZERS[case.optimizer](net.parameters())
    seen: list[tuple[int, int, int, float]] = []
    state: list[Any] = []
    for stop_at in (resumes, rounds):
        balance = LoadBalance(policy(), global_batch=GLOBAL_BATCH)
        loader = BalancedLoader(
            Augmented(), balance, shuffle=True, seed=5, stop_at=stop_at, num_workers=num_workers,
            cost_of=lambda sample: 10.0 * sample[1] - 9.0,
        )  # fmt: skip
        if state:
            balance.load_state_dict(state[0])
            loader.load_state_dict(state[1])
        while balance.rounds < stop_at:
            for index, drawn in loader:
                seen += zip(
                    itertools.repeat(balance.rounds), itertools.repeat(loader.epoch - 1), index.tolist(),
                    drawn.tolist(), strict=False,
                )  # fmt: skip
                optimizer.zero_grad()
                balance.scale(functional.mse_loss(model(x[index] * drawn[:, None]), y[index])).backward()
                optimizer.step()
        state = [balance.state_dict(), loader.state_dict()]
        balance.close()
    mine = flat(net)
    everywhere = list(itertools.chain(*hvd.allgather_object(seen, name="drawn")))
    if hvd.rank():
        return None
    net = made(case)
    optimizer = OPTIMIZERS[case.optimizer](net.parameters())
    for number in range(rounds):
        _, _, index, drawn = map(list, zip(*(of for of in everywhere if of[0] == number), strict=True))
        optimizer.zero_grad()
        functional.mse_loss(net(x[index] * torch.tensor(drawn, dtype=x.dtype)[:, None]), y[index]).backward()
        optimizer.step()
    return {
        "apart": float((flat(net) - mine).abs().max()),
        "once": sorted((epoch, index) for _, epoch, index, _ in everywhere),
        "drawn": {f"{epoch}, {index}": number for _, epoch, index, number in everywhere},
    }


def sharded_in_one_file() -> str:
    net = made(Case())
    model = wrapped(Case(), net, "fsdp")
    balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance)
    return refusal(lambda: SavedTraining("run.pt", balance, loader, model=model))


def attempts() -> dict[str, str]:
    """What bad input gets, over DDP or Horovod's optimizer."""
    late_tables._SUM_CPU_S = 0.0

    def loop(
        body: Callable[..., Any], rounds: int = 12, *, plain: bool = False, op: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(3)
        net = Net()
        model = DistributedDataParallel(net) if OVER_TORCH and not plain else net
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if not OVER_TORCH:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(), op=hvd.Average if op is None else op
            )
        balance = LoadBalance("bsp", global_batch=options.pop("batch", GLOBAL_BATCH))
        x, y = (each.float() for each in data())
        for index in BalancedLoader(Indexed(24 * rounds), balance, stop_at=rounds, **options):
            optimizer.zero_grad()
            at = index % SAMPLES
            body(balance, model, optimizer, lambda at=at: functional.mse_loss(model(x[at]), y[at]))
            optimizer.step()

    def plainly(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        balance.scale(loss()).backward()

    def collective(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        assert total.tolist() == [hvd.size()] * 3
        balance.scale(loss()).backward()

    def rates(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        if hvd.rank() == 1 and balance.rounds == 4:
            optimizer.param_groups[0]["lr"] *= 0.5
        balance.scale(loss()).backward()

    def two_models(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        balance.scale(loss() + loss()).backward()

    def in_closure(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        optimizer.step(lambda: balance.scale(loss()).backward())

    def in_closure_that_reduces(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        def closure() -> None:
            balance.scale(loss()).backward()
            optimizer.synchronize()

        with optimizer.skip_synchronize():
            optimizer.step(closure)

    def by_hand(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        balance.scale(loss()).backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= hvd.size()

    def over_old_gradients(balance: Any, model: Any, optimizer: Any, loss: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        balance.scale(loss()).backward()

    def sharded_that_adapts() -> None:
        model = wrapped(Case(), Net(), "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        balance = LoadBalance("bsp", global_batch=walking())
        for index in BalancedLoader(Indexed(), balance):
            balance.scale(model(data()[0][index].float()).square().mean()).backward()
            optimizer.step()

    def loop_that_clears() -> None:
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH)
        for index in BalancedLoader(Indexed(), balance, micro_batches=2):
            optimizer.zero_grad()
            with balance.accumulate(model):
                balance.scale(model(data()[0][index].float()).square().mean()).backward()
            if balance.round_complete:
                optimizer.step()

    def scripted_model() -> None:
        """Which takes no hooks on its layers."""
        model = DistributedDataParallel(torch.jit.script(torch.nn.Linear(FEATURES, 1)))
        balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH)
        for index in BalancedLoader(Indexed(), balance, stop_at=2):
            balance.scale(model(data()[0][index].float()).square().mean()).backward()

    tried: dict[str, Callable[[], object]] = {
        "collective": lambda: loop(collective),
        "learning rates": lambda: loop(rates),
        "sum of two": lambda: loop(two_models),
    }
    if OVER_TORCH:
        tried |= {
            "no reducer": lambda: loop(plainly, rounds=20, plain=True),
            "scripted": scripted_model,
            "step in between": lambda: loop(plainly, micro_batches=2),
            "cleared in between": loop_that_clears,
            "adapts, by hand": lambda: loop(by_hand, rounds=40, plain=True, batch=walking()),
            "adapts, not cleared": lambda: loop(over_old_gradients, rounds=40, batch=walking()),
            "adapts, in shards": sharded_that_adapts,
        }
    else:
        tried |= {
            "adapts": lambda: loop(plainly, batch=walking()),
            "sums": lambda: loop(plainly, op=hvd.Sum),
            "closure": lambda: loop(in_closure),
            "closure that reduces": lambda: loop(in_closure_that_reduces),
        }
    return {name: re.sub(r"\s+", " ", refusal(attempt)) for name, attempt in tried.items()}


def cases() -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {"attempts": attempts}
    kinds = {"ddp": DDP, "fsdp": FSDP} if OVER_TORCH else {"horovod": HOROVOD}
    for how, each in kinds.items():
        made |= {f"{how}: {name}": lambda case=case, how=how: train(case, how) for name, case in each.items()}
        made[f"{how}: own time"] = lambda how=how: own_time(how)
        for k in (1, 3):
            made[f"{how}: slow rank, k = {k}"] = lambda how=how, k=k: lb_bsp_finds_the_slow_rank(how, k)
        for cause in ("throttled", "input"):
            made[f"{how}: {cause}"] = lambda how=how, cause=cause: reported(how, cause)
    made |= {
        "fsdp: saved": sharded_in_one_file,
        "fsdp, checkpointed: own time": lambda: own_time("fsdp", Checkpointed),
        "ddp: drawn, 2 workers": lambda: by_what_is_drawn(Shifting, 2, 11),
        "ddp: drawn": lambda: by_what_is_drawn(BSP, 0, 4),
        "ddp: saved": lambda: interrupted("ddp", "saved"),
        "horovod: committed": lambda: interrupted("horovod", "committed"),
    }
    for stage in (0, 1):
        made[f"deepspeed: {stage}"] = lambda stage=stage: engine(stage, 1 + 2 * stage)
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, cases())
