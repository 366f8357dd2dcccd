"""A training of every pair of options on ranks that are threads, against one process that is given the same samples.

    python tests/unit/torch_hooks/pairs.py --seed 1 --cases 300           # random cases of all options at once
    python tests/unit/torch_hooks/pairs.py --strength 3                   # all triples

A case is exact, or refused by an error that names both options (``docs/combinations.md``). The replay knows nothing of
plans and weights: the samples that each rank was given in each micro-batch are recorded, and their losses count alike,
or by what each sample weighs.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[1])]

from hvd_hetero import late_tables
from hvd_hetero.policies import (
    BSP,
    LBBSP,
    ElasticBSP,
    Goodput,
    LBNonBlocking,
    NonBlocking,
    SelfAdaptive,
    StaticAllocation,
)
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.telemetry import Telemetry, read_ledger
from hvd_hetero.testing import ThreadHangError, ThreadRankError, run_on_threads
from tests.support.covering import covering
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance, SyncBatchNorm

SAMPLES, BATCH, ROUNDS, UNFREEZES, LEAVES, OVERFLOWS, TIMEOUT_S = 64, 12, 9, 3, 4, 2, 60.0
FITS, FAILS = 2, 2  # samples that rank 1 holds, and the round from which on it holds no more
REFUSED_SHARE = 0.02  # of the random cases with options that are refused together: they are 50 times as many

EARLY = ["non-blocking", "lb-non-blocking"]  # the first rank to be done ends a round
APART = ["self-adaptive", "elastic-bsp", *EARLY]  # ranks do unequal numbers of micro-batches
LATE = ["when read", "limited when read"]  # a function of what the dataset returns
COSTS = ["lengths", "limited", *LATE]
MIXED = ["d-psgd", "matcha", "local"]  # ranks hold different models
SHARDED = ["shards", "shards of ranks"]
OPTIONS: dict[str, list[Any]] = {
    "reducer": ["own", "mean", "sum"],
    "policy": ["bsp", "shifting", "static", *APART],
    "sync": [None, *MIXED],
    "ranks": [2, 3],
    "max_micro_batch": [None, 3, "of each rank", "of the device"],
    "micro_batches": [None, 2],
    "memory": [None, "learned"],
    "out_of_memory": [None, "in forward", "in backward"],
    "weight_of": [False, True, "in scale()"],
    "scales": [False, True],
    "cost_of": [None, *COSTS],
    "norm": [None, "sync"],
    "global_batch": ["constant", "adapts"],
    "drop_last": [False, True],
    "order": ["in order", "shuffled", "sampler", "stream", *SHARDED],
    "workers": [0, 1],
    "leaves": [None, "stop_at", "break", "resume", "in a round"],
    "optimizer": ["sgd", "adamw", "groups"],
    "clips": [False, True],
    "schedule": [False, True],
    "clears": ["before", "after", "to zeros"],
    "unfreezes": [False, True],
    "scaler": [False, True, "overflows"],
    "evaluates": [None, "in the body", "together"],
    "models": [1, 2],
    "ledger": [False, True],
}


BOUNDS = {3: 3, "of each rank": [4, 3, 5], "of the device": {"cpu": 3}}


class Refusal(NamedTuple):
    """Two options that do not go together. ``this``, ``other``: their names in the page, and in the message."""

    options: dict[str, Any]
    this: str
    other: str
    remedy: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The line of the page."""
        return f"| {self.this} | {self.other} | {self.remedy} |"


