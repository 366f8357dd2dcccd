r"""What each worker is worth: samples per second with it and without it, the rest split anew.

For the workers S that stay, on the K rounds of a replay (``replay`` has the slopes m, the fixed costs b, and the
factors f by which a round was slow):

    R(S) = mean_k X_k / (mean_k max_{i in S} f_ik (m_i x_i + b_i κ_i) + c + ρ(S) e)

x is LB-BSP's division of X_k, round k's global batch, among S: the exact optimum at the median paces of each ``_BLOCK``
rounds, less where the batch changes. Each worker that
stays gets a sample at least, as in production: this is how a very slow one hurts. Workers that rested in most
rounds get samples only if the round is sooner with them. e is the mean transfer, the wait of the rank that came last.
c is the rest of a round, which the workers that stay pay, too.

**Transfers of fewer workers.** n workers took e, so ρ = 1. In a ring of alike links m workers take (m - 1) / (n - 1)
of that if latency decides, and n / m times that share if bandwidth does, which is likely where transfers matter. But
the link of the worker that leaves may have been the slow one, or the time may not depend on m, so ρ may be anything
from 0 to 1. A single worker sends nothing, and pays at most ``_ALONE_S`` for asking.

**Interval.** R(S) lies between the least and the most over ρ and over the fixed costs that the run allows, and wider
by the luck of another run (``replay.rate_error``) at either end. Without / with is computed on the same machines.

The best split is a little better than what a policy finds out, with and without the worker alike. Left out: memory that
a larger share may not find, beyond the limits that the run met; cores and links that workers share.

A described cluster needs none of this: production's policy trains on it in simulated time (``engine``), with and
without each worker, and the interval is the luck of its rounds.

The ``_MOST_ASKED`` slowest workers are asked about.

Shapes: K rounds, n workers, V machines that the run may have been: the likely ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.affine_shares import AffineCosts
from hvd_hetero.policies.policy import equal_plan
from hvd_hetero.tools.simulation.cluster import Cluster
from hvd_hetero.tools.simulation.compare import run_scheme, settled
from hvd_hetero.tools.simulation.description import Description
from hvd_hetero.tools.simulation.replay import Replay, rate_error
from hvd_hetero.tools.simulation.schemes import choose
from hvd_hetero.tools.simulation.settings import shown
from hvd_hetero.tools.simulation.variation import Recorded

Floats = NDArray[np.float64]
Rates = Callable[[tuple[int, ...]], Floats]
"""From the workers that stay to samples per second: least, likely and most on each of V machines, (V, 3)."""

_MOST_ASKED = 16
_BLOCK = 25  # rounds that one split serves: LB-BSP follows slower changes, and foresees no faster ones (arbitrary)
_ALONE_S = 2e-3  # of a collective that one rank does with itself: Horovod looks for work once a millisecond
_MOST_PRICE = 1e12  # per hour, in any currency (arbitrary): sums of them are finite
_OPEN = 1.02  # ends further apart are worth asking for


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples per second, or a ratio of them, with the interval in which it lies."""

    likely: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Floats) -> Rate:
        """Return the likely figure of the likely machines, and the ends over all of them."""
        return cls(float(figures[0, 1]), float(figures.min()), float(figures.max()))


@dataclass(frozen=True, slots=True)
class Without:
    """The training without one worker."""

    worker: int
    rate: Rate
    times: Rate
    """Over the rate of all workers: above 1 if it is faster without this worker."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What the workers are worth."""

    workers: int
    all: Rate
    """Samples per second of all workers."""
    each: tuple[Without, ...]
    """The most valuable worker first."""
    fastest: int
    times_fastest: Rate
    """All workers over the fastest one alone."""
    transfer_open: bool = False
    """True if a run does not tell the transfers of fewer workers, and they matter."""
    fixed_open: bool = False
    """True if a run does not tell the fixed cost of a micro-batch, and it matters."""


