r"""Why a rank was slow: the cause that explains what it cost, with its evidence.

What a rank costs, ``cost_i``, is a share of time (`losses`). Each candidate explains a share of the rank's own time as
well: what its quota held back, what other processes took, what it waited for its data, and so on
(`measurement.hindrances`), beyond what the fast ranks have of the same. What all ranks have makes none of them slow.

**Which cause.** The candidate that explains the most is named, if it explains at least half of ``cost_i``: what hits a
rank for 3 % of its time is not why it is 30 % slow. If none does, weaker evidence is looked at, in this order: pages
read back from disk, memory that has run out, and, in files without the kernel's counters, the CPU driver. If there is
none of it, a rank whose pace is the same multiple of the fast ranks' through all of the run is "slower", and any other
is "unknown".

**No alarm** where ``cost_i`` is below `LEAST`: times of equal ranks scatter by some percent on machines that do
anything else, and one of two equal ranks is always a little slower than the other. All ranks wait for the transfer. It
is the cause on each rank that has no larger one, if it takes at least `LEAST_TRANSFER` of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.losses import Floats, Losses, fast
from hvd_hetero.telemetry.records import Run

__all__ = ["KINDS", "LEAST", "LEAST_TRANSFER", "Cause", "causes"]

KINDS = {
    "throttled": "its container's limit",
    "competition": "other processes on its processor",
    "stolen": "other virtual machines on its host",
    "memory": "too little memory",
    "input": "slow input",
    "loop": "work between rounds",
    "garbage": "garbage collection",
    "clock": "a lower clock frequency",
    "cpu": "less of its processor",
    "network": "slow network",
    "slower": "a slower processor",
    "unknown": "not known",
}
"""Every kind of cause, and its name in words."""

LEAST = 0.10
"""Share of its time that a rank must cost before it is called slow."""

LEAST_TRANSFER = 0.20
"""Share of the run that the transfer must take before the network is called slow."""

_EXPLAINS = 0.5  # of the cost, at least
_LITTLE_MEMORY = 0.03  # of its memory is free: then the kernel takes pages back
_MANY_FAULTS = 100.0  # pages a second; a disk reads each in 0.1 ms to 10 ms
_STEADY = 0.15  # how far the pace of a slower processor may be from its middle, in the parts of a run
_PARTS = 8


@dataclass(frozen=True)
class Cause:
    """Why a rank was slow."""

    kind: str
    """A key of `KINDS`."""
    evidence: str
    """A sentence with figures."""
    way_out: str
    """What to do."""


def causes(run: Run) -> list[Cause | None]:
    """Return for each rank why it was slow; None: it held no rank up."""
    losses = Losses.of(run)
    candidates = list(_candidates(losses))
    found: list[Cause | None] = []
    for rank, cost in enumerate(losses.cost):
        if cost >= max(LEAST, losses.transfer):
            found.append(_named(losses, rank, candidates))
        else:
            found.append(_network(losses, rank) if losses.transfer >= LEAST_TRANSFER else None)
    return found


@dataclass(frozen=True)
class _Candidate:
    """``explains`` is a share of each rank's own time."""

    explains: Floats
    cause: Callable[[int], Cause]


def _named(losses: Losses, rank: int, candidates: list[_Candidate]) -> Cause:
    best = max(candidates, key=lambda candidate: candidate.explains[rank])
    if best.explains[rank] >= _EXPLAINS * losses.cost[rank]:
        return best.cause(rank)
    return _by_weaker_evidence(losses, rank) or _without_evidence(losses, rank)


def _candidates(losses: Losses) -> Iterator[_Candidate]:
    run, own_s = losses.run, losses.own_s.sum(axis=0)
    whole = _share(np.full(run.workers, run.elapsed_s.sum()), own_s)  # readings are shares of all time
    quota, sent = _mean(run, run.quota_cores), losses.own_s - run.compute_s - run.input_s
    loop_s = np.clip(sent, 0.0, None)

    def reading(column: Floats, kind: str, evidence: str, way_out: str) -> _Candidate:
        shares = np.nan_to_num(_mean(run, column))
        return _Candidate(
            np.clip(shares - fast(shares), 0.0, None) * whole,
            lambda rank: Cause(kind, evidence.format(share=shares[rank], quota=quota[rank]), way_out),
        )

    def seconds(spent_s: Floats, kind: str, evidence: str, way_out: str) -> _Candidate:
        shares = _share(spent_s.sum(axis=0), own_s)
        return _Candidate(
            _beyond(losses, spent_s), lambda rank: Cause(kind, evidence.format(share=shares[rank]), way_out)
        )

    yield reading(
        run.throttled,
        "throttled",
        "Its CPU was throttled for {share:.0%} of the time: its container's limit is {quota:.3g} cores.",
        "Raise the container's CPU limit, or start fewer threads or ranks in it.",
    )
    yield reading(
        run.contended,
        "competition",
        "Other processes ran on its processor for {share:.0%} of the time, while it was ready.",
        "Find them with top on its machine and move them, or pin the rank to cores of its own.",
    )
    yield reading(
        run.stolen,
        "stolen",
        "The hypervisor took {share:.0%} of its processor's time for other virtual machines.",
        "Use a machine with processors of its own, or move the virtual machine to another host.",
    )
    yield reading(
        run.stalled,
        "memory",
        "It waited for memory for {share:.0%} of the time.",
        "Give it more memory, or a smaller batch, or fewer loader workers.",
    )
    yield reading(
        run.collecting,
        "garbage",
        "Python collected garbage for {share:.0%} of the time.",
        "Call gc.freeze() after the set-up, or gc.disable() and gc.collect() between epochs.",
    )
    yield seconds(
        run.input_s,
        "input",
        "It waited for its own data for {share:.0%} of its time.",
        "Give its data loader more workers or a faster disk, or prepare the data beforehand.",
    )
    yield seconds(
        loop_s,
        "loop",
        "Its loop spent {share:.0%} of its time between rounds, outside of the training step.",
        "Log, evaluate and save less often, or in another thread or process.",
    )
    clock = np.nan_to_num(_mean(run, run.clock))
    yield _Candidate(
        np.where(clock > 0, 1.0 - _share(clock, np.full_like(clock, -fast(-clock))), 0.0),
        lambda rank: Cause(
            "clock",
            f"Its processor ran at {clock[rank]:.0%} of its highest frequency, the fast ranks at {-fast(-clock):.0%}.",
            "Look at its temperature, its power limit and its frequency governor.",
        ),
    )


