"""One rank of the stream tests: iterable datasets, whole and in shards, under policies that cut rounds differently."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pool import serve
from ranks import hvd
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch_common import refusal

from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, StaticAllocation
from hvd_hetero.session import balancer_of
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

SAMPLES = 131
X = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
Y = (X.sum(1, keepdim=True) > 0).double()
EPOCHS = 2


class Stream(IterableDataset):
    """Samples of this rank's numbers; worker processes share them."""

    def __init__(self, numbers: Any = range(SAMPLES)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        info = get_worker_info()
        numbers = self.numbers if info is None else self.numbers[info.id :: info.num_workers]
        return ((X[i], Y[i], i) for i in numbers)


class Samples(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return X[i], Y[i], i


def policies() -> dict[str, Callable[[], Policy]]:
    return {
        "bsp": BSP,
        "micro-batches": lambda: BSP(max_micro_batch=3),
        "static": lambda: StaticAllocation([3, 1, 2]),
        "lb-bsp": LBBSP,
        "non-blocking": lambda: NonBlocking(2),
        "elastic-bsp": lambda: ElasticBSP(lookahead=3),
        "local": lambda: ElasticBSP(lookahead=3, updates="local"),
    }


def trained(policy: Policy, make: Callable[[LoadBalance], BalancedLoader]) -> dict[str, Any]:
    """The samples that this rank saw, by epoch, and where its parameters came to."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    balance = LoadBalance(policy, global_batch=24)
    loader = make(balance)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balance, model.named_parameters()
    )
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen.append([])
        for x, y, index in loader:
            done = balancer_of(balance).meter.round.samples
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(x), y).backward()
            time.sleep(0.001 * hvd.rank())
            optimizer.step()
            assert balancer_of(balance).meter.round.samples != done or balance.round_complete
            seen[-1] += index.tolist()
    end = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {"seen": hvd.allgather_object(seen), "end": end, "rounds": balance.rounds}


def whole_streams() -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for name, policy in policies().items():
        outcome[name] = trained(policy(), lambda balance: BalancedLoader(Stream(), balance, stream="whole"))
    ends = {name: each["end"] for name, each in outcome.items()}
    for name in ("bsp", "micro-batches", "static"):  # whose rounds do not depend on time
        with_random_access = trained(policies()[name](), lambda balance: BalancedLoader(Samples(), balance))
        pairs = zip(outcome[name].pop("end"), with_random_access.pop("end"), strict=True)
        outcome[name]["same samples"] = with_random_access == outcome[name]
        outcome[name]["off"] = max(abs(a - b) for a, b in pairs)
    for name, end in ends.items():
        outcome[name]["end"] = end
    return outcome


def worker_processes() -> dict[str, Any]:
    return trained(
        StaticAllocation([1] * hvd.size()),
        lambda balance: BalancedLoader(Stream(), balance, stream="whole", num_workers=2, pin_memory=False),
    )


def left_out() -> dict[str, Any]:
    return trained(BSP(), lambda balance: BalancedLoader(Stream(), balance, stream="whole", drop_last=True))


def shards() -> dict[str, Any]:
    mine = range(hvd.rank(), SAMPLES, hvd.size())
    return {
        name: trained(
            policies()[name](),
            lambda balance: BalancedLoader(Stream(mine), balance, stream="shard", rounds_per_epoch=7),
        )
        for name in ("bsp", "static", "non-blocking")
    }


def refusals() -> dict[str, str]:
    def loader(dataset: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: BalancedLoader(
            Stream() if dataset is None else dataset, LoadBalance("bsp", global_batch=8), **options
        )

    return {
        "not chosen": refusal(loader()),
        "no length": refusal(loader(stream="shard")),
        "two lengths": refusal(loader(stream="whole", rounds_per_epoch=3)),
        "shuffled": refusal(loader(stream="whole", shuffle=True)),
        "random access": refusal(loader(Samples(), stream="whole")),
        "neither": refusal(loader(dataset=(x for x in X))),
        "empty": refusal(lambda: list(loader(Stream(range(0)), stream="whole")())),
        "too short": refusal(lambda: list(loader(Stream(range(5)), stream="whole", drop_last=True)())),
        "chained": refusal(loader(Stream() + Stream(), stream="whole")),
        "workers": refusal(loader(stream="whole", prefetch_factor=3)),
        "unknown": refusal(lambda: len(loader(stream="whole")())),
    }


class Owned(IterableDataset):
    """Samples with memory of their own, of which each one that a worker hands over holds a file open."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((X[i % SAMPLES].clone(), Y[i % SAMPLES].clone(), i) for i in range(first, 600, step))


def many_samples_that_wait() -> dict[str, Any]:
    """A round of more tensors than a process may have files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        balance = LoadBalance(BSP(), global_batch=400)
        loader = BalancedLoader(Owned(), balance, stream="whole", num_workers=1)
        model = torch.nn.Linear(4, 1).double()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        mine = []
        for x, y, index in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            mine += index.tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {"seen": sorted(i for rank in hvd.allgather_object(mine) for i in rank)}


def left_and_alternating() -> dict[str, Any]:
    """A loop left right after a step, and two loaders of one training: what is done is done, the rest comes back."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1).double()
    balance = LoadBalance(BSP(), global_batch=2 * hvd.size())
    mine = range(hvd.rank(), SAMPLES, hvd.size())
    first = BalancedLoader(Stream(mine), balance, stream="shard", rounds_per_epoch=9)
    second = BalancedLoader(Samples(), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
    seen: list[int] = []

    def some(loader: BalancedLoader, batches: int) -> list[int]:
        found: list[int] = []
        for x, y, index in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            found += index.tolist()
            batches -= 1
            if not batches:
                break
        return found

    for _ in range(3):
        seen += some(first, 2)
        some(second, 3)
    return {
        "in order": seen == list(mine)[: len(seen)],
        "seen": len(seen),
        "state": first.state_dict()["order"]["done"],
    }


def ends_alone() -> dict[str, str]:
    """One rank's stream has another length than it should: found out in a round that all still take part in."""
    uneven = hvd.rank() == 1

    def whole(numbers: Any, **options: Any) -> Callable[[LoadBalance], BalancedLoader]:
        return lambda balance: BalancedLoader(Stream(numbers), balance, stream="whole", **options)

    return {
        "longer": refusal(lambda: trained(BSP(), whole(range(48 + 24 * uneven)))),
        "longer, dropping": refusal(lambda: trained(BSP(), whole(range(29 + 25 * uneven), drop_last=True))),
        "elastic": refusal(lambda: trained(policies()["elastic-bsp"](), whole(range(24 * (4 + uneven))))),
        "readers": refusal(lambda: trained(BSP(), whole(range(96), num_workers=1 + uneven))),
        "rounds": refusal(
            lambda: trained(
                BSP(),
                lambda balance: BalancedLoader(Stream(), balance, stream="shard", rounds_per_epoch=3 + hvd.rank()),
            )
        ),
    }


CASES = [
    whole_streams, worker_processes, left_out, shards, many_samples_that_wait, left_and_alternating, refusals,
    ends_alone,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in CASES})