def worth_of_run(machines: Replay, global_batch: int | None = None) -> Worth:
    """Return what the ranks of a recorded run are worth; ``global_batch``: in rounds of as many samples instead."""
    run = machines.run
    limits = run.limit[-1].astype(np.float64)
    waits = run.wait_s[list(machines.kept)]
    rests = np.median(run.plan[list(machines.kept)], axis=0) == 0
    variants = [machines.cluster, *(other for other in machines.extremes if other != machines.cluster)]
    totals = np.array(machines.totals) if global_batch is None else np.full(machines.rounds, global_batch)
    recorded = [_Machines(cluster, waits, limits, rests, totals) for cluster in variants]
    luck, slack = 1.0 + machines.rate_error, 1.0 + LBBSP().tolerance

    @cache
    def rates(stay: tuple[int, ...]) -> Floats:
        least = 1.0 / (luck * (slack if len(stay) > 1 else 1.0))
        return np.array([each.rates(list(stay)) for each in recorded]) * [least, 1.0, luck]

    found = _worth(rates, recorded[0].alone_s, slack)
    whole = rates(tuple(range(run.workers)))
    middle = np.array([rates(_but(run.workers, each.worker))[:, 1] for each in found.each])
    round_s = float(totals.mean()) / found.all.likely
    return replace(
        found,
        transfer_open=run.workers > 2 and recorded[0].transfer_s > (_OPEN - 1.0) * round_s,
        fixed_open=bool(np.ptp(middle / whole[:, 1], axis=1).max() > _OPEN - 1.0),
    )


def worth_of_cluster(
    described: Description, progress: Callable[[str, float], None] = lambda label, share: None
) -> Worth:
    """Return what the workers of a described cluster are worth under LB-BSP."""
    scheme, workers = choose("lb-bsp", "--worth"), described.cluster.workers

    def rates(stay: tuple[int, ...]) -> Floats:
        cluster = replace(described.cluster, workers=tuple(workers[i] for i in stay))
        left = [str(i) for i in range(len(workers)) if i not in stay]
        label = f"without {left[0]}" if len(left) == 1 else "all" if not left else f"{stay[0]} alone"
        told = replace(scheme, label=label)
        result = run_scheme(replace(described, cluster=cluster, between=()), told, progress)
        begin = settled(result)
        seconds, samples = np.array(result.elapsed_s[begin:]), np.array(result.samples[begin:], dtype=np.float64)
        luck = 1.0 + rate_error(seconds, samples)
        return np.array([[1.0 / luck, 1.0, luck]]) * float(samples.sum() / seconds.sum())

    costs = [worker.compute for worker in workers]
    return _worth(rates, np.array([c.slope_s * described.global_batch + c.intercept_s for c in costs]))


def _worth(rates: Rates, alone_s: Floats, slack: float = 1.0) -> Worth:
    """Ask for all workers, without each of them, and for the fastest alone; ``alone_s`` tells which that is.

    All workers together may be slower than they likely are by the factor ``slack``.
    """
    count = len(alone_s)
    if count < 2:
        raise ValueError("a single worker is worth all that is done; describe or record two at least")
    everyone, fastest = tuple(range(count)), int(np.argmin(alone_s))
    asked = np.argsort(-alone_s, kind="stable")[:_MOST_ASKED].tolist()
    whole = rates(everyone)
    each = []
    for worker in asked:
        without = rates(_but(count, worker))
        each.append(Without(worker, Rate.of(without), Rate.of(without * [1.0, 1.0, slack] / whole[:, 1:2])))
    each.sort(key=lambda one: one.times.likely)
    times_fastest = whole[:, 1:2] * [1.0 / slack, 1.0, 1.0] / rates((fastest,))[:, ::-1]
    return Worth(count, Rate.of(whole), tuple(each), fastest, Rate.of(times_fastest))


def _but(count: int, worker: int) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i != worker)


