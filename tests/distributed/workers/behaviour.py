"""One rank of the behaviour test: what users do around the loop. Each scenario returns figures for the test."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from pool import serve
from torch.nn import functional
from torch.utils.data import TensorDataset, WeightedRandomSampler
from torch_common import refusal, spread

from hvd_hetero.errors import RoundStateError
from hvd_hetero.policies import BSP, LBBSP, Policy, StaticAllocation
from hvd_hetero.session import balancer_of
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.data.samplers import drawn_by
from torch_hooks.gradients import bundles

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(240, 5, generator=GENERATOR, dtype=torch.float64)
Y = X.sum(1, keepdim=True)


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1).double()


def training(
    policy: str | Policy,
    *,
    model: torch.nn.Module | None = None,
    rounds: int = 12,
    global_batch: int = 24,
    **loader: Any,
) -> tuple[torch.nn.Module, LoadBalance, BalancedLoader, DistributedOptimizer]:
    model = model or linear()
    balance = LoadBalance(policy, global_batch=global_batch)
    batches = BalancedLoader(TensorDataset(X, Y), balance, shuffle=True, stop_at=rounds, **loader)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), balance, model.named_parameters()
    )
    return model, balance, batches, optimizer


def fit(
    model: torch.nn.Module, balance: LoadBalance, batches: BalancedLoader, optimizer: torch.optim.Optimizer
) -> None:
    while batches.stop_at is not None and balance.rounds < batches.stop_at:
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()


def final(policy: str | Policy, **options: Any) -> list[float]:
    model, balance, batches, optimizer = training(policy, **options)
    fit(model, balance, batches, optimizer)
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


def worker_processes_change_nothing() -> dict:
    """Fetching ahead in two worker processes gives the very same training, with a lead of four rounds."""
    model, balance, batches, optimizer = training(StaticAllocation([1, 3]), num_workers=2)
    fit(model, balance, batches, optimizer)
    return {
        "with": [float(v) for p in model.parameters() for v in p.detach().flatten()],
        "without": final(StaticAllocation([1, 3])),
        "lead": balancer_of(balance).planner.lead,
    }


def balanced_with_workers() -> dict:
    """LB-BSP under a lead still finds the slow rank, and every rank has the same parameters."""
    model, balance, batches, optimizer = training(LBBSP(), rounds=40, global_batch=120, num_workers=1)
    plans: list[tuple[int, ...]] = []
    balancer_of(balance).observer = lambda finished: plans.append(finished.plan.samples)
    while balance.rounds < 40:
        for x, y in batches:
            optimizer.zero_grad()
            time.sleep(len(x) * (2e-3 if hvd.rank() == 1 else 0.5e-3))
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    full = [plan for plan in plans if sum(plan) == 120]
    return {"plan": [statistics.median(shares) for shares in zip(*full[-10:], strict=True)], "spread": spread(model)}


def own_batches_are_weighted_by_what_was_used() -> dict:
    """A user's own iterator, off the plan on both ranks, equals the single process on the union."""
    model, balance, _, optimizer = training(BSP(), rounds=0)
    reference = linear()
    alone = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for r in range(6):
        counts = [3 + r, 11 - 2 * r]
        start = 20 * r
        parts = [slice(start, start + counts[0]), slice(start + counts[0], start + sum(counts))]
        mine = parts[hvd.rank()]
        balance.batch(counts[hvd.rank()])
        optimizer.zero_grad()
        functional.mse_loss(model(X[mine]), Y[mine]).backward()
        optimizer.step()
        alone.zero_grad()
        functional.mse_loss(reference(X[start : start + sum(counts)]), Y[start : start + sum(counts)]).backward()
        alone.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return {"difference": max(float((a - b).abs().max()) for a, b in pairs)}


def an_empty_batch_of_ones_own() -> dict:
    """The mean over no samples is NaN; it must not reach anybody."""
    model = linear()
    model.temperature = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    model, balance, _, optimizer = training(BSP(), model=model, rounds=0)
    count = 0 if hvd.rank() == 0 else 8
    balance.batch(count)
    optimizer.zero_grad()
    loss = model.temperature * functional.mse_loss(model(X[:count]), Y[:count])
    assert bool(loss.isnan()) == (count == 0)
    loss.backward()  # the gradient of the temperature is that NaN
    optimizer.step()
    return {"finite": all(bool(p.isfinite().all()) for p in model.parameters()), "spread": spread(model)}


def clipping_between_synchronise_and_step() -> dict:
    model, balance, batches, optimizer = training("bsp")
    norms = []
    while balance.rounds < 12:
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            assert optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
            with optimizer.skip_synchronize():
                optimizer.step()
    return {"norms": norms, "spread": spread(model)}


def a_step_that_a_scaler_skips() -> dict:
    """Synchronised, then not stepped (as a gradient scaler does on overflow): the next round synchronises again."""
    model, balance, batches, optimizer = training("bsp")
    for x, y in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        if balance.rounds % 3:
            with optimizer.skip_synchronize():
                optimizer.step()
    return {"rounds": balance.rounds, "spread": spread(model)}


