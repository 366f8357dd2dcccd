r"""The cause that explains most of a slow rank's cost, with its evidence.

How slow rank i is, ``slow_i``, is a fraction of time (`slowness`), and so is what each candidate explains. A reading
s_i of `measurement.hindrances` is one, too: the time in which its quota held rank i back, in which other processes ran
in its place, and so on. With ``s`` the lower quartile of that reading over the ranks,

    explained_i = (s_i - s) lag_i / slow_i + r_i (1 - lag_i / slow_i).

r_i is what the reading explains of a rank without lag: ranks hold each other up in turns. The candidate that explains
most is the cause. If none explains enough, weaker evidence is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.attribution import TimeFractions, fast
from hvd_hetero.tools.report.slowness import Slowness, excess_s
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
    "rests": "no samples",
    "unknown": "not known",
}
"""Every kind of cause, and its name in words."""

# Times of equal ranks scatter by some percent (benchmarks/results/causes.md has clean runs).
NOTABLE_LOSS = 0.10
"""Fraction of time from which a loss, or how slow a rank is, gets a cause."""

# On a busy machine times of equal ranks scatter by a tenth, and some transfer there is in every run.
NOTABLE_UNEXPLAINED_LOSS = 0.20
"""The same where no reading shows why."""

# Of two causes that hinder a rank equally, each explains half.
_EXPLAINED_AT_LEAST = 0.5
_PAUSES = frozenset({"throttled", "garbage"})
# Pauses of two ranks coincide now and then; half of the common part is between always and never (arbitrary).
_PAUSES_APART = 0.5
# Half of the way from equal shares to shares by speed (arbitrary).
_EVENED_FROM = 0.5
# With less of its memory free, the kernel takes pages back from processes (arbitrary).
_MEMORY_SHORT_BELOW = 0.03
# Pages a second. A disk reads one in 0.1 ms to 10 ms, so these take 1 % to all of the time.
_FAULTS_THAT_SLOW = 100.0
# A slower processor is slower in most eighths of the run. Some may be noisy: three quarters suffice (arbitrary).
_RUN_PARTS, _STEADY_PARTS = 8, 0.75
# Two eighths at either end show whether something began during the run, or is over.
_END_PARTS = 2
# How far the lag of a part may be from the middle one (arbitrary). A small lag scatters by much of itself.
_STEADY_WITHIN, _STEADY_WITHIN_OF_LAG = 0.15, 0.75

_MORE_MEMORY = "Give it more memory, a smaller batch, or fewer loader workers."
_TEXTS = {
    "throttled": (
        "The CPU limit of its container ({quota:.3g} cores) stopped it for {share:.0%} of the time.",
        "Raise the container's CPU limit, or start fewer threads or ranks in it.",
    ),
    "competition": (
        "Other processes ran on its processor for {share:.0%} of the time, while it was ready to run.",
        "Find them with top on its machine: its own loader workers and other ranks count, too. Move them, or pin the "
        "rank to cores of its own.",
    ),
    "stolen": (
        "The hypervisor took {share:.0%} of its processor's time for other virtual machines.",
        "Use a machine with processors of its own, or move the virtual machine to another host.",
    ),
    "memory": ("It waited for memory for {share:.0%} of the time.", _MORE_MEMORY),
    "garbage": (
        "Python collected garbage for {share:.0%} of the time.",
        "Call gc.freeze() after the set-up. Or call gc.disable(), and gc.collect() between epochs.",
    ),
    "input": (
        "It waited for its own data for {share:.0%} of its time.",
        "Give its data loader more workers or a faster disk, or preprocess the data before training.",
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
    """A sentence with the figures that show the cause."""
    remedy: str
    """A sentence on what to change."""


def causes(run: Run, fractions: TimeFractions | None = None) -> list[Cause | None]:
    """Return the cause of each slow rank; None: it is not slow. ``fractions``: those of the run, if computed."""
    found = Slowness.of(run, fractions)
    if not len(found.run.round):
        return [None] * run.workers
    # By the plan: a rank that was given samples and did none was too late, and is not idle.
    without_samples = np.median(run.plan, axis=0) == 0
    return [_rests(run, i) if without_samples[i] else cause for i, cause in enumerate(_of_slowness(found))]


def _of_slowness(found: Slowness) -> list[Cause | None]:
    """Return the causes of ranks, as if all had samples."""
    ranks = range(found.run.workers)
    # A slow rank's part in a transfer is slow, too. So the transfer is the cause only if it outweighs every lag.
    if found.fractions.kinds["transfer"] >= max(NOTABLE_UNEXPLAINED_LOSS, *found.slow):
        return [_network(found, rank) for rank in ranks]
    too_large, slow = _too_large(found), found.slow >= NOTABLE_LOSS
    if not slow.any():
        return too_large
    explained, means = _explained(found), _mean_readings(found.run)
    return [_cause_of(found, rank, explained, means) if slow[rank] else too_large[rank] for rank in ranks]


def _explained(found: Slowness) -> dict[str, tuple[Floats, Floats]]:
    """Return, by kind, the fraction of each rank's own time that it explains, and the fraction that the text names.

    Of two kinds that explain as much, the first is the cause.
    """
    run, own_s = found.run, found.own_s.sum(axis=0)
    # A reading is a fraction of all time, and slowness one of a rank's own time.
    whole = _ratio(np.full(run.workers, run.elapsed_s.sum()), own_s)
    ours = _ratio(found.lag, found.slow)
    readings = {
        "throttled": run.throttled,
        "competition": run.contended,
        "stolen": run.stolen,
        "memory": run.stalled,
        "garbage": run.collecting,
    }
    late, explained = excess_s(found.own_s, found.work) > 0, {}
    for kind, column in readings.items():
        share = np.nan_to_num(_mean(run, column))
        # What all ranks have makes none of them slower than others.
        common = fast(share)
        more = (column - fast(column)[:, None]) * late
        # A quota and garbage collections stop each rank at other moments, so a part of what all have counts. Any other
        # reading counts by what exceeds the fast ranks' in the rounds in which this rank is slower.
        in_turns = share - common + common * _PAUSES_APART if kind in _PAUSES else np.nan_to_num(_mean(run, more))
        explained[kind] = (ours * (share - common) + (1.0 - ours) * in_turns) * whole, share
    loop_s = np.clip(found.own_s - run.compute_s - run.input_s, 0.0, None)
    # These two are seconds, which grow with the samples. So they count per sample beyond those of the fast ranks.
    for kind, spent_s in {"input": run.input_s, "loop": loop_s}.items():
        beyond = excess_s(spent_s, found.work).sum(axis=0)
        explained[kind] = _ratio(beyond, own_s), _ratio(spent_s.sum(axis=0), own_s)
    clock = np.nan_to_num(_mean(run, run.clock))
    explained["clock"] = np.where(clock > 0, 1.0 - _ratio(clock, _best(clock)), 0.0), clock
    return explained


def _mean_readings(run: Run) -> dict[str, Floats]:
    """Return each rank's mean page faults, free memory and available processor, and its quota where it had one."""
    # A quota may be set or raised in the middle of a run; the text names the one that throttled.
    quota = np.where((run.quota_cores > 0) & (run.throttled > 0), run.quota_cores, np.nan)
    counted = any(np.nan_to_num(column).any() for column in (run.throttled, run.contended, run.sent_mb_s))
    # Where the kernel's counters are recorded they say who took the processor, and this reading only that it was taken.
    cpu = np.full_like(run.cpu, np.nan) if counted else run.cpu
    columns = {"quota": quota, "faults": run.faults_per_s, "memory": run.memory, "cpu": cpu}
    return {name: _mean(run, column) for name, column in columns.items()}


