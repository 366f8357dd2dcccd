"""Simulated ranks that read texts of unequal length: the program's own balancers and cutters, with a made-up clock."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from _cost_rules import WIDTH, Ints, log_normal, rules

from hvd_hetero.allocation.by_cost import divide, divide_padded
from hvd_hetero.balancer import Balancer
from hvd_hetero.data.cutter import Cutter
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_costs import SampleCosts
from hvd_hetero.policies import LBBSP

NOISE = 0.02
PER_RANK = 32  # texts of a round, on average
FIRST = 40  # rounds in which speeds and costs are learnt
_NOTED_AHEAD = 512  # samples whose costs are noted at once, where they are known late
UPDATE_S, TRANSFER_S = 1e-3, 5e-3
A_WORD_S = 2e-5  # at speed 1, of a text so short that its square does not count

Floats = npt.NDArray[np.float64]


def simulated(ranks: int, rounds: int, *, padded: bool) -> dict[str, list[Floats]]:
    """Return the seconds of work of all ranks, round by round, for each way to divide the same rounds."""
    lengths = log_normal(ranks * PER_RANK * (FIRST + rounds), seed=ranks)
    jobs = {"number": Job(lengths, ranks, padded=padded), "cost_of": Job(lengths, ranks, padded=padded, by_cost=True)}
    work = {name: [job.round() for _ in range(FIRST + rounds)][FIRST:] for name, job in jobs.items()}
    parts = [lengths[begin : begin + ranks * PER_RANK] for begin in range(0, len(lengths), ranks * PER_RANK)][FIRST:]
    named = {"known costs and speeds": Machines(ranks, padded=padded).best, **rules(padded=padded)}
    for name, rule in named.items():
        machines = Machines(ranks, padded=padded)
        work[name] = [machines.seconds([part[samples] for samples in rule(part, ranks)]) for part in parts]
    return work


def known_and_late(rounds: int, seed: int, *, padded: bool) -> dict[str, list[Floats]]:
    """Return the same for two ranks of speeds 1 and 1/2 whose costs are known before, or noted some rounds ahead."""
    lengths = log_normal(2 * PER_RANK * (FIRST + rounds), seed)
    jobs = {name: Job(lengths, 2, padded=padded, by_cost=True, late=name == "late") for name in ("known", "late")}
    return {name: [job.round() for _ in range(FIRST + rounds)][FIRST:] for name, job in jobs.items()}


def reading_s(lengths: Ints, *, padded: bool) -> float:
    """Return the seconds that texts take as one micro-batch at speed 1."""
    each = np.full(len(lengths), lengths.max(initial=0)) if padded else lengths
    return float((6 * WIDTH * each + each**2).sum()) * A_WORD_S / (6 * WIDTH)


def noise_alone(ranks: int, rounds: int) -> Floats:
    """Return what ranks would be busy if the division were perfect."""
    return np.exp(np.random.default_rng(1).normal(0.0, NOISE, (rounds, ranks)))


class Machines:
    """What reading takes on each rank."""

    def __init__(self, ranks: int, *, padded: bool) -> None:
        self._speeds = np.geomspace(1.0, 0.5, ranks)
        self._padded = padded
        self._noise = np.random.default_rng(2)

    def best(self, lengths: Ints, ranks: int) -> list[Ints]:
        """Divide by what texts really cost, and by how fast ranks are before the noise."""
        costs, shares = 6 * WIDTH * lengths + lengths**2, np.rint(1e3 * self._speeds).astype(np.int64)
        found = divide_padded(0 * costs, costs, shares) if self._padded else divide(costs, shares)
        return [np.flatnonzero(found == rank) for rank in range(ranks)]

    def seconds(self, lengths: list[Ints]) -> Floats:
        """Return the seconds that each rank takes for its texts, as one micro-batch."""
        work = np.array([reading_s(each, padded=self._padded) for each in lengths])
        return work / self._speeds * np.exp(self._noise.normal(0.0, NOISE, len(work)))


class Job:
    """One training: a balancer and a cutter for each rank."""

    def __init__(self, lengths: Ints, ranks: int, *, padded: bool, by_cost: bool = False, late: bool = False) -> None:
        self._lengths, self._now, self._machines = lengths, np.zeros(ranks), Machines(ranks, padded=padded)
        self.balancers = [
            Balancer(LBBSP(), rank, ranks, ranks * PER_RANK, clock=lambda rank=rank: float(self._now[rank]))
            for rank in range(ranks)
        ]
        self._cutters = []
        for balancer in self.balancers:
            order = SharedPermutation(len(lengths))
            if by_cost:
                fit = balancer.meter.learner.enable_costs()
                costs = len if late else lengths  # a function tells when samples are read, which none is here
                order.costs = SampleCosts.of(costs, balancer.policy, fit, len(lengths), None, shared=True)
                if late:
                    order.costs.receive = partial(self._note_ahead, order)
            self._cutters.append(Cutter(order, balancer.planner, balancer.rank))
            self._cutters[-1].begin()

    def _note_ahead(self, order: SharedPermutation) -> None:
        ahead = order.window(order.cursor - len(self._cutters) * PER_RANK, order.cursor + _NOTED_AHEAD)
        order.costs.note(ahead, self._lengths[ahead])

    def round(self) -> Floats:
        """Do one round, and return each rank's seconds of work."""
        cuts = [cutter.cut() for cutter in self._cutters]
        busy = self._machines.seconds([self._lengths[cut.part] for cut in cuts])
        rows: Any = 0.0
        for balancer, cut in zip(self.balancers, cuts, strict=True):
            (work,) = cut.micro_batches()
            balancer.begin(work)
            self._now[balancer.rank] += busy[balancer.rank]
            rows = rows + balancer.report()
        self._now[:] = self._now.max() + TRANSFER_S
        for balancer, cutter in zip(self.balancers, self._cutters, strict=True):
            balancer.agree(rows)
            balancer.meter.applied(UPDATE_S)
            cutter.finish(balancer.finished.table)
        self._now += UPDATE_S
        return busy
