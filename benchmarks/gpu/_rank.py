"""One rank of the proofs on a GPU (`proof.py`). Ranks share the device, and use torch.distributed."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from _alternating import STOCK, alternate, in_turns
from _by_hand import PASS, PASSES, ByHand
from gpu.networks import Network, networks, reduced
from gpu.shares import take_share
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from hvd_hetero import late_tables
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy
from hvd_hetero.testing import report
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.beside import scaled_rounds

EPOCH = 40  # global batches
FIRST = 60  # rounds in which LB-BSP learns curves and finds its split: more than twice the ladder
TURN = 4  # rounds of a scheme before the next one's
BLOCK = 4
SCHEMES = ("ddp", "lb-bsp", "oracle")
HIDDEN, ROUNDS = 64, 12  # of the training that runs out of memory
LENGTH = {"cuda": 256, "cpu": 8}  # of its sequences: on a CPU, the end of memory is made up


class Indices(torch.utils.data.Dataset):
    """Every sample is its own number, so the loader costs next to nothing, and what was seen can be written down."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> int:
        return i


def done(device: str) -> None:
    """Wait for what is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def forget_training() -> None:
    """Tell schemes apart that train in turns: the next steps of optimizers belong to none of them."""
    scaled_rounds._here.__dict__.clear()


class Training:
    """A network, and batches of it that are on the device already: what is timed is the device's work."""

    def __init__(self, network: Network, device: str, most: int) -> None:
        torch.manual_seed(1)
        self.network, self.device = network, device
        self.model = network.make(device)
        self._x, self._y = network.batch(most, device)

    def gradient(self, model: torch.nn.Module, samples: int, scale: Callable[[Any], Any] = lambda loss: loss) -> None:
        scale(functional.cross_entropy(model(self._x[:samples]), self._y[:samples])).backward()

    def balanced(self, policy: str | Policy, global_batch: int) -> tuple[LoadBalance, Iterator[None]]:
        """Return a balancer, and its rounds without end, of one micro-batch each."""
        balance = LoadBalance(policy, global_batch=global_batch)
        loader = BalancedLoader(Indices(EPOCH * global_batch), balance)
        optimizer = DistributedOptimizer(sgd(self.model), balance, self.model.named_parameters())

        def rounds() -> Iterator[None]:
            while True:
                for index in loader:
                    optimizer.zero_grad()
                    self.gradient(self.model, len(index))
                    optimizer.step()
                    yield

        return balance, rounds()

    def beside(
        self, policy: str | Policy, global_batch: int, reducer: str, rounds: int, records: list[Any] | None = None
    ) -> tuple[LoadBalance, Iterator[None]]:
        """Return a balancer, and its rounds without end, with scaled losses in a reducer: some are done already."""
        wrapped = reduced(self.model, reducer, self.device)
        optimizer = sgd(wrapped)
        balance = LoadBalance(policy, global_batch=global_batch)
        if records is not None:
            balance.on_round(records.append)
        loader = BalancedLoader(Indices(EPOCH * global_batch), balance)

        def all_rounds() -> Iterator[None]:
            while True:
                for index in loader:
                    optimizer.zero_grad()
                    self.gradient(wrapped, len(index), balance.scale)
                    optimizer.step()
                    yield

        trained = all_rounds()
        for _ in range(rounds):
            next(trained)
        forget_training()
        return balance, trained

    def alone(self, samples: int) -> Iterator[None]:
        """Return steps without end of one process."""
        optimizer = sgd(self.model)
        while True:
            optimizer.zero_grad()
            self.gradient(self.model, samples)
            optimizer.step()
            yield

    def stock(self, samples: int, reducer: str = "DDP") -> Iterator[None]:
        """Return the reducer's steps without end, with PyTorch's own loader and sampler."""
        wrapped = reduced(self.model, reducer, self.device)
        optimizer = sgd(wrapped)
        data = Indices(EPOCH * samples * dist.get_world_size())
        loader = DataLoader(data, samples, sampler=DistributedSampler(data, shuffle=False))
        while True:
            for index in loader:
                optimizer.zero_grad()
                self.gradient(wrapped, len(index))
                optimizer.step()
                yield