def _by_weaker_evidence(losses: Losses, rank: int) -> Cause | None:
    run = losses.run
    faults, memory, cpu = (_mean(run, column) for column in (run.faults_per_s, run.memory, run.cpu))
    if faults[rank] - fast(faults) >= _MANY_FAULTS:
        return Cause(
            "memory",
            f"It read {faults[rank]:.0f} pages per second back from disk.",
            "Give it more memory, or a smaller batch, or fewer loader workers.",
        )
    if memory[rank] < _LITTLE_MEMORY:
        return Cause(
            "memory",
            f"Only {memory[rank]:.1%} of its memory was free.",
            "Give it more memory, or a smaller batch, or fewer loader workers.",
        )
    counted = any(np.nan_to_num(column).any() for column in (run.throttled, run.contended, run.sent_mb_s))
    if not counted and 1.0 - cpu[rank] / -fast(-cpu) >= _EXPLAINS * losses.cost[rank]:
        return Cause(
            "cpu",
            f"Only {cpu[rank]:.0%} of its processor was available to it.",
            "Look for other processes on its machine, and for a limit of its container.",
        )
    return None


def _without_evidence(losses: Losses, rank: int) -> Cause:
    cost, lag = losses.cost[rank], losses.lag[rank]
    if lag >= _EXPLAINS * cost and _constant(losses, rank):
        return Cause(
            "slower",
            f"It took {1.0 / (1.0 - lag):.2g} times as long per sample as the fast ranks, through all of the run, and "
            "no reading shows that anything was taken from it.",
            "Give it less work (policy='lb-bsp'), or a faster machine.",
        )
    return Cause(
        "unknown",
        f"It cost {cost:.0%} of the time, and no reading explains that.",
        "Look at its machine while it trains; policy='lb-bsp' gives it less work meanwhile.",
    )


def _network(losses: Losses, rank: int) -> Cause:
    run = losses.run
    each_s = losses.transfer * float(run.elapsed_s.mean())
    sent = _mean(run, run.sent_mb_s)[rank]
    rate = f", while its machine sent {sent:.3g} MB per second" if sent > 0 else ""
    return Cause(
        "network",
        f"All ranks waited for the transfer: {losses.transfer:.0%} of the time, {1e3 * each_s:.3g} ms a round{rate}.",
        "Do more work in a round (a larger global_batch, or micro-batches), compress gradients, or use a faster link.",
    )


def _constant(losses: Losses, rank: int) -> bool:
    """Return whether a rank is slower by the same factor in all parts of the run."""
    parts = np.array_split(np.arange(len(losses.own_s)), min(_PARTS, max(len(losses.own_s), 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.array([losses.own_s[part].sum(axis=0) / losses.work[part].sum(axis=0) for part in parts])
    ratios = np.array([row[rank] / fast(row) for row in pace])
    return bool((np.abs(ratios / np.median(ratios) - 1.0) <= _STEADY).all())


def _share(part: Floats, whole: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(part / whole, nan=0.0, posinf=0.0, neginf=0.0))


def _beyond(losses: Losses, seconds: Floats) -> Floats:
    """Return what these seconds take beyond those of the fast ranks, per sample, as a share of the rank's own time."""
    work, own_s = losses.work.sum(axis=0), losses.own_s.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_sample = np.where(work > 0, seconds.sum(axis=0) / work, np.nan)
    return _share((per_sample - fast(per_sample)) * work, own_s)


def _mean(run: Run, column: Floats) -> Floats:
    """Return each rank's mean over the time for which the figure is known; NaN: for none."""
    weights = np.where(np.isfinite(column), run.elapsed_s[:, None], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((np.nan_to_num(column) * weights).sum(axis=0) / weights.sum(axis=0))