def schedulers_and_groups() -> dict:
    """A scheduler made on the wrapper drives the wrapped optimizer, whose groups are the same objects."""
    model = linear()
    balance = LoadBalance("bsp", global_batch=24)
    batches = BalancedLoader(TensorDataset(X, Y), balance, stop_at=6)
    inner = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}])
    optimizer = DistributedOptimizer(inner, balance, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return {"rates": [g["lr"] for g in inner.param_groups], "hooked": len(hooked), "spread": spread(model)}


def state_is_broadcast() -> dict:
    """Rank 0 resumes with momentum and another rate; the other rank starts fresh and gets both."""
    model = linear()
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    if hvd.rank() == 0:
        inner.param_groups[0]["lr"] = 0.125
        for _ in range(3):
            functional.mse_loss(model(X), Y).backward()
            inner.step()
    balance = LoadBalance("bsp", global_batch=24)
    optimizer = DistributedOptimizer(inner, balance, model.named_parameters())
    moments = torch.cat([s["exp_avg"].flatten() for s in optimizer.state.values()])
    everywhere = hvd.allgather(moments[None].contiguous(), name="moments")
    return {
        "rate": optimizer.param_groups[0]["lr"],
        "steps": [float(s["step"]) for s in optimizer.state.values()],
        "moments": float((everywhere - everywhere[0]).abs().max()),
        "moment": float(moments.abs().max()),
        "spread": spread(model),
    }


def thawed_parameters_are_synchronised() -> dict:
    """A parameter that was frozen at construction and is thawed later takes part."""
    model = linear()
    model.bias.requires_grad_(False)
    model, balance, batches, optimizer = training("bsp", model=model)
    for x, y in batches:
        if balance.rounds == 4:
            model.bias.requires_grad_(True)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {"moved": float((model.bias - linear().bias).abs().max()), "spread": spread(model)}


def gradual_unfreezing() -> dict:
    """Layers that were trained, frozen for three rounds and thawed again; then a second optimizer goes on."""
    names = ("0.weight", "0.bias", "2.weight")

    def deep() -> torch.nn.Module:
        torch.manual_seed(4)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ).double()

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def freeze(model: torch.nn.Module, round: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name in names and (3 <= round < 6 or 9 <= round < 11)))

    outcome = {}
    for members, most, least_alone in ((32, 1 << 20, 1 << 20), (3, 200, 1 << 20), (1, 1 << 20, 1)):  # in bytes
        with patched(bundles, _MOST=most, _ALONE=least_alone):
            model, balance = deep(), LoadBalance("bsp", global_batch=8)
            optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
            for round in range(15):
                if round == 13:
                    optimizer.close()
                    stepped = failure(optimizer.step)
                    optimizer = DistributedOptimizer(optimizer._inner, balance, model.named_parameters())
                freeze(model, round)
                mine = slice(16 * round + 8 * hvd.rank(), 16 * round + 8 * hvd.rank() + 8)
                balance.batch(8)
                optimizer.zero_grad()
                functional.mse_loss(model(X[mine]), Y[mine]).backward()
                optimizer.step()
        alone = deep()
        plain = sgd(alone)
        for round in range(15):
            freeze(alone, round)
            both = slice(16 * round, 16 * round + 16)
            plain.zero_grad()
            functional.mse_loss(alone(X[both]), Y[both]).backward()
            plain.step()
        differences = zip(model.parameters(), alone.parameters(), strict=True)
        outcome[str(members)] = {
            "difference": max(float((p - q).detach().abs().max()) for p, q in differences),
            "spread": spread(model),
            "closed": stepped,
        }
    return outcome


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def failure(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RoundStateError as error:
        return str(error)
    return "nothing"


def trained_on_one_rank_alone() -> dict:
    """Rank 1 freezes or thaws a parameter by itself: all ranks are told, and none waits for the others."""

    def alone(frozen_at_first: bool) -> str:
        model = linear()
        model.bias.requires_grad_(not frozen_at_first)
        model, balance, batches, optimizer = training("bsp", model=model)

        def run() -> None:
            for x, y in batches:
                if balance.rounds == 3 and hvd.rank() == 1:
                    model.bias.requires_grad_(frozen_at_first)
                optimizer.zero_grad()
                functional.mse_loss(model(x), y).backward()
                optimizer.step()

        return refusal(run)

    return {"freezes": alone(False), "thaws": alone(True)}


def telemetry_is_written_by_rank_0() -> dict:
    model = linear()
    path = Path(sys.argv[1]) / f"run-of-{hvd.rank()}.jsonl"
    balance = LoadBalance("lb-bsp", global_batch=24, telemetry=path)
    batches = BalancedLoader(TensorDataset(X, Y), balance, stop_at=10)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance)
    fit(model, balance, batches, optimizer)
    balance.close()
    return {"exists": path.exists(), "lines": len(path.read_text().splitlines()) if path.exists() else 0}


