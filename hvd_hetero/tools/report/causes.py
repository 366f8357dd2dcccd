r"""The cause that explains most of a slow rank's cost, with its evidence.

How slow rank i is, ``slow_i``, is a share of time (`slowness`), and so is what each candidate explains. With ``s_i`` a
reading of rank i (`measurement.hindrances`: the share of time in which its quota held it back, in which other processes
ran in its place, and so on) and ``s`` the lower quartile of that reading over the ranks,

    explained_i = (s_i - s) lag_i / slow_i + r_i (1 - lag_i / slow_i).

r_i is what the reading explains of a rank that has no lag, because ranks hold each other up in turns. The candidate
that explains the most is named, if it explains at least half of ``slow_i``; else weaker evidence is looked at.

Ranks may hold others up without being slow. With a rank's part of all work, w_i, and of all speed, v_i, its share of
the samples is too large if 1 - v_i / w_i is at least `LEAST`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.attribution import Shares, fast
from hvd_hetero.tools.report.slowness import Slowness, beyond_s
from hvd_hetero.tools.report.work import Floats

KINDS = {
    "throttled": "its container's limit",
    "competition": "other processes on its processor",
    "stolen": "other virtual machines on its host",
    "memory": "too little memory",
    "garbage": "garbage collection",
    "input": "slow input",
    "loop": "work between rounds",
    "clock": "a lower clock frequency",
    "cpu": "less of its processor",
    "network": "slow network",
    "slower": "a slower processor",
    "share": "too large a share of the samples",
    "rests": "it rests",
    "unknown": "not known",
}
"""Every kind of cause, and its name in words."""

# Times of equal ranks scatter by some percent (benchmarks/results/causes.md has clean runs).
LEAST = 0.10
"""Share of time by which a rank must be slow before a cause is searched."""

# On a busy machine times of equal ranks scatter by a tenth.
LEAST_UNEXPLAINED = 0.20
"""The same if no reading shows why: some scatter and some transfer there is in every run."""

_EXPLAINS = 0.5  # of what a rank is slow by, at least
_PAUSES = frozenset({"throttled", "garbage"})
_OF_PAUSES = 0.5  # of pauses that all ranks have, what counts where they hold each other up in turns
_EVENED = 0.5  # of its lag, at least, that the split takes from its work
_LITTLE_MEMORY = 0.03  # of its memory is free: then the kernel takes pages back
_MANY_FAULTS = 100.0  # pages a second; a disk reads each in 0.1 ms to 10 ms
_PARTS = 8
_MOST, _END = 0.75, 2  # of them, and how many are the beginning, or the end
_NEAR = 0.15  # how far the lag of a slower processor may be from the middle one in most parts (arbitrary) ...
_NEAR_OF_LAG = 0.75  # ... and as a share of it, for a rank that is little slower

_MORE_MEMORY = "Give it more memory, or a smaller batch, or fewer loader workers."
_TEXTS = {
    "throttled": (
        "Its CPU was throttled for {share:.0%} of the time: its container's limit is {quota:.3g} cores.",
        "Raise the container's CPU limit, or start fewer threads or ranks in it.",
    ),
    "competition": (
        "Other processes ran on its processor for {share:.0%} of the time, while it was ready.",
        "Find them with top on its machine (its own loader workers and other ranks count, too) and move them, or pin "
        "the rank to cores of its own.",
    ),
    "stolen": (
        "The hypervisor took {share:.0%} of its processor's time for other virtual machines.",
        "Use a machine with processors of its own, or move the virtual machine to another host.",
    ),
    "memory": ("It waited for memory for {share:.0%} of the time.", _MORE_MEMORY),
    "garbage": (
        "Python collected garbage for {share:.0%} of the time.",
        "Call gc.freeze() after the set-up, or gc.disable() and gc.collect() between epochs.",
    ),
    "input": (
        "It waited for its own data for {share:.0%} of its time.",
        "Give its data loader more workers or a faster disk, or prepare the data beforehand.",
    ),
    "loop": (
        "Its loop spent {share:.0%} of its time between rounds, outside of the training step.",
        "Log, evaluate and save less often, or in another thread or process.",
    ),
    "clock": (
        "Its processor ran at {share:.0%} of its highest frequency, below that of other ranks.",
        "Look at its temperature, its power limit and its frequency governor.",
    ),
}


@dataclass(frozen=True)
class Cause:
    """The cause of a slow rank."""

    kind: str
    """A key of `KINDS`."""
    evidence: str
    """A sentence with figures."""
    remedy: str
    """What to do."""


def causes(run: Run, known_shares: Shares | None = None) -> list[Cause | None]:
    """Return the cause of each slow rank; None: it is not slow. ``known_shares``: those of the run, if computed."""
    found = Slowness.of(run, known_shares)
    if not len(found.run.round):
        return [None] * run.workers
    # By the plan, because a rank that was given samples and did none was too late, and is not idle.
    without_samples = np.median(run.plan, axis=0) == 0
    return [_rests(run, i) if without_samples[i] else cause for i, cause in enumerate(_of_slowness(found))]


def _of_slowness(found: Slowness) -> list[Cause | None]:
    """Return the causes of ranks, as if none rested."""
    ranks = range(found.run.workers)
    # On each rank, because a slow rank's part in a transfer is slow, too, so the transfer must outweigh every lag.
    if found.shares.kinds["transfer"] >= max(LEAST_UNEXPLAINED, *found.slow):
        return [_network(found, rank) for rank in ranks]
    too_large, slow = _too_large(found), found.slow >= LEAST
    if not slow.any():
        return too_large
    explained, means = _explained(found), _means(found.run)
    return [_named(found, rank, explained, means) if slow[rank] else too_large[rank] for rank in ranks]


def _explained(found: Slowness) -> dict[str, tuple[Floats, Floats]]:
    """Return the share of each rank's own time that each kind explains, and its share as the evidence has it.

    Of two that explain as much, the first is named.
    """
    run, own_s = found.run, found.own_s.sum(axis=0)
    # A reading is a share of all time, and slowness one of a rank's own time.
    whole = _share(np.full(run.workers, run.elapsed_s.sum()), own_s)
    ours = _share(found.lag, found.slow)
    readings = {
        "throttled": run.throttled,
        "competition": run.contended,
        "stolen": run.stolen,
        "memory": run.stalled,
        "garbage": run.collecting,
    }
    late, explained = beyond_s(found.own_s, found.work) > 0, {}
    for kind, column in readings.items():
        share = np.nan_to_num(_mean(run, column))
        # What all ranks share makes none of them slower than others.
        common = fast(share)
        more = (column - fast(column)[:, None]) * late
        # A quota and garbage collections stop each rank at other moments, so half of the common part counts. Any
        # other reading counts by what exceeds the fast ranks' in the rounds in which this rank is slower.
        in_turns = share - common + common * _OF_PAUSES if kind in _PAUSES else np.nan_to_num(_mean(run, more))
        explained[kind] = (ours * (share - common) + (1.0 - ours) * in_turns) * whole, share
    loop_s = np.clip(found.own_s - run.compute_s - run.input_s, 0.0, None)
    # These two are seconds, not readings, so they count per sample beyond those of the fast ranks.
    for kind, spent_s in {"input": run.input_s, "loop": loop_s}.items():
        beyond = beyond_s(spent_s, found.work).sum(axis=0)
        explained[kind] = _share(beyond, own_s), _share(spent_s.sum(axis=0), own_s)
    clock = np.nan_to_num(_mean(run, run.clock))
    explained["clock"] = np.where(clock > 0, 1.0 - _share(clock, _best(clock)), 0.0), clock
    return explained


def _means(run: Run) -> dict[str, Floats]:
    """Return each rank's means of the weaker evidence, and of the quota where there was one."""
    # Only while it throttled, because a quota may be set or raised in the middle of a run.
    quota = np.where((run.quota_cores > 0) & (run.throttled > 0), run.quota_cores, np.nan)
    counted = any(np.nan_to_num(column).any() for column in (run.throttled, run.contended, run.sent_mb_s))
    # Only in files without the kernel's counters, which show more than a share of the processor.
    cpu = np.full_like(run.cpu, np.nan) if counted else run.cpu
    columns = {"quota": quota, "faults": run.faults_per_s, "memory": run.memory, "cpu": cpu}
    return {name: _mean(run, column) for name, column in columns.items()}