class _Machines:
    """The machines of a replay, asked for the rates of some of them."""

    def __init__(
        self, cluster: Cluster, waits: Floats, limits: Floats, rests: NDArray[np.bool_], totals: NDArray[np.int64]
    ) -> None:
        variations = [variation for worker in cluster.workers for variation in worker.variation]
        assert all(isinstance(variation, Recorded) for variation in variations), "machines of a replay vary as recorded"
        self._factors = np.array([v.factors for v in variations if isinstance(v, Recorded)]).T
        self._slope_s, self._fixed_s = np.array([(w.compute.slope_s, w.compute.intercept_s) for w in cluster.workers]).T
        self._limits, self._rests, self._totals, self._count = limits, rests, totals, len(cluster.workers)
        self._total = float(totals.mean())
        blocks = np.array_split(np.arange(len(totals)), math.ceil(len(totals) / _BLOCK))
        begins = [*(block[0] for block in blocks), *(np.flatnonzero(np.diff(totals)) + 1)]
        self._ends = np.unique(begins)[1:]
        rest_s = np.array(cluster.network.recorded_s)
        last_s = np.where((waits >= 0) & np.isfinite(waits), waits, np.inf).min(axis=1)
        known = np.isfinite(last_s)
        # Where no wait is known, all that is not computing may have been the transfer.
        self.transfer_s = float(np.minimum(last_s, rest_s)[known].mean()) if known.any() else float(rest_s.mean())
        self._rest_s = float(rest_s.mean()) - self.transfer_s

    @property
    def alone_s(self) -> Floats:
        """Seconds that each worker needs for all samples of a round."""
        return np.asarray(self._slope_s * self._total + self._fixed_s)

    def rates(self, stay: list[int]) -> list[float]:
        """Return the least, the likely and the most samples per second of these workers."""
        awake = [i for i in stay if not self._rests[i]] or stay
        computing_s = min(self._computing_s(each) for each in ([stay] if awake == stay else [stay, awake]))
        round_s = computing_s + self._rest_s
        return [self._total / (round_s + transfer_s) for transfer_s in self._transfers_s(len(stay))]

    def _transfers_s(self, count: int) -> tuple[float, float, float]:
        """Return the most, the likely and the least seconds of a transfer among so many workers."""
        most_s, all_workers = self.transfer_s, self._count
        if count == all_workers:
            return most_s, most_s, most_s
        if count == 1:
            asking_s = min(most_s, _ALONE_S)
            return asking_s, 0.5 * asking_s, 0.0
        return most_s, all_workers * (count - 1) / (count * (all_workers - 1)) * most_s, 0.0

    def _computing_s(self, stay: list[int]) -> float:
        """Return the mean seconds until the last of these workers is done."""
        slope_s, fixed_s, total_s = self._slope_s[stay], self._fixed_s[stay], 0.0
        blocks = zip(*(np.split(each, self._ends) for each in (self._factors[:, stay], self._totals)), strict=True)
        for factors, totals in blocks:
            pace = np.median(factors, axis=0)
            equal, beta = equal_plan(len(stay), int(totals[0])), fixed_s / slope_s
            speeds = 1.0 / (pace * slope_s * (1.0 + beta / equal.typical_size))
            costs = AffineCosts(speeds, beta, equal.typical_size, 1, 1)
            plan = costs.divided(equal, None, self._limits[stay]).within(self._limits[stay])
            total_s += float((factors * (slope_s * plan.shares + fixed_s * plan.cuts)).max(axis=1).sum())
        return total_s / len(self._factors)


def prices_of(text: str, workers: int) -> tuple[float, ...]:
    """Return the price of each worker per hour from "0=0.80,1=2.40"; an error says what to write."""
    way_out = f"write --prices {','.join(f'{i}=0.80' for i in range(min(workers, 3)))}{',…' if workers > 3 else ''}"
    found: dict[int, float] = {}
    for part in text.split(","):
        name, equals, price = (each.strip() for each in part.partition("="))
        if not (equals and name.isascii() and name.isdigit() and len(name) < 10 and int(name) < workers):
            raise ValueError(f"--prices must name ranks from 0 to {workers - 1}, got {shown(part)}; {way_out}")
        if int(name) in found:
            raise ValueError(f"--prices names rank {int(name)} twice; leave one of them out")
        try:
            found[int(name)] = float(price) if "_" not in price else math.nan  # Python reads 1_0 as 10
        except ValueError:
            found[int(name)] = math.nan
        if not 0 <= found[int(name)] <= _MOST_PRICE:
            raise ValueError(
                f"--prices must be numbers of at least 0 and at most {_MOST_PRICE:g} per hour, got {shown(part)}; "
                f"{way_out}"
            )
    if missing := [rank for rank in range(workers) if rank not in found]:
        raise ValueError(
            f"--prices must name every rank, and rank {missing[0]} has none; add {missing[0]}=… (0 if it is free)"
        )
    if not any(found.values()):
        raise ValueError("--prices must be above 0 for some rank, got 0 for all; leave --prices out")
    return tuple(found[rank] for rank in range(workers))