_SUMS = 'use `"lb-bsp"` and `sync="allreduce"`'
REFUSED = [
    Refusal(
        {"reducer": "own", "micro_batches": 2}, "`micro_batches`", "`DistributedOptimizer`",
        "give `max_micro_batch` to the policy", ("micro_batches", "DistributedOptimizer"),
    ),
    *(
        Refusal(
            {"reducer": reducer, "policy": policy}, f'`"{policy}"`', "a reducer of your own",
            "use `DistributedOptimizer`", (policy, "DistributedOptimizer"),
        )
        for policy in APART
        for reducer in ("mean", "sum")
    ),
    *(
        Refusal(
            {"policy": policy, name: value}, f'`"{policy}"`', f"`{said}`", remedy, (policy, said.partition("(")[0]),
        )
        for policy in APART
        for name, value, said, remedy in (
            ("norm", "sync", "SyncBatchNorm", "use `GroupNorm`, or `\"lb-bsp\"`"),
            *(("cost_of", costs, "cost_of", 'use `"lb-bsp"` or `"bsp"`') for costs in COSTS),
            ("global_batch", "adapts", "Goodput(…)", 'use `"lb-bsp"` or `"bsp"`'),
        )
    ),
    *(
        Refusal(
            {"policy": policy, "weight_of": True}, f'`"{policy}"`', "`weight_of`", 'use `"lb-bsp"`',
            (policy, "weight_of"),
        )
        for policy in EARLY
    ),
    *(
        Refusal(averages | options, this, said, remedy, ("sync=" if len(averages) == 1 else word, name))
        for averages, this in (
            ({"sync": "d-psgd"}, '`sync="d-psgd"` or `"matcha"`'),
            ({"sync": "matcha"}, '`sync="d-psgd"` or `"matcha"`'),
            ({"sync": "local", "policy": "elastic-bsp"}, '`ElasticBSP(updates="local")`'),
        )
        for options, said, name, word, remedy in (
            *(
                ({"reducer": by}, "a reducer of your own", "DistributedOptimizer", "", "use `DistributedOptimizer`")
                for by in ("mean", "sum")
            ),
            ({"weight_of": True}, "`weight_of`", "weight_of", "elastic-bsp", _SUMS),
            ({"weight_of": "in scale()", "scales": True}, "`scale(weight=…)`", "scale()", "elastic-bsp", _SUMS),
            ({"norm": "sync"}, "`SyncBatchNorm`", "SyncBatchNorm", "", "use `GroupNorm`"),
            ({"global_batch": "adapts"}, "`Goodput(…)`", "Goodput", "", "give a `global_batch` that stays"),
            *(
                ({"scaler": it}, "`GradScaler`", "GradScaler", "local updates", "use `autocast` with `torch.bfloat16`")
                for it in OPTIONS["scaler"][1:]
            ),
            ({"models": 2}, "`balance.also()`", "also()", "elastic-bsp", _SUMS),
            ({"ledger": True}, "`Telemetry(ledger=True)`", "ledger", "local updates", "leave it out"),
        )
        if "policy" not in averages or not options.keys() & {"reducer", "norm", "global_batch"}  # refused above
    ),
    *(
        Refusal(
            {"weight_of": "in scale()", "scales": True} | options, "`scale(weight=…)`", said, "use `weight_of`",
            ("scale()", word),
        )
        for options, said, word in (
            *(({"max_micro_batch": bound}, "`max_micro_batch`", "max_micro_batch") for bound in BOUNDS),
            ({"micro_batches": 2}, "`micro_batches`", "micro_batches"),
            *(({"cost_of": costs}, "`max_micro_batch_cost`", "max_micro_batch_cost") for costs in COSTS[1::2]),
            ({"policy": "static", "reducer": "own"}, "`StaticAllocation`", "static"),
            *(({"policy": policy}, f'`"{policy}"`', policy) for policy in ("self-adaptive", *EARLY)),
        )
    ),
    *(
        Refusal(
            {"out_of_memory": when} | options, "`surviving_out_of_memory()`", said, remedy,
            ("out", "memory", word),
        )
        for when in OPTIONS["out_of_memory"][1:]
        for options, said, remedy, word in (
            ({"norm": "sync"}, "`SyncBatchNorm`", "set `max_micro_batch`, or use `GroupNorm`", "SyncBatchNorm"),
            ({"models": 2, "reducer": "own"}, "`balance.also()`", "set `max_micro_batch`", "several optimizers"),
            ({"weight_of": "in scale()", "scales": True}, "`scale(weight=…)`", "use `weight_of`", "scale()"),
        )
    ),
    *(
        Refusal(
            {"policy": policy, "models": 2}, f'`"{policy}"`', "`balance.also()`", 'use `"lb-bsp"` or `"bsp"`',
            (policy, "also() needs"),
        )
        for policy in EARLY
    ),
    *(
        Refusal(
            {"max_micro_batch": bound, "cost_of": costs}, "`max_micro_batch`", "`cost_of`",
            "use `max_micro_batch_cost`", ("max_micro_batch", "cost_of"),
        )
        for bound in BOUNDS
        for costs in COSTS
    ),
    *(
        Refusal(
            {"order": order, "cost_of": costs}, '`stream="shard"`', "`cost_of`", 'use `stream="whole"`',
            ("stream='shard'", "cost_of"),
        )
        for order in SHARDED
        for costs in COSTS
    ),
    Refusal(
        {"global_batch": "adapts", "models": 2, "reducer": "own"}, "`Goodput(…)`", "`balance.also()`",
        "give a `global_batch` that stays", ("Goodput", "also()"),
    ),
    *(
        Refusal(
            {"ledger": True, "order": order}, "`Telemetry(ledger=True)`", "a stream",
            "give a dataset with `__getitem__`", ("ledger", "stream"),
        )
        for order in ("stream", *SHARDED)
    ),
    *(
        Refusal(
            {"ledger": True, "reducer": reducer, "scales": True, "weight_of": weight_of}, "`Telemetry(ledger=True)`",
            "`weight_of` beside a reducer of your own", "use `DistributedOptimizer`", ("ledger", "weight_of"),
        )
        for reducer in ("mean", "sum")
        for weight_of in (True, "in scale()")
    ),
]  # fmt: skip