def stopwatch(name: str, device: str) -> list[dict[str, float]]:
    """Return seconds of a batch that a training measures by events, beside plain PyTorch's steps by the clock."""
    network = networks(device)[name]
    rows = []
    for part in (48, 12, 4, 1):
        samples = network.global_batch // part
        training = Training(network, device, samples)
        measured: list[float] = []
        balance, rounds = training.balanced("lb-bsp", samples)
        balance.on_round(lambda record, to=measured: to.append(record["compute_s"][0]))
        for _ in range(30):
            next(rounds)
        rounds.close()
        balance.close()
        plain = Training(network, device, samples)
        optimizer = sgd(plain.model)
        took = []
        for _ in range(30):
            done(device)
            began = time.perf_counter()
            optimizer.zero_grad()
            plain.gradient(plain.model, samples)
            optimizer.step()
            done(device)
            took.append(time.perf_counter() - began)
        known = [s for s in measured[10:] if s is not None]
        rows.append(
            {"samples": samples, "events_s": statistics.median(known), "rounds": len(known),
             "clock_s": statistics.median(took[10:])}
        )  # fmt: skip
    return rows


class Sequences(torch.nn.Module):
    """Few parameters, and large activations for the backward pass.

    In float64: a sum in another order shows only in the 16th digit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(m for _ in range(6) for m in (torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())),
            torch.nn.Linear(HIDDEN, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean(1)


def memory(scarce_mb: int, device: str) -> dict[str, dict[str, Any]]:
    """Run trainings in which rank 0's memory ends, beside one process that has all samples of each round at once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    samples = 12 if device == "cpu" else 384  # of a rank, in an equal round
    policies: dict[str, Callable[[], Policy]] = {
        "bsp": BSP,
        "lb-bsp": LBBSP,
        "lb-bsp, gpu": lambda: LBBSP(device="gpu"),
        "non-blocking": lambda: NonBlocking(1),
        "elastic-bsp": lambda: ElasticBSP(lookahead=4),
    }
    if device == "cuda" and rank == 0:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(scarce_mb * 2**20 / total)
    return {name: _short_of_memory(make(), ranks, rank, samples, device) for name, make in policies.items()}


def _short_of_memory(policy: Policy, ranks: int, rank: int, samples: int, device: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = Sequences().double().to(device)
    balance = LoadBalance(policy, global_batch=samples * ranks)
    loader = BalancedLoader(Indices(2 * samples * ranks), balance, shuffle=True, seed=3, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balance)
    epochs: list[int] = []
    balance.on_round(lambda record: epochs.append(record["epoch"]))
    seen: list[list[int]] = [[] for _ in range(ROUNDS)]
    failures = 0
    while balance.rounds < ROUNDS:
        for index in loader:
            round = balance.rounds
            with balance.surviving_out_of_memory():
                optimizer.zero_grad()
                if device == "cpu" and rank == 0 and len(index) > 8:
                    raise torch.OutOfMemoryError(f"no memory for {len(index)} samples")
                _loss(model, index, device).backward()
                optimizer.step()
                seen[round] += index.tolist()
                continue
            failures += 1
    balance.close()
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, (seen, failures, _flat(model).cpu(), epochs))
    rounds = [list(itertools.chain(*(part[0][r] for part in parts))) for r in range(ROUNDS)]
    visits: dict[int, list[int]] = {}
    for epoch, of_round in zip(parts[0][3], rounds, strict=True):
        visits.setdefault(epoch, []).extend(of_round)
    last = max(visits)  # which ended in the middle
    result: dict[str, Any] = {
        "failures": [part[1] for part in parts],
        "between_ranks": max(float((part[2] - parts[0][2]).abs().max()) for part in parts),
        "epochs": last,
        "each_once": all(sorted(visits[e]) == list(range(2 * samples * ranks)) for e in range(last)),
    }
    if rank == ranks - 1:  # which has the memory
        torch.manual_seed(0)
        alone = Sequences().double().to(device)
        before = _flat(alone).cpu()
        inner = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for indices in rounds:
            inner.zero_grad()
            _loss(alone, torch.tensor(indices), device).backward()
            inner.step()
        expected = _flat(alone).cpu()
        result["moved"] = float((expected - before).abs().max() / expected.abs().max())
        result["difference"] = float((parts[0][2] - expected).abs().max() / expected.abs().max())
    return result