def _cause_of(
    found: Slowness, rank: int, explained: dict[str, tuple[Floats, Floats]], means: dict[str, Floats]
) -> Cause | None:
    least = _EXPLAINED_AT_LEAST * found.slow[rank]
    best = max(explained, key=lambda kind: explained[kind][0][rank])
    if explained[best][0][rank] >= least:
        evidence, remedy = _TEXTS[best]
        return Cause(best, evidence.format(share=explained[best][1][rank], quota=means["quota"][rank]), remedy)
    # These readings do not say how much of the time was lost. The strongest evidence comes first.
    faults, memory, cpu = (means[name] for name in ("faults", "memory", "cpu"))
    if faults[rank] - fast(faults) >= _FAULTS_THAT_SLOW:
        return Cause("memory", f"It read {faults[rank]:.0f} pages per second back from disk.", _MORE_MEMORY)
    if memory[rank] < _MEMORY_SHORT_BELOW:
        return Cause("memory", f"Only {memory[rank]:.1%} of its memory was free.", _MORE_MEMORY)
    if 1.0 - _ratio(cpu, _best(cpu))[rank] >= least and np.isfinite(cpu[rank]):
        return Cause(
            "cpu",
            f"Only {cpu[rank]:.0%} of its processor was available to it.",
            "Look for other processes on its machine, and for a CPU limit of its container.",
        )
    return _without_evidence(found, rank)


