"""One rank of `speed_torch.py`: each scheme trains its own network, in turns of a few rounds."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import demo_rank
import horovod.torch as hvd
import torch
from _speed_oracle import Oracle
from _variants import BASE, DRIVEN, VARIANTS, policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_hetero.policies import ElasticBSP, NonBlocking, Policy, SelfAdaptive
from hvd_hetero.testing import SlowDown, pin_to_core, report, slow_down
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

GLOBAL_BATCH = 384
ITERATION = 96  # samples of one iteration of all ranks under ElasticBSP
TURN = {"elastic-bsp": 2}  # rounds of a turn
USUAL_TURN = 3  # few, so that the turns of a cycle meet the same moments of the machine
# Micro-batches per rank and round of self-adaptive allocation, of 64 samples for two ranks: at rest it divides samples,
# so finer ones gain nothing, and each costs (with 12 for 3 the rate was 7 % lower).
PIECES = 3
STEPS = 16  # N of non-blocking rounds: how much of a round the last micro-batch of a slow rank is
SWITCH = 60  # rounds between two changes of the slow rank
Rounds = Iterator[list[int]]  # each round, which is one update, yields the samples that each rank did in it


class Job:
    """Parts that the schemes share: the data, and this rank's slowness."""

    def __init__(self, factors: list[float], variant: str = BASE) -> None:
        self.factors = factors
        self.variant = variant
        self.data = TensorDataset(*demo_rank.images(20 * GLOBAL_BATCH, seed=2))
        # All but the first rank share a core.
        fits = len(factors) <= 2 or sum(1 / factor for factor in factors[1:]) < 0.9
        self.slowness: SlowDown = slow_down(factors[hvd.rank()], "auto" if max(factors) > 1 else "sleep", fits=fits)

    def become(self, factor: float) -> None:
        """Make this rank ``factor`` times slower from now on."""
        if factor != self.slowness.factor:
            self.slowness.set_factor(factor)

    def oracle(self) -> Oracle:
        """Return stock Horovod with a split set by hand."""
        return Oracle(self.data, GLOBAL_BATCH, self.slowness)

    def balanced(self, policy: Policy, global_batch: int = GLOBAL_BATCH) -> tuple[Rounds, LoadBalance]:
        """Return a user's loop that runs for ever, pausing after each round, and its balancer."""
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
                        yield [int(x) for x in balance._session.balancer.finished.table.figures("samples")]

        return rounds(), balance

    def lb_bsp(self) -> dict[str, Rounds]:
        """Return LB-BSP as it comes, and beside it the chosen variant."""
        names = {"lb-bsp": BASE} | ({} if self.variant == BASE else {"variant": self.variant})
        return {name: self.balanced(policy(variant))[0] for name, variant in names.items()}

    def stock(self, name: str) -> Rounds:
        """Return stock Horovod with equal batches."""
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
                yield [GLOBAL_BATCH // hvd.size()] * hvd.size()

    def alone(self) -> Rounds:
        """Return the training of one process that does all samples, on the first rank, while the others wait."""
        everything = [GLOBAL_BATCH] + [0] * (hvd.size() - 1)
        model, pace = demo_rank.network(), demo_rank.Pace(self.slowness)
        optimizer = demo_rank.sgd(model)
        loader = DataLoader(self.data, GLOBAL_BATCH, shuffle=True, drop_last=True)
        while hvd.rank():
            yield everything
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                pace.gradient(model, x, y)
                optimizer.step()
                yield everything


@dataclass
class Turns:
    """Results of one scheme's turns."""

    rates: list[float] = field(default_factory=list)
    """Samples per second of each turn."""
    divisions: list[list[int]] = field(default_factory=list)
    """Samples of each rank, for every round."""

    def take(self, rounds: Rounds, count: int) -> None:
        """Train one more turn."""
        hvd.allreduce(torch.zeros(1), name="turn")
        began = time.perf_counter()
        done = [list(next(rounds)) for _ in range(count)]
        self.rates.append(sum(map(sum, done)) / (time.perf_counter() - began))
        self.divisions += done

    def tell(self) -> dict:
        """Return the rates, and the mean division of a round."""
        rounds = len(self.divisions)
        return {"rates": self.rates, "samples": [sum(of) / rounds for of in zip(*self.divisions, strict=True)]}


def turns(schemes: dict[str, Rounds], oracle: Oracle, cycles: int, warm_up: dict[str, int]) -> dict[str, dict]:
    """Run every turn of every scheme, in alternating order.

    They warm up in turns with the oracle, since ranks are not as fast in one row of rounds (see `Oracle`): what a
    scheme, and the oracle, learns of their speeds is to hold when it counts.
    """
    found = {name: Turns() for name in schemes}
    for name, rounds in schemes.items():
        if name == "oracle":
            continue
        for _ in range(0, warm_up.get(name, 4), USUAL_TURN):
            Turns().take(rounds, USUAL_TURN)
            oracle.follow()
            Turns().take(oracle.rounds, USUAL_TURN)
        say(name)
    for cycle in range(cycles):
        for name in order(list(schemes), cycle):
            if name == "oracle":
                oracle.follow()
            found[name].take(schemes[name], TURN.get(name, USUAL_TURN))
            say(name)
    return {name: of.tell() for name, of in found.items()}


def order(names: list[str], cycle: int) -> list[str]:
    """Return the order of a cycle: to and fro, so that a drift of the machine favours no scheme.

    At each turning point a scheme has two turns in a row, which makes ranks faster, so it is another scheme each time.
    """
    first = cycle // 2 % len(names)
    names = names[first:] + names[:first]
    return names if cycle % 2 == 0 else names[::-1]


def say(what: str) -> None:
    if hvd.rank() == 0:
        print(what, flush=True)


def steady(job: Job, cycles: int) -> dict:
    """Run all schemes while each rank keeps its pace."""
    n = hvd.size()
    oracle = job.oracle()
    tuned = oracle.tune()
    per_epoch = len(job.data) // GLOBAL_BATCH
    most = n * max(oracle.now.split)
    schemes = {"stock": job.stock("stock"), "oracle": oracle.rounds, **job.lb_bsp()}
    if job.variant == BASE:
        schemes |= {
            "self-adaptive": job.balanced(SelfAdaptive(total=PIECES * n))[0],
            "non-blocking": job.balanced(NonBlocking(STEPS), most)[0],
            "elastic-bsp": job.balanced(ElasticBSP(), ITERATION)[0],
            "alone": job.alone(),
        }
    settings = {
        "self-adaptive": f"total={PIECES * n} (default: {10 * n})",
        "non-blocking": f"micro_batches={STEPS} (default: 8) and global_batch={most}",
        "elastic-bsp": f"global_batch={ITERATION}, of one iteration",
    }
    first = {"lb-bsp": 12, "variant": 12, "self-adaptive": 5 * per_epoch + 1, "elastic-bsp": 6}
    found = turns(schemes, oracle, cycles, {name: rounds for name, rounds in first.items() if name in schemes})
    in_turns, off = oracle.judged(cycles * USUAL_TURN)
    return {
        "turns": found, "tuned": [tuned], "in_turns": [in_turns], "off": off,
        "settings": {name: of for name, of in settings.items() if name in schemes},
        "global_batch": GLOBAL_BATCH,
    }  # fmt: skip


def switching(job: Job, cycles: int) -> dict:
    """Change the slow rank every 60 rounds; the oracle's split changes in the same round.

    A first turn with each of them slow does not count: from it the oracle learns how fast ranks are in turns.
    """
    n, slow = hvd.size(), max(job.factors)
    oracle = job.oracle()
    known, tuned = [], []
    for victim in range(n):
        job.become(slow if hvd.rank() == victim else 1.0)
        oracle.now = oracle.nothing_known()
        tuned.append(oracle.tune())
        known.append(oracle.now)
    schemes = {"oracle": oracle.rounds, **job.lb_bsp()}
    found = {name: Turns() for name in schemes}
    for cycle in range(-n, cycles):
        victim = cycle % n
        oracle.now = known[victim]
        oracle.follow()
        for name in order(list(schemes), cycle):
            # Each scheme meets the change in the first round of its turn, used to the former victim.
            job.become(slow if hvd.rank() == victim else 1.0)
            (found[name] if cycle >= 0 else Turns()).take(schemes[name], SWITCH)
            say(name)
    in_turns, off = [], []
    for victim in range(n):
        oracle.now = known[victim]
        said, longer = oracle.judged(len(range(victim, cycles, n)) * SWITCH)
        in_turns.append(said)
        off.append(longer)
    return {
        "turns": {name: of.tell() for name, of in found.items()}, "tuned": tuned, "in_turns": in_turns,
        "off": max(off),
    }  # fmt: skip


def stability(job: Job, epochs: int) -> dict:
    """Run self-adaptive allocation from 9 : 1 on machines of 1 : 2, and note the allocation in each epoch."""
    policy = SelfAdaptive(start=[9, 1])
    rounds, balance = job.balanced(policy)
    path: list[dict] = []
    ran: list[int] = []
    while len(path) <= epochs:
        ran = next(rounds)
        if balance._session.balancer.finished.epoch == len(path):
            # The first round of an epoch follows what the epoch before has shown.
            path.append({"counts": list(balance._session.balancer.plan().micro_batches), "stable": policy.stable})
            say("stability")
    return {"path": path, "division": ran}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=("steady", "switching", "stability"), required=True)
    parser.add_argument("--factors", type=float, nargs="+", required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--variant", choices=[*VARIANTS, *DRIVEN], default=BASE)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    # The first rank, at full speed, has a core to itself; the others, which sleep a good deal, share the rest.
    pin_to_core(min(hvd.rank(), 1))
    job = Job(options.factors, options.variant)
    described = hvd.allgather_object(job.slowness.describe(), name="slowness")
    with job.slowness:
        scenario = {"steady": steady, "switching": switching, "stability": stability}[options.scenario]
        outcome = scenario(job, options.cycles)
    report(outcome | {"slowness": described})


if __name__ == "__main__":
    main()