# By their first options: a covering array asks some hundred thousand times.
_REFUSED_FROM: dict[tuple[str, Any], list[Refusal]] = {}
for _each in REFUSED:
    _REFUSED_FROM.setdefault(next(iter(_each.options.items())), []).append(_each)


def refusals_of(case: dict[str, Any]) -> list[Refusal]:
    """Return all that a case, or a part of one, may be refused for."""
    begun = (r for option in case.items() for r in _REFUSED_FROM.get(option, ()))
    return [r for r in begun if all(name in case and case[name] == v for name, v in r.options.items())]


def implied(case: dict[str, Any]) -> bool:
    """Return whether two options cannot meet since each excludes what the other needs."""
    return not any(
        not (refusals_of(whole) or without_meaning(whole))
        for reducer in OPTIONS["reducer"]
        for policy in OPTIONS["policy"]
        for ranks in OPTIONS["ranks"]
        if (whole := {"reducer": reducer, "policy": policy, "ranks": ranks} | case)
    )


def without_meaning(case: dict[str, Any]) -> bool:
    """Return whether options are together that say the same, or nothing: these are left out."""
    get = case.get
    return (
        (get("scales") is False and (get("reducer") in ("mean", "sum") or get("weight_of") == "in scale()"))
        or (get("policy") == "elastic-bsp" and get("weight_of") == "in scale()")  # refused in rounds of several
        or (get("memory") and get("weight_of") == "in scale()" and get("reducer") == "own")  # refused when memory ends
        or (get("out_of_memory") == "in backward" and get("reducer") in ("mean", "sum"))  # most are being reduced
        or (get("sync") == "local" and get("policy") not in (None, "elastic-bsp"))
        or (get("leaves") == "in a round" and get("out_of_memory"))  # a rank that does parts leaves apart
        or (get("leaves") == "in a round" and get("norm"))  # whose statistics have seen the batch that was left
        or (
            get("leaves") == "in a round"  # ranks of unequally many micro-batches leave apart
            and get("reducer") == "own"
            and (get("policy") not in (None, "bsp") or get("max_micro_batch") == "of each rank" or get("memory"))
        )
        or (get("max_micro_batch") is not None and get("policy") in APART)
        or (get("global_batch") == "adapts" and get("micro_batches") == 2 and get("ranks") == 3)  # too small a batch
    )


class Shifting(LBBSP):
    """Other shares after each table."""

    def next(self, plan: RoundPlan, finished: Any) -> RoundPlan:
        dice = np.random.default_rng([finished.round, 7])
        cuts = np.sort(dice.choice(plan.total - 1, plan.workers - 1, replace=False)) + 1
        return RoundPlan.of(np.diff(cuts, prepend=0, append=plan.total))


class Walking(Goodput):
    """Another batch after every sixteen tables, whatever it costs; the learning rate stays."""

    def __init__(self) -> None:
        super().__init__(start=BATCH, least=9, most=18, learning_rate="constant")
        self._waited = 15

    def reconsider(self, policy: Any, plan: RoundPlan, table: Any, noise: Any, typical_size: float) -> RoundPlan:
        total = {12: 18, 18: 9, 9: 12}[plan.total]
        return policy.resized(plan, total) if total <= self.fits else plan


