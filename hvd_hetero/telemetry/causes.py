r"""Why a rank was slow: the cause that explains what it cost, with its evidence.

What a rank costs, ``cost_i``, is a share of time (`losses`). Each candidate explains a share of the rank's own time as
well: the seconds of its data beyond those of the fast ranks, its loop's beyond theirs, and so on.

**Which cause.** The candidate that explains the most is named, if it explains at least half of ``cost_i``: what hits a
rank for 3 % of its time is not why it is 30 % slow. If none does, a rank whose pace is the same multiple of the fast
ranks' through all of the run is "slower", and any other is "unknown".

**No alarm** where ``cost_i`` is below `LEAST`: times of equal ranks scatter by some percent on machines that do
anything else, and one of two equal ranks is always a little slower than the other. The transfer is waited for by all
ranks. It is the cause on each rank that has no larger one, if it takes at least `LEAST_TRANSFER` of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.losses import Floats, Losses, fast
from hvd_hetero.telemetry.records import Run

__all__ = ["KINDS", "LEAST", "LEAST_TRANSFER", "Cause", "causes"]

KINDS = {
    "input": "slow input",
    "loop": "work between rounds",
    "cpu": "less of its processor",
    "memory": "too little memory",
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


@dataclass(frozen=True)
class _Candidate:
    """``explains`` is a share of each rank's own time, and ``shares`` are the figures that ``evidence`` names."""

    kind: str
    explains: Floats
    shares: Floats
    evidence: str
    way_out: str


def causes(run: Run) -> list[Cause | None]:
    """Return for each rank why it was slow; None: it held no rank up."""
    losses = Losses.of(run)
    candidates = _candidates(losses)
    found: list[Cause | None] = []
    for rank, cost in enumerate(losses.cost):
        if cost >= max(LEAST, losses.transfer):
            found.append(_named(losses, rank, candidates))
        else:
            found.append(_network(losses) if losses.transfer >= LEAST_TRANSFER else None)
    return found


def _named(losses: Losses, rank: int, candidates: list[_Candidate]) -> Cause:
    best = max(candidates, key=lambda candidate: candidate.explains[rank])
    if best.explains[rank] >= _EXPLAINS * losses.cost[rank]:
        return Cause(best.kind, best.evidence.format(share=best.shares[rank]), best.way_out)
    free = float(_mean(losses.run.memory)[rank])
    if free < _LITTLE_MEMORY:
        return Cause("memory", f"Only {free:.1%} of its memory is free.", "Give it more memory, or a smaller batch.")
    times = 1.0 / (1.0 - losses.lag[rank]) if losses.lag[rank] < 1.0 else np.inf
    if losses.lag[rank] >= _EXPLAINS * losses.cost[rank] and _constant(losses, rank):
        return Cause(
            "slower",
            f"It takes {times:.2g} times as long per sample as the fast ranks, through all of the run, and nothing "
            "takes its processor from it.",
            "Give it less work (policy='lb-bsp'), or a faster machine.",
        )
    return Cause(
        "unknown",
        f"It costs {losses.cost[rank]:.0%} of the time, and no reading explains it.",
        "Look at its machine while it trains; policy='lb-bsp' gives it less work meanwhile.",
    )


def _network(losses: Losses) -> Cause:
    each_s = losses.transfer * float(losses.run.elapsed_s.mean())
    return Cause(
        "network",
        f"All ranks wait for the transfer for {losses.transfer:.0%} of the time, {1e3 * each_s:.3g} ms a round.",
        "Do more work in a round (a larger global_batch, or micro-batches), compress gradients, or use a faster link.",
    )


def _constant(losses: Losses, rank: int) -> bool:
    """Return whether a rank is slower by the same factor in all parts of the run."""
    parts = np.array_split(np.arange(len(losses.own_s)), min(_PARTS, max(len(losses.own_s), 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.array([losses.own_s[part].sum(axis=0) / losses.work[part].sum(axis=0) for part in parts])
    ratios = np.array([row[rank] / fast(row) for row in pace])
    middle = np.median(ratios)
    return bool((np.abs(ratios / middle - 1.0) <= _STEADY).all())


def _candidates(losses: Losses) -> list[_Candidate]:
    run, own_s = losses.run, losses.own_s.sum(axis=0)
    loop_s = np.clip(losses.own_s - run.compute_s - run.input_s, 0.0, None)
    cpu = _mean(run.cpu)
    return [
        _Candidate(
            "input",
            _beyond(losses, run.input_s),
            _share(run.input_s.sum(axis=0), own_s),
            "It waits for its own data for {share:.0%} of its time.",
            "Give its data loader more workers or a faster disk, or prepare the data beforehand.",
        ),
        _Candidate(
            "loop",
            _beyond(losses, loop_s),
            _share(loop_s.sum(axis=0), own_s),
            "Its loop spends {share:.0%} of its time between rounds, outside of the training step.",
            "Log, evaluate and save less often, or do so in another thread or process.",
        ),
        _Candidate(
            "cpu",
            np.nan_to_num(1.0 - _share(cpu, np.full_like(cpu, -fast(-cpu)))),
            cpu,
            "Only {share:.0%} of its processor was available to it.",
            "Look for other processes on its machine, and for a limit of its container.",
        ),
    ]


def _share(part: Floats, whole: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(part / whole, nan=0.0, posinf=0.0, neginf=0.0))


def _beyond(losses: Losses, seconds: Floats) -> Floats:
    """Return what these seconds take beyond those of the fast ranks, per sample, as a share of the rank's own time."""
    work, own_s = losses.work.sum(axis=0), losses.own_s.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_sample = np.where(work > 0, seconds.sum(axis=0) / work, np.nan)
    return _share((per_sample - fast(per_sample)) * work, own_s)


def _mean(column: Floats) -> Floats:
    """Return each rank's mean over the rounds that know the figure; NaN: none does."""
    known = np.isfinite(column)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(known, column, 0.0).sum(axis=0) / known.sum(axis=0))