def _named(
    found: Slowness, rank: int, explained: dict[str, tuple[Floats, Floats]], means: dict[str, Floats]
) -> Cause | None:
    least = _EXPLAINS * found.slow[rank]
    best = max(explained, key=lambda kind: explained[kind][0][rank])
    if explained[best][0][rank] >= least:
        evidence, remedy = _TEXTS[best]
        return Cause(best, evidence.format(share=explained[best][1][rank], quota=means["quota"][rank]), remedy)
    # Weaker evidence, the strongest first: it does not say how much of the time was lost.
    faults, memory, cpu = (means[name] for name in ("faults", "memory", "cpu"))
    if faults[rank] - fast(faults) >= _MANY_FAULTS:
        return Cause("memory", f"It read {faults[rank]:.0f} pages per second back from disk.", _MORE_MEMORY)
    if memory[rank] < _LITTLE_MEMORY:
        return Cause("memory", f"Only {memory[rank]:.1%} of its memory was free.", _MORE_MEMORY)
    if 1.0 - _share(cpu, _best(cpu))[rank] >= least and np.isfinite(cpu[rank]):
        return Cause(
            "cpu",
            f"Only {cpu[rank]:.0%} of its processor was available to it.",
            "Look for other processes on its machine, and for a limit of its container.",
        )
    return _without_evidence(found, rank)