def policy_of(case: dict[str, Any]) -> Any:
    limit = BOUNDS.get(case["max_micro_batch"])
    limit = limit[: case["ranks"]] if isinstance(limit, list) else limit
    return {
        "bsp": lambda: BSP(max_micro_batch=limit),
        "shifting": lambda: Shifting(max_micro_batch=limit),
        "static": lambda: StaticAllocation([1, 2, 1][: case["ranks"]], max_micro_batch=limit),
        "self-adaptive": lambda: SelfAdaptive(total=4, every=2),
        "non-blocking": lambda: NonBlocking(2),
        "lb-non-blocking": lambda: LBNonBlocking(micro_batches=2),
        "elastic-bsp": lambda: ElasticBSP(2, updates="local" if case["sync"] == "local" else "accumulate"),
    }[case["policy"]]()


class Gauge:
    """A device that holds seven samples at first, and each rank another number from some round on."""

    def __init__(self, balance: LoadBalance) -> None:
        self.balance = balance

    def reset(self) -> None:
        pass

    def peak(self) -> float:
        return 100.0 + 50.0 * self.balance._session.balancer.work.samples

    def available(self) -> float:
        rank = self.balance._session.wire.rank
        return (100.0 + 50.0 * (7 if self.balance.rounds < 5 else 5 + rank)) / 0.9