def a_weighted_sampler() -> dict:
    """Whose generators differ from rank to rank; every index that it draws is visited on one rank, once."""
    torch.manual_seed(hvd.rank())
    sampler = WeightedRandomSampler(torch.arange(1.0, 31.0), 50, generator=torch.Generator().manual_seed(hvd.rank()))
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance(StaticAllocation([1, 3]), global_batch=24)
    loader = BalancedLoader(TensorDataset(torch.arange(30.0)[:, None]), balance, seed=4, sampler=sampler)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), balance, model.named_parameters())
    seen: list[float] = []
    for (x,) in loader:
        seen += x.flatten().tolist()
        model(x).mean().backward()
        optimizer.step()
    everybody = [index for part in hvd.allgather_object(seen, name="seen") for index in part]
    drawn = drawn_by(sampler, 4, in_batches=False)(0).tolist()
    return {"visited": sorted(everybody), "drawn": sorted(drawn), "rounds": balance.rounds, "spread": spread(model)}


def refusals() -> dict:
    model = linear()
    names = list(model.named_parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def balance() -> LoadBalance:
        return LoadBalance("bsp", global_batch=24)

    def ready() -> tuple[DistributedOptimizer, Any]:
        model, _, batches, optimizer = training("bsp")
        x, y = next(iter(batches))
        optimizer.zero_grad()
        return optimizer, functional.mse_loss(model(x), y)

    def zero_after_backward() -> None:
        optimizer, loss = ready()
        loss.backward()
        try:
            optimizer.zero_grad()
        finally:
            optimizer.step()

    def no_step() -> None:
        model, _, batches, _ = training("bsp")
        for x, y in batches:
            functional.mse_loss(model(x), y).backward()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(9))

    return {
        "small batch": refusal(lambda: LoadBalance("bsp", global_batch=1)),
        "policy": refusal(lambda: LoadBalance("lbbsp", global_batch=24)),
        "no optimizer": refusal(lambda: list(BalancedLoader(TensorDataset(X, Y), balance()))),
        "stream": refusal(lambda: BalancedLoader(Stream(), balance())),
        "batch_size": refusal(lambda: BalancedLoader(TensorDataset(X, Y), balance(), batch_size=3)),
        "empty": refusal(lambda: BalancedLoader(TensorDataset(X[:0], Y[:0]), balance())),
        "names missing": refusal(lambda: DistributedOptimizer(inner, balance(), names[:1])),
        "names repeated": refusal(
            lambda: DistributedOptimizer(inner, balance(), [names[0], (names[0][0], names[1][1])])
        ),
        "names of no pairs": refusal(lambda: DistributedOptimizer(inner, balance(), [p for _, p in names])),
        "twice": refusal(lambda: (lambda b: [DistributedOptimizer(inner, b, names) for _ in range(2)])(balance())),
        "wrapped": refusal(lambda: DistributedOptimizer(ready()[0], balance(), names)),
        "step without batch": refusal(lambda: DistributedOptimizer(inner, balance(), names).step()),
        "zero_grad too late": refusal(zero_after_backward),
        "no step": refusal(no_step),
        "negative samples": refusal(lambda: balance().batch(-1)),
    }


def different_data() -> dict:
    """Ranks that shuffle with different seeds are told in the first round."""
    model = linear()
    balance = LoadBalance("bsp", global_batch=24)
    batches = BalancedLoader(TensorDataset(X, Y), balance, shuffle=True, seed=hvd.rank(), stop_at=5)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    return {"refusal": refusal(lambda: fit(model, balance, batches, optimizer)), "rounds": balance.rounds}


def data_cut_by_hand() -> dict:
    """Parts of equal length, as for a DistributedSampler, and the right data after it."""
    part = slice(hvd.rank(), None, hvd.size())
    said = {}
    for name, dataset in (("cut", TensorDataset(X[part], Y[part])), ("whole", TensorDataset(X, Y))):
        model = linear()
        balance = LoadBalance("bsp", global_batch=24)
        batches = BalancedLoader(dataset, balance, stop_at=5)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters()
        )
        said[name] = {"refusal": refusal(lambda: fit(model, balance, batches, optimizer)), "rounds": balance.rounds}  # noqa: B023
    return said


CASES = [
    worker_processes_change_nothing,
    balanced_with_workers,
    own_batches_are_weighted_by_what_was_used,
    an_empty_batch_of_ones_own,
    clipping_between_synchronise_and_step,
    a_step_that_a_scaler_skips,
    schedulers_and_groups,
    state_is_broadcast,
    thawed_parameters_are_synchronised,
    gradual_unfreezing,
    telemetry_is_written_by_rank_0,
    a_weighted_sampler,
    refusals,
    different_data,
    data_cut_by_hand,
    trained_on_one_rank_alone,
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in CASES})