def _without_evidence(found: Slowness, rank: int) -> Cause | None:
    lag, done = found.lag[rank], found.work.sum(axis=0)
    times = found.speed.max(initial=0.0, where=np.isfinite(found.speed)) / found.speed[rank]
    # Ranks that hold each other up in turns are not slow by themselves: the split cannot help them.
    alone = lag >= found.turns[rank] and np.isfinite(times)
    evened = alone and _ratio(done, _best(done))[rank] <= 1.0 - _EVENED_FROM * lag
    balances = found.run.policy == "lb-bsp"
    slower = f"It took {times:.{'2g' if times < 10.0 else '0f'}} times as long per sample as the fastest rank"
    if alone and _steadily_slower(found, rank):
        remedy = "Give it less work (policy='lb-bsp'), or a faster machine."
        if balances:
            remedy = (
                "Its share of the samples follows its speed already, within its limits. A faster machine would help."
            )
        if evened:
            remedy = "The split gives it less work already. A faster machine would help."
        why = ", in most of the run. No reading shows that anything else used its processor or memory."
        return Cause("slower", slower + why, remedy)
    if found.slow[rank] < NOTABLE_UNEXPLAINED_LOSS:
        return None
    meanwhile = "" if evened or balances else " Until then, policy='lb-bsp' gives it less work."
    held_up = f"All others waited for it for {found.fractions.cost[rank]:.0%} of the time"
    evidence = f"{slower if alone else held_up}, and no reading explains why."
    return Cause("unknown", evidence, f"Look at its machine with top while it trains.{meanwhile}")


def _rests(run: Run, rank: int) -> Cause:
    samples = run.samples[:, rank]
    return Cause(
        "rests",
        f"It had samples in {int((samples > 0).sum())} of {len(samples)} rounds: the training is faster without it.",
        "Remove it from the job, which shortens transfers, too.",
    )


def _too_large(found: Slowness) -> list[Cause | None]:
    """Return "share" as the cause of ranks that are not slow, but have more of the samples than of the speed."""
    work, speed = found.work.sum(axis=0), np.nan_to_num(found.speed)
    own, even = _ratio(work, np.full_like(work, work.sum())), _ratio(speed, np.full_like(speed, speed.sum()))
    over = (found.slow < NOTABLE_LOSS) & (even > 0) & (even <= (1.0 - NOTABLE_LOSS) * own)
    if found.fractions.cost[over].sum() < NOTABLE_LOSS:
        return [None] * len(over)
    # A rank may hold others up without being slow.
    evidence = "It is not slow, but it got {:.0%} of the samples, and has {:.0%} of the speed of all ranks."
    return [
        Cause("share", evidence.format(own[rank], even[rank]), "Give it fewer samples.") if wrong else None
        for rank, wrong in enumerate(over)
    ]


def _network(found: Slowness, rank: int) -> Cause:
    transfer, run = found.fractions.kinds["transfer"], found.run
    each_ms = 1e3 * transfer * float(run.elapsed_s.mean())
    sent = _mean(run, run.sent_mb_s)[rank]
    rate = f", while a machine sent {sent:.3g} MB per second" if sent > 0 else ""
    return Cause(
        "network",
        f"{'All ranks' if run.workers > 1 else 'It'} waited for transfers: {transfer:.0%} of the time, "
        f"{each_ms:.3g} ms a round{rate}.",
        "Do more work in a round (a larger global_batch, or micro-batches), compress gradients, or use a faster "
        "network.",
    )


def _steadily_slower(found: Slowness, rank: int) -> bool:
    """Return whether a rank is slower by about as much in most parts of the run, and by enough to explain its lag."""
    parts = np.array_split(np.arange(len(found.own_s)), min(_RUN_PARTS, max(len(found.own_s), 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.array([found.own_s[part].sum(axis=0) / found.work[part].sum(axis=0) for part in parts])
        lags = np.array([1.0 - fast(row) / row[rank] for row in pace])
    # Not finite are the parts in which it has done nothing.
    lags = lags[np.isfinite(lags)]
    if not lags.size:
        return False
    middle, ends = float(np.median(lags)), min(lags[:_END_PARTS].mean(), lags[-_END_PARTS:].mean())
    near = np.abs(lags - middle) <= min(_STEADY_WITHIN, _STEADY_WITHIN_OF_LAG * middle)
    explains = middle >= _EXPLAINED_AT_LEAST * float(found.slow[rank])
    # A processor is slow at the beginning and at the end, too. Else something began in between, or is over.
    return explains and bool(near.mean() >= _STEADY_PARTS) and ends >= _EXPLAINED_AT_LEAST * middle


def _ratio(part: Floats, whole: Floats) -> Floats:
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