def _loss(model: torch.nn.Module, index: torch.Tensor, device: str) -> torch.Tensor:
    length = LENGTH[device]
    phases = torch.arange(length * HIDDEN, device=device, dtype=torch.float64).view(length, HIDDEN)
    numbers = index.to(device, torch.float64)
    x = torch.sin(phases[None] * (1 + numbers[:, None, None] / 1000))
    return functional.mse_loss(model(x), torch.sin(numbers)[:, None])


def _flat(model: torch.nn.Module) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def unequal(name: str, device: str, cycles: int, slow: Callable[[Training], None]) -> dict[str, Any]:
    """Return samples per second of each scheme, in turns."""
    network = networks(device)[name]
    batch, ranks = network.global_batch, dist.get_world_size()
    of = {scheme: Training(network, device, batch) for scheme in SCHEMES}
    for training in of.values():
        slow(training)
    balance, lb_bsp = of["lb-bsp"].balanced(LBBSP(device="gpu"), batch)
    by_hand, oracle = of["oracle"].balanced(ByHand(), batch)
    schemes = {"ddp": of["ddp"].stock(batch // ranks), "lb-bsp": lb_bsp, "oracle": oracle}
    for scheme, rounds in (("ddp", 5), ("lb-bsp", FIRST), ("oracle", PASSES * PASS + 1)):
        for _ in range(rounds):
            next(schemes[scheme])
    rates = rates_of(schemes, batch, cycles, device)
    profile = balance._session.meter.learner.profile
    gamma = None if profile is None or profile.gamma is None else profile.gamma
    return {
        "rates": rates, "oracle": list(by_hand.plan), "now": list(balance.plan),
        "gamma": None if gamma is None else [gamma.slope_s, gamma.intercept_s, gamma.saturation],
    }  # fmt: skip


def rates_of(schemes: dict[str, Iterator[None]], samples: int, cycles: int, device: str) -> dict[str, list[float]]:
    """Return samples per second of each scheme, in turns; a step of any is of so many samples."""

    def between() -> None:
        forget_training()
        done(device)
        dist.barrier()

    took = in_turns(schemes, cycles, TURN, between)
    return {scheme: [TURN * samples / each for each in seconds] for scheme, seconds in took.items()}


def unequal_beside(name: str, device: str, cycles: int, slow: Callable[[Training], None], reducer: str) -> Any:
    """Return samples per second with scaled losses, and this rank's own seconds, by events and alone by the clock."""
    network = networks(device)[name]
    batch, rank = network.global_batch, dist.get_rank()

    def training() -> Training:
        slow(made := Training(network, device, batch))
        return made

    usual, late_tables._SUM_CPU_S = late_tables._SUM_CPU_S, 0.0  # a table each round: splits are found in few
    records: list[Any] = []
    by_hand, oracle = training().beside(ByHand(), batch, reducer, PASSES * PASS + 2 * PASS, records)
    balance, lb_bsp = training().beside(LBBSP(device="gpu"), batch, reducer, FIRST)
    late_tables._SUM_CPU_S = usual
    stock = training().stock(batch // dist.get_world_size(), reducer)
    alone = training().alone(batch) if rank == 0 else itertools.repeat(None)
    rates = rates_of({"stock": stock, "lb-bsp": lb_bsp, "oracle": oracle, "alone": alone}, batch, cycles, device)
    # Each rank its part of the split, at the same time, and without the others.
    by_itself = Blocks(training().alone(by_hand.plan[rank]), device)
    clock_s = statistics.median(by_itself.block() for _ in range(5))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, clock_s)
    known = [r["compute_s"] for r in records if None not in r["compute_s"] and r["samples"] == list(by_hand.plan)]
    return {
        "rates": rates, "oracle": list(by_hand.plan), "now": list(balance.plan), "clock_s": everywhere,
        "own_s": [statistics.median(of) for of in zip(*known, strict=True)],
    }  # fmt: skip


def exact(device: str, reducer: str) -> dict[str, float]:
    """Return how far a training with scaled losses is from one process, over the climb of LB-BSP's first rounds."""
    ranks, rounds = dist.get_world_size(), 26
    late_tables._SUM_CPU_S = 0.0  # a table each round, however short it is: splits change in each
    torch.manual_seed(0)
    model = Sequences().double().to(device)
    wrapped = reduced(model, reducer, device)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    balance = LoadBalance(LBBSP(device="gpu"), global_batch=24 * ranks)
    loader = BalancedLoader(Indices(240 * ranks), balance, shuffle=True, seed=3, stop_at=rounds)
    seen: list[list[int]] = []
    while balance.rounds < rounds:
        for index in loader:
            optimizer.zero_grad()
            balance.scale(_loss(wrapped, index, device)).backward()
            optimizer.step()
            seen.append(index.tolist())
    balance.close()
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, seen)
    torch.manual_seed(0)
    alone = Sequences().double().to(device)
    before, inner = _flat(alone).cpu(), torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for round in range(rounds):
        inner.zero_grad()
        _loss(alone, torch.tensor([i for part in parts for i in part[round]]), device).backward()
        inner.step()
    expected, mine = _flat(alone).cpu(), _flat(wrapped).cpu()
    return {
        "difference": float((mine - expected).abs().max() / expected.abs().max()),
        "moved": float((expected - before).abs().max() / expected.abs().max()),
        "splits": len({tuple(len(part[round]) for part in parts) for round in range(rounds)}),
    }


class Blocks:
    """Steps of one way to train; a step's seconds are the mean of a whole block, to the device's end of it."""

    def __init__(self, steps: Iterator[None], device: str) -> None:
        self._steps, self._device = steps, device

    def block(self, steps: int = BLOCK) -> float:
        """Train a block and return its seconds per step; the first two steps do not count."""
        for _ in range(2):
            next(self._steps)
        done(self._device)
        began = time.perf_counter()
        for _ in range(steps):
            next(self._steps)
        done(self._device)
        forget_training()
        return (time.perf_counter() - began) / steps


def overhead_beside(name: str, device: str, pairs: int, reducer: str) -> dict[str, list[float]]:
    """Return step times with scaled losses over those of the reducer alone, on equal ranks.

    The reducer alone is made last: where layers wait, hooks are put on all models that are there.
    """
    network = networks(device)[name]
    batch = network.global_batch
    ours = {
        policy: Blocks(Training(network, device, batch).beside(policy, batch, reducer, 1)[1], device)
        for policy in ("bsp", "lb-bsp")
    }
    samples = batch // dist.get_world_size()
    alone = Blocks(Training(network, device, samples).stock(samples, reducer), device)
    return alternate(pairs, name, {STOCK: alone, **ours}, BLOCK)


def overhead(name: str, device: str, pairs: int) -> dict[str, list[float]]:
    """Return step times over DDP's, on equal ranks."""
    network = networks(device)[name]
    batch = network.global_batch
    samples = batch // dist.get_world_size()

    def ours(policy: str) -> Blocks:
        return Blocks(Training(network, device, batch).balanced(policy, batch)[1], device)

    ddp = Blocks(Training(network, device, samples).stock(samples), device)
    return alternate(pairs, name, {STOCK: ddp, "bsp": ours("bsp"), "lb-bsp": ours("lb-bsp")}, BLOCK)


def twice(training: Training) -> None:
    """Make this rank about half as fast: each gradient is computed twice, the second time to be thrown away."""
    gradient, model = training.gradient, training.network.make(training.device)

    def again(trained: torch.nn.Module, samples: int, *scale: Any) -> None:
        gradient(model, samples)
        model.zero_grad()
        gradient(trained, samples, *scale)

    training.gradient = again  # type: ignore[method-assign]


def main(what: str, name: str, device: str, backend: str, percentages: str, times: int) -> None:
    rank = int(os.environ["RANK"])
    take_share(percentages, rank)
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    if device == "cuda":
        torch.cuda.set_device(0)
    what, _, reducer = what.partition(" beside ")
    slow = twice if what == "unequal" and not percentages and rank else lambda training: None
    if what == "exact":
        report(exact(device, reducer))
    elif reducer:
        report(
            unequal_beside(name, device, times, slow, reducer)
            if what == "unequal"
            else overhead_beside(name, device, times, reducer)
        )
    elif what == "stopwatch":
        report(stopwatch(name, device))
    elif what == "memory":
        report(memory(times, device))
    elif what == "unequal":
        report(unequal(name, device, times, slow))
    elif what == "overhead":
        report(overhead(name, device, times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:6], int(sys.argv[6]))