def _without_evidence(found: Slowness, rank: int) -> Cause | None:
    lag, done = found.lag[rank], found.work.sum(axis=0)
    times = found.speed.max(initial=0.0, where=np.isfinite(found.speed)) / found.speed[rank]
    # It is slow by itself, whatever the others do.
    alone = lag >= found.turns[rank] and np.isfinite(times)
    evened = alone and _share(done, _best(done))[rank] <= 1.0 - _EVENED * lag
    balances = found.run.policy == "lb-bsp"
    slower = f"It took {times:.{'2g' if times < 10.0 else '0f'}} times as long per sample as the fastest rank"
    if alone and _constant(found, rank):
        remedy = "Give it less work (policy='lb-bsp'), or a faster machine."
        if balances:
            remedy = "Its share follows its speed, as far as its limits allow; a faster machine would help."
        if evened:
            remedy = "The split gives it less work already; a faster machine would help."
        why = ", through most of the run, and no reading shows that anything was taken from it."
        return Cause("slower", slower + why, remedy)
    if found.slow[rank] < LEAST_UNEXPLAINED:
        return None
    meanwhile = ", for example with top." if evened or balances else "; policy='lb-bsp' gives it less work meanwhile."
    held_up = f"It held all others up for {found.shares.cost[rank]:.0%} of the time"
    evidence = f"{slower if alone else held_up}, and no reading explains that."
    return Cause("unknown", evidence, f"Look at its machine while it trains{meanwhile}")


def _rests(run: Run, rank: int) -> Cause:
    samples = run.samples[:, rank]
    return Cause(
        "rests",
        f"It rests: it did samples in {int((samples > 0).sum())} of {len(samples)} rounds.",
        "Ending it spares its part in the sums.",
    )


def _too_large(found: Slowness) -> list[Cause | None]:
    """Name too large a share as the cause of ranks that are not slow."""
    work, speed = found.work.sum(axis=0), np.nan_to_num(found.speed)
    own, even = _share(work, np.full_like(work, work.sum())), _share(speed, np.full_like(speed, speed.sum()))
    over = (found.slow < LEAST) & (even > 0) & (even <= (1.0 - LEAST) * own)
    if found.shares.cost[over].sum() < LEAST:
        return [None] * len(over)
    evidence = "It is not slow: it was given {:.0%} of the samples, and has {:.0%} of the speed of all ranks."
    return [
        Cause("share", evidence.format(own[rank], even[rank]), "Give it fewer samples.") if wrong else None
        for rank, wrong in enumerate(over)
    ]


def _network(found: Slowness, rank: int) -> Cause:
    transfer, run = found.shares.kinds["transfer"], found.run
    each_ms = 1e3 * transfer * float(run.elapsed_s.mean())
    sent = _mean(run, run.sent_mb_s)[rank]
    rate = f", while its machine sent {sent:.3g} MB per second" if sent > 0 else ""
    return Cause(
        "network",
        f"{'All ranks' if run.workers > 1 else 'It'} waited for the transfer: {transfer:.0%} of the time, "
        f"{each_ms:.3g} ms a round{rate}.",
        "Do more work in a round (a larger global_batch, or micro-batches), compress gradients, or use a faster link.",
    )


def _constant(found: Slowness, rank: int) -> bool:
    """Return whether a rank is about as much slower in most parts of the run, and this explains why it is slow."""
    parts = np.array_split(np.arange(len(found.own_s)), min(_PARTS, max(len(found.own_s), 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.array([found.own_s[part].sum(axis=0) / found.work[part].sum(axis=0) for part in parts])
        lags = np.array([1.0 - fast(row) / row[rank] for row in pace])
    # In the other parts it has done nothing.
    lags = lags[np.isfinite(lags)]
    if not lags.size:
        return False
    # At the beginning and at the end, too: else something began, or is over.
    middle, ends = float(np.median(lags)), min(lags[:_END].mean(), lags[-_END:].mean())
    near = np.abs(lags - middle) <= min(_NEAR, _NEAR_OF_LAG * middle)
    explains = middle >= _EXPLAINS * float(found.slow[rank])
    return explains and bool(near.mean() >= _MOST) and ends >= _EXPLAINS * middle


def _share(part: Floats, whole: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(part / whole, nan=0.0, posinf=0.0, neginf=0.0))


def _best(figures: Floats) -> Floats:
    """Return, for each rank, the upper quartile: the figure of the ranks with most of it."""
    return np.full_like(figures, -fast(-figures))


def _mean(run: Run, column: Floats) -> Floats:
    """Return each rank's mean over the time for which the figure is known; NaN: for none."""
    weights = np.where(np.isfinite(column), run.elapsed_s[:, None], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((np.nan_to_num(column) * weights).sum(axis=0) / weights.sum(axis=0))
