r"""What each worker is worth: samples per second with it and without it, the rest split anew.

For the workers S that stay, on the K rounds of a replay:

    R(S) = mean_k X_k / (mean_k max_{i in S} f_ik Γ_i(x_i, κ_i) + c + ρ(S) e)

with the factors f of ``replay``, and Γ as ``compute`` has it. x is LB-BSP's division of X_k, round k's global batch,
among S: the exact optimum at the median paces of each ``_ROUNDS_PER_SPLIT`` rounds. e is the mean transfer, the wait of
the rank that came last. c is the rest of a round, which the workers that stay pay, too.

**Interval.** ρ is the part of e that fewer workers take: 1 for all of them, and anything from 0 to 1 for fewer. R(S)
lies between the least and the most over ρ and over the fixed costs that the run allows, and wider by the luck of
another run (``replay.rate_error``) at either end. Without / with is computed on the same machines.
Left out: memory that a larger share may not find, beyond the limits that the run met; cores and links that are shared.

A described cluster needs none of this: production's policy trains on it in simulated time (``engine``), with and
without each worker, and the interval is the luck of its rounds.

Shapes: K rounds, n workers, V machines that the run may have been: the likely ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.affine_shares import AffineCosts
from hvd_hetero.policies.policy import equal_plan
from hvd_hetero.tools.simulation.cluster import Cluster, Machines
from hvd_hetero.tools.simulation.compare import run_policy, settled
from hvd_hetero.tools.simulation.compute import Devices
from hvd_hetero.tools.simulation.description import Description
from hvd_hetero.tools.simulation.policy_choices import choose
from hvd_hetero.tools.simulation.recorded_machines import Replay, rate_error
from hvd_hetero.tools.simulation.settings import shown

Floats = NDArray[np.float64]
Rates = Callable[[tuple[int, ...]], Floats]
"""From the workers that stay to samples per second: least, likely and most on each of V machines, (V, 3)."""

# A replay without each rank takes time, and fast ranks do not hurt.
_SLOWEST_ASKED = 16
# LB-BSP follows slower changes, and foresees no faster ones (arbitrary).
_ROUNDS_PER_SPLIT = 25
# A collective that one rank does with itself: Horovod looks for work once a millisecond.
_ALONE_S = 2e-3
# Per hour, in any currency (arbitrary): sums of such prices are finite.
_PRICE_UP_TO = 1e12
# A narrower range changes no decision, so its reason is not mentioned.
_RANGE_MENTIONED_FROM = 1.02


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
class WithoutWorker:
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
    each: tuple[WithoutWorker, ...]
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
    workers, batch = machines.run.workers, float(np.mean(machines.totals))
    if global_batch is not None:
        machines, batch = replace(machines, totals=(global_batch,) * machines.rounds), global_batch
    variants = [machines.cluster, *(other for other in machines.extremes if other != machines.cluster)]
    draws = [Machines(cluster).per_round for cluster in variants]
    factors = [np.array([each.round(k).copy() for k in range(machines.rounds)]) for each in draws]
    luck, slack = 1.0 + machines.rate_error, 1.0 + LBBSP().tolerance
    transfer_s, rest_s = _transfer_s(machines)

    @cache
    def rates(stay: tuple[int, ...]) -> Floats:
        transfers_s = _transfers_s(transfer_s, len(stay), workers)
        round_s = (
            np.array([[_mean_computing_s(machines, *each, stay)] for each in zip(variants, factors, strict=True)])
            + rest_s
            + transfers_s
        )
        return batch / round_s * [1.0 / (luck * (slack if len(stay) > 1 else 1.0)), 1.0, luck]

    found = _worth(machines.cluster, batch, rates, slack)
    whole = rates(tuple(range(workers)))
    middle = np.array([rates(_all_but(workers, each.worker))[:, 1] for each in found.each])
    return replace(
        found,
        transfer_open=workers > 2 and transfer_s > (_RANGE_MENTIONED_FROM - 1.0) * batch / found.all.likely,
        fixed_open=bool(np.ptp(middle / whole[:, 1], axis=1).max() > _RANGE_MENTIONED_FROM - 1.0),
    )


def worth_of_cluster(
    described: Description, progress: Callable[[str, float], None] = lambda label, share: None
) -> Worth:
    """Return what the workers of a described cluster are worth under LB-BSP."""
    choice, workers = choose("lb-bsp", "--worth"), described.cluster.workers

    def rates(stay: tuple[int, ...]) -> Floats:
        cluster = replace(described.cluster, workers=tuple(workers[i] for i in stay))
        left = [str(i) for i in range(len(workers)) if i not in stay]
        label = f"without {left[0]}" if len(left) == 1 else "all" if not left else f"{stay[0]} alone"
        result = run_policy(replace(described, cluster=cluster, between=()), replace(choice, label=label), progress)
        begin = settled(result)
        luck = 1.0 + rate_error(np.array(result.elapsed_s[begin:]), np.array(result.samples[begin:], dtype=np.float64))
        return np.array([[1.0 / luck, 1.0, luck]]) * result.rate(begin)

    return _worth(described.cluster, described.global_batch, rates)


def _worth(cluster: Cluster, batch: float, rates: Rates, slack: float = 1.0) -> Worth:
    """Ask for all workers, without each of the slowest, and for the fastest alone, by the time of a whole batch.

    All workers together may be slower than they likely are by the factor ``slack``.
    """
    count = len(cluster.workers)
    if count < 2:
        raise ValueError("worth needs two workers or more, got one; describe or record another one")
    alone_s = np.array([w.compute.slope_s * batch + w.compute.intercept_s for w in cluster.workers])
    fastest, whole, each = int(np.argmin(alone_s)), rates(tuple(range(count))), []
    for worker in np.argsort(-alone_s, kind="stable")[:_SLOWEST_ASKED].tolist():
        without = rates(_all_but(count, worker))
        each.append(WithoutWorker(worker, Rate.of(without), Rate.of(without * [1.0, 1.0, slack] / whole[:, 1:2])))
    each.sort(key=lambda one: one.times.likely)
    times_fastest = whole[:, 1:2] * [1.0 / slack, 1.0, 1.0] / rates((fastest,))[:, ::-1]
    return Worth(count, Rate.of(whole), tuple(each), fastest, Rate.of(times_fastest))


def _all_but(count: int, worker: int) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i != worker)


def _transfer_s(machines: Replay) -> tuple[float, float]:
    """Return the mean seconds of a transfer, and of the rest of a round, in which no rank computes."""
    rest_s, waits = np.array(machines.cluster.network.recorded_s), machines.run.wait_s[list(machines.kept)]
    last_s = np.where((waits >= 0) & np.isfinite(waits), waits, np.inf).min(axis=1)
    known = np.isfinite(last_s)
    # Where no wait is known, the transfer may be all that is not computing. Else its share in the rounds whose
    # waits are known counts for all: seconds of a few long rounds could exceed the mean of all, and leave less than 0.
    whole_s, share = float(rest_s.mean()), 1.0
    if rest_s[known].sum() > 0:
        share = float(np.minimum(last_s, rest_s)[known].sum() / rest_s[known].sum())
    return share * whole_s, (1.0 - share) * whole_s


def _transfers_s(all_s: float, count: int, workers: int) -> list[float]:
    """Return the most, the likely and the least seconds of a transfer among so many of the workers."""
    if count == workers:
        return [all_s] * 3
    # A single worker sends nothing, and pays for the call.
    if count == 1:
        return [min(all_s, _ALONE_S), 0.5 * min(all_s, _ALONE_S), 0.0]
    # In a ring of equal links m of n workers take (m - 1) / (n - 1) of the time if latency decides. If bandwidth does,
    # as is likely where transfers matter, they take n / m times that. But the slow link may have been that of the
    # worker that leaves, or the time may not depend on their number. So anything from none to all of it is possible.
    return [all_s, workers * (count - 1) / (count * (workers - 1)) * all_s, 0.0]


def _mean_computing_s(machines: Replay, cluster: Cluster, factors: Floats, stay: Sequence[int]) -> float:
    """Return the mean seconds of a round until the last of these workers is done; those that rested may do nothing."""
    run, totals = machines.run, machines.totals
    # Ranks that were idle in most rounds get samples only if the round is sooner with them.
    idle = np.median(run.plan[list(machines.kept)], axis=0) == 0
    awake = [i for i in stay if not idle[i]]
    sooner_s = _mean_computing_s(machines, cluster, factors, awake) if 0 < len(awake) < len(stay) else math.inf
    devices, limits = Devices([cluster.workers[i].compute for i in stay]), run.limit[-1, list(stay)].astype(np.float64)
    beta, total_s = devices.intercept_s / devices.slope_s, 0.0
    # One exact split for a block of rounds: LB-BSP itself, in the engine, takes 1 to 3 s for what takes a tenth here,
    # and divides a little worse.
    parts = np.array_split(np.arange(len(totals)), math.ceil(len(totals) / _ROUNDS_PER_SPLIT))
    begins = np.unique([*(part[0] for part in parts), *(np.flatnonzero(np.diff(totals)) + 1)])
    for begin, block in zip(begins, np.split(factors[:, stay], begins[1:]), strict=True):
        equal = equal_plan(len(stay), totals[begin])
        speeds = 1.0 / (np.median(block, axis=0) * devices.slope_s * (1.0 + beta / equal.typical_size))
        # Each worker gets a sample at least, as in production: this is how a very slow one hurts.
        costs = AffineCosts(speeds, beta, equal.typical_size, 1, 1)
        plan = costs.divided(equal, limits).within(limits)
        total_s += float((block * devices.pieces(plan.shares, plan.batch_counts).work_s).max(axis=1).sum())
    return min(total_s / len(totals), sooner_s)


def prices_of(text: str, workers: int) -> tuple[float, ...]:
    """Return the price of each worker per hour from "0=0.80,1=2.40"; an error says what to write."""
    remedy = f"write --prices {','.join(f'{i}=0.80' for i in range(min(workers, 3)))}{',…' if workers > 3 else ''}"
    found: dict[int, float] = {}
    for part in text.split(","):
        name, _, price = (each.strip() for each in part.partition("="))
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < workers):
            raise ValueError(f"--prices must name ranks from 0 to {workers - 1}, got {shown(part)}; {remedy}")
        if int(name) in found:
            raise ValueError(f"--prices names rank {int(name)} twice; leave one of them out")
        try:
            found[int(name)] = float(price.replace("_", "no"))  # Python reads 1_0 as 10
        except ValueError:
            found[int(name)] = math.nan
        if not 0 <= found[int(name)] <= _PRICE_UP_TO:
            rule = f"numbers of at least 0 and at most {_PRICE_UP_TO:g} per hour"
            raise ValueError(f"--prices must be {rule}, got {shown(part)}; {remedy}")
    if missing := [rank for rank in range(workers) if rank not in found]:
        rule = f"every rank, and rank {missing[0]} has none; add {missing[0]}=… (0 if it is free)"
        raise ValueError(f"--prices must name {rule}")
    if not any(found.values()):
        raise ValueError("--prices must be above 0 for some rank, got 0 for all; leave --prices out")
    return tuple(found[rank] for rank in range(workers))
