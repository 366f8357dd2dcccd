"""One rank of `speed_torch.py`: every scheme trains a network of its own, in turns of a few rounds."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import demo_rank
import horovod.torch as hvd
import torch
from _speed_oracle import Oracle, said
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_hetero.policies import LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive
from hvd_hetero.testing import SlowDown, pin_to_core, report, slow_down
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH = 384
ITERATION = 96  # samples of one iteration of all ranks under ElasticBSP
TURN = {"elastic-bsp": 3}  # rounds of a turn
USUAL_TURN = 6
# Micro-batches per rank and round of self-adaptive allocation, of 64 samples for two ranks: at rest it divides samples,
# so finer ones gain nothing, and each costs (with 12 for 3 the rate was 7 % lower).
PIECES = 3
STEPS = 16  # N of non-blocking rounds: how much of a round the last micro-batch of a slow rank is
SWITCH = 60  # rounds between two changes of the slow rank
Rounds = Iterator[float]  # each round yields its samples, over all ranks


class Job:
    """What the schemes share: the data, and how slow this rank is."""

    def __init__(self, factors: list[float]) -> None:
        self.factors = factors
        self.data = TensorDataset(*demo_rank.images(20 * GLOBAL_BATCH, seed=2))
        self.slowness: SlowDown = slow_down(factors[hvd.rank()], "auto" if max(factors) > 1 else "sleep")

    def become(self, factor: float) -> None:
        """Be so many times slower from now on."""
        if factor != self.slowness.factor:
            self.slowness.set_factor(factor)

    def oracle(self) -> Oracle:
        """Stock Horovod, with a split set by hand."""
        return Oracle(self.data, GLOBAL_BATCH, self.slowness)

    def balanced(self, policy: Policy, global_batch: int = GLOBAL_BATCH) -> tuple[Rounds, LoadBalance]:
        """The loop of a user, for ever; it stands still after each round."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        balance = LoadBalance(policy, global_batch=global_batch)
        loader = BalancedLoader(self.data, balance, shuffle=True, seed=0, drop_last=True)
        optimizer = DistributedOptimizer(demo_rank.sgd(model), balance, model.named_parameters())

        def rounds() -> Rounds:
            for epoch in itertools.count():
                loader.set_epoch(epoch)
                for x, y in loader:
                    done = balance.rounds
                    optimizer.zero_grad()
                    pace.gradient(model, x, y)
                    optimizer.step()
                    if balance.rounds > done:
                        yield float(balance.balancer.finished.table.total)

        return rounds(), balance

    def stock(self, name: str) -> Rounds:
        """Horovod as it comes."""
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        names = [(f"{name}.{n}", p) for n, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(demo_rank.sgd(model), names)
        sampler = DistributedSampler(self.data, hvd.size(), hvd.rank(), shuffle=True, seed=0, drop_last=True)
        loader = DataLoader(self.data, GLOBAL_BATCH // hvd.size(), sampler=sampler, drop_last=True)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
                yield float(GLOBAL_BATCH)


def turns(schemes: dict[str, Rounds], cycles: int, warm_up: dict[str, int]) -> dict[str, list[float]]:
    """Samples per second of every turn of every scheme, the schemes in alternating order."""
    found: dict[str, list[float]] = {name: [] for name in schemes}
    for name, rounds in schemes.items():
        for _ in range(warm_up.get(name, 4)):
            next(rounds)
        say(name)
    for cycle in range(cycles):
        names = list(schemes) if cycle % 2 == 0 else list(schemes)[::-1]
        for name in names:
            hvd.allreduce(torch.zeros(1), name="turn")
            began = time.perf_counter()
            samples = sum(next(schemes[name]) for _ in range(TURN.get(name, USUAL_TURN)))
            found[name].append(samples / (time.perf_counter() - began))
            say(name)
    return found


def say(what: str) -> None:
    if hvd.rank() == 0:
        print(what, flush=True)


def steady(job: Job, cycles: int) -> dict:
    """One pace for each rank, from beginning to end."""
    n = hvd.size()
    oracle = job.oracle()
    tuned = oracle.tune()
    adaptive = SelfAdaptive(total=PIECES * n)
    per_epoch = len(job.data) // GLOBAL_BATCH
    schemes = {
        "stock": job.stock("stock"),
        "oracle": oracle.rounds,
        "lb-bsp": job.balanced(LBBSP())[0],
        "self-adaptive": job.balanced(adaptive)[0],
        "non-blocking": job.balanced(NonBlocking(STEPS), n * max(oracle.split))[0],
        "elastic-bsp": job.balanced(ElasticBSP(), ITERATION)[0],
    }
    found = turns(schemes, cycles, {"lb-bsp": 12, "self-adaptive": 5 * per_epoch + 1, "elastic-bsp": 6})
    in_turns = said(oracle.split, oracle.at_work(cycles * USUAL_TURN))
    return {"turns": found, "tuned": [tuned], "in_turns": in_turns, "weights": adaptive._weights}


def switching(job: Job, cycles: int) -> dict:
    """The slow rank is another one every 60 rounds; the oracle's split changes in the same round."""
    n, slow = hvd.size(), max(job.factors)
    oracle = job.oracle()
    splits, tuned = [], []
    for victim in range(n):
        job.become(slow if hvd.rank() == victim else 1.0)
        tuned.append(oracle.tune())
        splits.append(oracle.split)
    schemes = {"oracle": oracle.rounds, "lb-bsp": job.balanced(LBBSP())[0]}
    found: dict[str, list[float]] = {name: [] for name in schemes}
    for rounds in schemes.values():
        for _ in range(4):
            next(rounds)
    for cycle in range(cycles):
        victim = cycle % n
        oracle.split = splits[victim]
        for name in list(schemes) if cycle % 2 == 0 else list(schemes)[::-1]:
            # Each scheme meets the change in the first round of its turn, used to the former victim.
            job.become(slow if hvd.rank() == victim else 1.0)
            hvd.allreduce(torch.zeros(1), name="turn")
            began = time.perf_counter()
            samples = sum(next(schemes[name]) for _ in range(SWITCH))
            found[name].append(samples / (time.perf_counter() - began))
            say(name)
    return {"turns": found, "tuned": tuned}


def stability(job: Job, epochs: int) -> dict:
    """Self-adaptive allocation from 9 : 1 on machines of 1 : 2."""
    policy = SelfAdaptive(start=[9, 1] if hvd.size() == 2 else None, total=10 if hvd.size() == 2 else None)
    rounds, balance = job.balanced(policy)
    path = [list(policy._weights)]
    stable_after = None
    while len(path) <= epochs:
        next(rounds)
        epoch = balance.balancer.finished.epoch
        if epoch >= len(path):
            path.append(list(policy._weights))
            say("stability")
            if stable_after is None and policy.stable:
                stable_after = epoch
    return {"path": path, "stable_after": stable_after}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=("steady", "switching", "stability"), required=True)
    parser.add_argument("--factors", type=float, nargs="+", required=True)
    parser.add_argument("--cycles", type=int, required=True)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    # The first rank, at full speed, has a core to itself; the others, which sleep a good deal, share what is left.
    pin_to_core(min(hvd.rank(), 1))
    job = Job(options.factors)
    described = hvd.allgather_object(job.slowness.describe(), name="slowness")
    with job.slowness:
        scenario = {"steady": steady, "switching": switching, "stability": stability}[options.scenario]
        outcome = scenario(job, options.cycles)
    report(outcome | {"slowness": described})


if __name__ == "__main__":
    main()