class Indices(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return i


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class Shards(Stream):
    """Shards of unequal length, which go on from their own state."""

    num_shards = 5

    def __init__(self, begin: int = 0, end: int = SAMPLES) -> None:
        self.at, self.end = begin, end

    def shard(self, num_shards: int, index: int) -> Shards:
        ends = [0, 9, 10, 40, 40, SAMPLES]
        return Shards(*ends[index : index + 2])

    def __iter__(self) -> Any:
        while self.at < self.end:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ShardsOfRanks(Shards):
    """Samples that this rank alone reads: a third, or two thirds, of all."""

    num_shards = 0

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank * SAMPLES // 3, SAMPLES if rank + 1 == ranks else (rank + 1) * SAMPLES // 3)


STREAMS = {"stream": Stream, "shards": Shards}


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, y, and what each sample weighs."""
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 3, generator=dice, dtype=torch.float64)
    return x, x.sin().sum(1), torch.randint(1, 5, (SAMPLES,), generator=dice).double()


def length(i: int) -> float:
    return 1.0 + i * 7 % 5


def models_of(case: dict[str, Any], balance: LoadBalance | None) -> list[torch.nn.Module]:
    dice = torch.Generator().manual_seed(3)  # of its own: loaders of other threads draw from the common one
    made = []
    for number in range(case["models"]):
        norms = [torch.nn.BatchNorm1d(4)] if case["norm"] and not number else []
        # A bias before a norm has a gradient of rounding alone, which AdamW would make as large as any.
        layers = [torch.nn.Linear(3, 4, bias=not norms), *norms, torch.nn.Tanh(), torch.nn.Linear(4, 1)]
        made.append(torch.nn.Sequential(*layers).double())
        for parameter in made[-1].parameters():
            parameter.data = torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 2
    if case["unfreezes"]:
        made[0][0].requires_grad_(False)
    if balance is not None and case["norm"]:
        made[0] = SyncBatchNorm.convert_sync_batchnorm(made[0], balance)
    return made


def optimizer_of(case: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    if case["optimizer"] == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.2, "weight_decay": 0.01}, {"params": others}]
    chosen = groups if case["optimizer"] == "groups" else model.parameters()
    return torch.optim.SGD(chosen, lr=0.1, momentum=0.9)


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def run_out_of_memory(gradient: torch.Tensor | None = None) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (a test)")


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the losses of samples."""
    return (model(x).squeeze(1) - y) ** 2


class Job:
    """One rank's objects, made anew where a training resumes."""

    def __init__(self, case: dict[str, Any], policy: Any, batch: Any) -> None:
        own = case["reducer"] == "own"
        reducer = {} if own else {"reducer": case["reducer"]}
        telemetry = Telemetry(Path(case["folder"], "run.jsonl"), ledger=True) if case["ledger"] else None
        sync = case["sync"] if case["sync"] in MIXED[:2] else "allreduce"
        self.balance = LoadBalance(policy, global_batch=batch, telemetry=telemetry, sync=sync, **reducer)
        if case["memory"]:
            self.balance._session.meter.memory.gauge = Gauge(self.balance)
        self.models = models_of(case, self.balance)
        self.plain = [optimizer_of(case, model) for model in self.models]
        self.optimizers: list[Any] = list(self.plain)
        if own:
            balances = [self.balance, *(self.balance.also() for _ in self.models[1:])]
            self.optimizers = [
                DistributedOptimizer(optimizer, balance, model.named_parameters())
                for optimizer, balance, model in zip(self.plain, balances, self.models, strict=True)
            ]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.plain]
        for optimizer, model, schedule in zip(self.optimizers, self.models, self.schedules, strict=True):
            if own and case["clips"]:
                optimizer.register_step_pre_hook(lambda *_, model=model: clip(model))
            if own and case["schedule"]:
                optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        scaler = {"init_scale": 2.0**8, "growth_interval": 3}
        self.scalers: list[Any] = []
        if case["scaler"] and own:
            self.scalers = [GradScaler("cpu", optimizer=each, **scaler) for each in self.optimizers]
        elif case["scaler"]:
            self.scalers = [torch.amp.GradScaler("cpu", **scaler)]
        order = {"shuffled": {"shuffle": True, "seed": 1}, "sampler": {"sampler": [*range(SAMPLES)[::-1]]}}
        options: dict[str, Any] = dict(order.get(case["order"], {}))
        data_set = STREAMS.get(case["order"], Indices)()
        if case["order"] == "shards of ranks":
            data_set = ShardsOfRanks(self.balance._session.wire.rank, case["ranks"])
        if isinstance(data_set, IterableDataset):
            options["stream"] = "whole" if case["order"] == "stream" else "shard"
        if case["workers"]:
            options["num_workers"] = case["workers"]
        if case["weight_of"] is True:
            weights = data()[2]
            options["weight_of"] = lambda index: weights[index].sum()
        if case["cost_of"]:
            late = case["cost_of"] in LATE or case["order"] == "stream"
            options["cost_of"] = length if late else [length(i) for i in range(SAMPLES)]
        if case["cost_of"] in COSTS[1::2]:
            options["max_micro_batch_cost"] = 11.0
        if case["micro_batches"]:
            options["micro_batches"] = case["micro_batches"]
        self.loader = BalancedLoader(data_set, self.balance, drop_last=case["drop_last"], **options)

    def state(self) -> list[Any]:
        parts = [self.balance, self.loader, *self.models, *self.optimizers, *self.schedules, *self.scalers]
        return [each.state_dict() for each in parts]

    def load(self, state: list[Any]) -> None:
        parts = [self.balance, self.loader, *self.models, *self.optimizers, *self.schedules, *self.scalers]
        for each, its in zip(parts, state, strict=True):
            each.load_state_dict(its)


def reduce_later(case: dict[str, Any], job: Job) -> None:
    """Reduce when this backward pass is over, before it returns, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(lambda: reduce(case, job))


def reduce(case: dict[str, Any], job: Job) -> None:
    """Reduce gradients as a reducer of the user's own does, whose result is the same on all ranks."""
    wire = job.balance._session.wire
    for number, model in enumerate(job.models):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total = wire.result(wire.start_sum(parameter.grad, f"{number}.{name}"))
                parameter.grad = total / wire.size if case["reducer"] == "mean" else total


def evaluate_together(job: Job, *, same: bool) -> None:
    """Have all ranks evaluate their parts, and compare figures: of all, and with this rank's if models are the same."""
    x, y, _ = data()

    def losses(batch: Any) -> dict[str, torch.Tensor]:
        return {str(number): loss_of(model, *batch).mean() for number, model in enumerate(job.models)}

    for model in job.models:
        model.eval()
    with torch.no_grad():
        alone = losses((x, y))
    figures = job.balance.evaluate(TensorDataset(x, y), losses, batch_size=5)
    for model in job.models:
        model.train()
    for name, loss in alone.items() if same else ():
        assert abs(figures[name] - float(loss)) <= 1e-9, f"evaluated loss {name} is apart"
    everywhere = job.balance._session.wire.allgather_object(figures.sums, name="figures")
    assert all(sums == everywhere[0] for sums in everywhere), "ranks have other bits"


def train(case: dict[str, Any]) -> tuple[list[list[tuple[int, list[int]]]], list[dict[str, torch.Tensor]], Any]:
    """Train on one rank; return (epoch, samples) of the micro-batches of each round, what was learned, the mixing."""
    policy, batch = policy_of(case), Walking() if case["global_batch"] == "adapts" else BATCH
    x, y, weights = data()
    own, job = case["reducer"] == "own", Job(case, policy, batch)
    seen: list[list[tuple[int, list[int]]]] = [[] for _ in range(ROUNDS)]
    begins = True

    def clear() -> None:
        for optimizer in job.optimizers:
            optimizer.zero_grad(set_to_none=case["clears"] != "to zeros")

    def body(index: torch.Tensor) -> None:
        nonlocal begins
        balance = job.balance
        if case["unfreezes"] and balance.rounds >= UNFREEZES:
            job.models[0][0].requires_grad_(True)
        if case["evaluates"] == "together" and not (own or case["out_of_memory"]) and balance.round_complete:
            evaluate_together(job, same=not case["sync"])
        elif case["evaluates"]:
            with torch.no_grad():
                for model in job.models:
                    model.eval()(x)
                    model.train()
        if case["clears"] == "before" and (own or begins):
            clear()
        fails = case["out_of_memory"] if balance._session.wire.rank == 1 and len(index) > FITS else None
        fails = fails if balance.rounds >= FAILS else None
        if fails == "in forward":
            sum(loss_of(model, x[index], y[index]).sum() for model in job.models)  # buffers have changed by then
            run_out_of_memory()
        if fails:
            fail = job.models[0][-1].weight.register_post_accumulate_grad_hook(run_out_of_memory)
            try:
                sum(loss_of(model, x[index], y[index]).sum() for model in job.models).backward()
            finally:
                fail.remove()
        seen[balance.rounds].append((job.loader.epoch_at_hand, index.tolist()))
        bounds = BOUNDS.get(case["max_micro_batch"], BATCH)
        bound = bounds[balance._session.wire.rank] if isinstance(bounds, list) else 3 if bounds != BATCH else BATCH
        assert case["max_micro_batch"] is None or len(index) <= bound, f"{len(index)} samples, and {bound} fit"
        counts = weights[index] if case["weight_of"] else torch.ones(len(index), dtype=torch.float64)
        losses = [(loss_of(model, x[index], y[index]) * counts).sum() / counts.sum() for model in job.models]
        weight = {"weight": counts.sum()} if case["weight_of"] == "in scale()" else {}
        if not own:
            losses = [balance.scale(sum(losses), **weight)]
            if balance.round_complete:
                losses[0].register_hook(lambda gradient: reduce_later(case, job))
        elif case["scales"]:
            losses = [balance.scale(loss, **weight) for loss in losses]
        if job.scalers:
            losses = [scaler.scale(loss) for scaler, loss in zip(job.scalers, losses, strict=True)]
            if case["scaler"] == "overflows" and balance.rounds == OVERFLOWS:
                for loss in losses:
                    loss.register_hook(lambda gradient: gradient * torch.inf)
        sum(losses).backward()
        begins = own or balance.round_complete
        if not own and begins:
            for optimizer, model in zip(job.optimizers, job.models, strict=True):
                if job.scalers:
                    job.scalers[0].unscale_(optimizer)
                if case["clips"]:
                    clip(model)
        if own or begins:
            for number, optimizer in enumerate(job.optimizers):
                scaler = job.scalers[number if own else 0] if job.scalers else None
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None and (own or number + 1 == len(job.optimizers)):
                    scaler.update()
            if case["schedule"] and not own:
                for schedule in job.schedules:
                    schedule.step()
            if case["clears"] != "before":
                clear()

    left = False
    while job.balance.rounds < ROUNDS:
        halfway = case["leaves"] in ("stop_at", "resume") and job.balance.rounds < LEAVES
        job.loader.stop_at = LEAVES if halfway else ROUNDS
        for index in job.loader:
            if case["out_of_memory"]:
                with job.balance.surviving_out_of_memory():
                    body(index)
            else:
                body(index)
            if case["leaves"] == "break" and not left and job.balance.round_complete:
                left = True
                break
            if case["leaves"] == "in a round" and not left and not job.balance.round_complete:
                left, seen[job.balance.rounds], begins = True, [], True
                clear()
                break
        if case["evaluates"] == "together":
            evaluate_together(job, same=not case["sync"])
        if case["leaves"] == "resume" and job.balance.rounds == LEAVES:
            state = job.state()
            job.balance.close()
            job = Job(case, policy_of(case), Walking() if case["global_batch"] == "adapts" else BATCH)
            job.load(state)
            left = True
    job.balance.close()
    return seen, [model.state_dict() for model in job.models], job.balance._session.mixing


def replay(case: dict[str, Any], ranks: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Train in one process on what all ranks were given: the mean over the samples of a round, by what each weighs."""
    x, y, weights = data()
    models = models_of(case, None)
    optimizers = [optimizer_of(case, model) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for number in range(ROUNDS):
        if case["unfreezes"] and number >= UNFREEZES:
            models[0][0].requires_grad_(True)
        given = [rank[number] for rank in ranks]
        every = torch.tensor([i for rank in given for _, index in rank for i in index])
        counts = weights if case["weight_of"] else torch.ones(SAMPLES, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for j in range(max(map(len, given))):  # the j-th micro-batches of all ranks are normalised together
            index = torch.tensor([i for rank in given if j < len(rank) for i in rank[j][1]])
            for model in models:
                ((loss_of(model, x[index], y[index]) * counts[index]).sum() / counts[every].sum()).backward()
        for optimizer, model, schedule in zip(optimizers, models, schedules, strict=True):
            if case["clips"]:
                clip(model)
            skips = case["scaler"] == "overflows" and number == OVERFLOWS
            if not skips:
                optimizer.step()
            if case["schedule"] and not (skips and case["reducer"] == "own"):
                schedule.step()
    return [model.state_dict() for model in models]


def replay_apart(case: dict[str, Any], ranks: list[Any], mixing: Any) -> list[dict[str, torch.Tensor]]:
    """Train the model of each rank in one process, which averages them as ``mixing`` or after local updates."""
    x, y, _ = data()
    models = [models_of(case, None)[0] for _ in ranks]
    optimizers = [optimizer_of(case, model) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]

    def update(rank: int) -> None:
        if case["clips"]:
            clip(models[rank])
        optimizers[rank].step()
        if case["schedule"]:
            schedules[rank].step()

    for number in range(ROUNDS):
        done = torch.tensor([sum(len(index) for _, index in rank[number]) for rank in ranks]).double()
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if case["unfreezes"] and number >= UNFREEZES:
                model[0].requires_grad_(True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for _, index in ranks[rank][number]:
                loss = loss_of(model, x[index], y[index])
                if mixing is None:
                    optimizer.zero_grad(set_to_none=False)
                    loss.mean().backward()
                    update(rank)
                else:
                    (loss.sum() * len(ranks) / done.sum()).backward()
        weights = (done / done.sum()).expand(len(ranks), -1)
        if mixing is not None:
            weights = torch.from_numpy(mixing.matrix(number))
        kept = [[*model.parameters()] for model in models]
        if mixing is None:
            for held, model, optimizer in zip(kept, models, optimizers, strict=True):
                states = [optimizer.state[p] for p in model.parameters()]
                held += [state[key] for state in states for key in sorted(state) if torch.is_tensor(state[key])]
        with torch.no_grad():
            for tensors in zip(*kept, strict=True):
                mixed = torch.einsum("ij,j...->i...", weights.to(tensors[0].dtype), torch.stack(tensors))
                for tensor, value in zip(tensors, mixed, strict=True):
                    tensor.copy_(value)
        for rank in range(len(ranks)) if mixing is not None else ():
            update(rank)
    return [model.state_dict() for model in models]


def require_each_sample_once(case: dict[str, Any], ranks: list[Any]) -> None:
    epochs: dict[int, Counter[int]] = {}
    for rank in ranks:
        for micro_batches in rank:
            for epoch, index in micro_batches:
                epochs.setdefault(epoch, Counter()).update(index)
    assert all(set(times.values()) == {1} for times in epochs.values()), "a sample was visited twice in an epoch"
    last = max(epochs)
    if case["leaves"] != "break":
        for epoch, times in epochs.items():
            short = SAMPLES - len(times)
            if case["leaves"] == "in a round" and case["global_batch"] == "adapts":
                continue  # the first round of several micro-batches may be in the midst of an epoch, which ends there
            assert epoch == last or not short or (case["drop_last"] and short < 18), f"{short} samples were left out"


def require_ledger(case: dict[str, Any], ranks: list[Any]) -> None:
    """Require that the ledger has the samples of each micro-batch, which may be done in parts where memory is short."""
    folder = Path(case["folder"])
    former = sorted(folder.glob("run.*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    noted: dict[tuple[int, int], list[list[int]]] = {}
    for part in read_ledger(*former, folder / "run.jsonl"):
        noted.setdefault((part.rank, part.round), []).append(part.indices)
    for rank, rounds in enumerate(ranks):
        for number, micro_batches in enumerate(rounds):
            parts, seen = noted.get((rank, number), []), [index for _, index in micro_batches]
            if case["memory"] or case["out_of_memory"]:
                parts, seen = [sum(parts, [])], [sum(seen, [])]  # noqa: RUF017
            assert parts == seen, f"round {number}, rank {rank}"


def outcome(case: dict[str, Any]) -> str:
    """Return "exact", or "refused: …"; raise AssertionError if a case is neither."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(case | {"folder": folder})


def _outcome(case: dict[str, Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = run_on_threads(lambda rank: train(case), case["ranks"], TIMEOUT_S)
        except ThreadRankError as error:
            return f"refused: {error.__cause__}"
    seen = [rank for rank, *_ in results]
    require_each_sample_once(case, seen)
    if case["ledger"]:
        require_ledger(case, seen)
    if case["sync"]:
        expected = [[each] for each in replay_apart(case, seen, results[0][2])]
    else:
        expected = [replay(case, seen)] * len(results)
    for (_, models, _), of_rank in zip(results, expected, strict=True):
        for ours, theirs in zip(models, of_rank, strict=True):
            for name, value in theirs.items():
                difference = float((ours[name] - value).abs().max())
                assert difference <= 1e-9, f"{name} is {difference:.1e} apart"
    return "exact"


def judged(case: dict[str, Any]) -> str:
    """Return the outcome; raise AssertionError if it is not the one that the table of refusals says."""
    refusals, found = refusals_of(case), outcome(case)
    if not refusals:
        assert found == "exact", found
    else:
        assert found.startswith("refused"), found
        named = [all(word in found for word in refusal.words) for refusal in refusals]
        assert any(named), f"{[refusal.words for refusal in refusals]} in {found}"
    return found


def prepare() -> None:
    """Import in this thread what all ranks would import at once, and send a row with each round."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    late_tables._SUM_CPU_S = 0.0


def cases(strength: int = 2) -> list[dict[str, Any]]:
    """Return few cases with all pairs, or triples, that go together, and one for each refusal."""
    found = covering(OPTIONS, strength, lambda case: refusals_of(case) or without_meaning(case), seed=3)
    plain = {name: values[0] for name, values in OPTIONS.items()}
    return found + [plain | refusal.options for refusal in REFUSED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--strength", type=int, help="all pairs (2) or triples (3), in place of random cases")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    prepare()
    dice, chosen = random.Random(options.seed), [] if options.strength is None else cases(options.strength)
    while options.strength is None and len(chosen) < options.cases:
        case = {name: dice.choice(values) for name, values in OPTIONS.items()}
        if not without_meaning(case) and (not refusals_of(case) or dice.random() < REFUSED_SHARE):
            chosen.append(case)
    counts: Counter[str] = Counter()
    for number, case in enumerate(chosen):
        try:
            found = judged(case).partition(":")[0]
        except ThreadHangError:
            found = "hung"
        except AssertionError as error:
            found = "wrong"
            print(f"{number}: {error}\n    {case}", flush=True)
        counts[found] += 1
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(chosen)}: {dict(counts)}", end="", file=sys.stderr, flush=True)
    print(f"{len(chosen)} cases: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    return 1 if counts["wrong"] or counts["hung"] else 0


if __name__ == "__main__":
    sys.exit(main())
