"""The verdict in words: what cost the most, why, and what to do next.

The largest of three losses is named: waiting for late ranks, and transfers or other work between rounds. The first is
looked at if it takes at least ``LEAST`` of the time, each of the others if it takes at least ``LEAST_OF_REST``. Ranks
are named if they bear at least ``_NOTABLE`` times an even share of the waiting. Else all ranks waited for their own
data, if that took the larger part, or they took turns in being last, which is scatter and no rank's fault. ``causes``
are found elsewhere: one for each rank, None for a rank that is not slow enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvd_hetero.telemetry.causes import LEAST as LEAST_OF_CAUSE
from hvd_hetero.telemetry.report.figures import Figures

if TYPE_CHECKING:
    from hvd_hetero.telemetry.causes import Cause

__all__ = ["LEAST", "LEAST_OF_REST", "Verdict", "comparison", "late_ranks", "verdict"]

LEAST = 0.05
"""Share of the time from which on a loss is worth a word; ranks of equal machines lose a few hundredths by scatter."""

LEAST_OF_REST = 0.1
"""The same of transfers and of other work: some of both there always is."""

_NOTABLE = 1.5
_LIKE_THE_WORST = 0.5
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Three answers: what, why, and what to do."""

    verdict: str
    why: str
    next: str


def verdict(found: Figures, causes: Sequence[Cause | None]) -> Verdict:
    """Say what cost this run the most."""
    ranks, transfer, between = found.waiting_for_ranks, found.kinds["transfer"], found.kinds["between"]
    shares = {"ranks": ranks, "transfer": transfer, "between": between}
    least = {"ranks": LEAST, "transfer": LEAST_OF_REST, "between": LEAST_OF_REST}
    told = [loss for loss, share in shares.items() if share >= least[loss]]
    if not told:
        return _nothing(found)
    largest = max(told, key=shares.__getitem__)
    if largest == "ranks":
        late = late_ranks(found)
        if late:
            return _late(found, late, causes)
        return _input(found) if found.kinds["input"] >= found.kinds["computing"] else _scatter(found)
    if largest == "transfer":
        return _transfer(found, causes)
    return Verdict(
        f"Work between rounds took {between:.0%} of the time.",
        "The time is in no rank's computing, data, waiting or transfer. It is what the training loop does besides: "
        "evaluation, checkpoints, logging, or a slow rank 0.",
        "Do this work less often, or on another thread.",
    )


def late_ranks(found: Figures) -> list[int]:
    """Return the ranks that bear most of the waiting for ranks, the worst first; none if all bear about the same."""
    cost = found.ranks.cost
    worst = float(cost.max())
    if found.workers == 1 or worst < LEAST / 2 or worst < _NOTABLE * float(cost.mean()):
        return []
    order = np.argsort(-cost, kind="stable")
    return [int(rank) for rank in order if cost[rank] >= _LIKE_THE_WORST * worst]


def _nothing(found: Figures) -> Verdict:
    lost = 1.0 - found.ideal
    return Verdict(
        f"The ranks kept together: waiting for late ranks cost {_percent(found.waiting_for_ranks)} of the time.",
        f"All ranks computed for {found.ideal:.0%} of the time that the run took. All losses together are "
        f"{_percent(lost)}.",
        "Nothing to do.",
    )


def _late(found: Figures, late: list[int], causes: Sequence[Cause | None]) -> Verdict:
    cost = float(found.ranks.cost[late].sum())
    caused = [
        (rank, cause)
        for rank in late
        if rank < len(causes) and (cause := causes[rank]) is not None and cause.kind != "network"  # of all ranks alike
    ]
    evidence = [
        f"Rank {rank}: {cause.evidence}" if len(late) > 1 else cause.evidence for rank, cause in caused[:_NAMED]
    ]
    ways = list(dict.fromkeys(cause.way_out for _, cause in caused[:_NAMED]))
    share = float(found.ranks.cost_input[late].sum()) / cost
    worst = late[0]
    if not evidence and found.ranks.cost[worst] < LEAST_OF_CAUSE:
        evidence = [f"This is too little to look for a cause: one is looked for from {LEAST_OF_CAUSE:.0%} on."]
    elif not evidence:
        speed = found.ranks.of_best_rank[worst]
        evidence = [
            f"The cause is not known. {share:.0%} of this went into waiting for data."
            if share >= 0.5
            else f"The cause is not known. Rank {worst} works at {speed:.0%} of the fastest rank's speed."
        ]
    rest = found.waiting_for_ranks - cost
    also = f", and the other ranks together for {rest:.0%}" if rest >= LEAST else ""
    return Verdict(
        f"{_named(late)} held all others up for {cost:.0%} of the time{also}.",
        " ".join(evidence),
        " ".join([*ways, *_gain(found)]) or "Look at what this rank does, and what else runs there.",
    )


def _gain(found: Figures) -> list[str]:
    """What LB-BSP would gain, if that is known and worth a word."""
    if found.alternatives is None or found.policy == "lb-bsp":
        return []
    balanced, best = found.alternatives.of("lb-bsp"), found.alternatives.of("best split")
    if balanced is None or best is None or balanced.times_run < 1.0 + LEAST / 2:
        return []
    if balanced.certain:
        behind = max(1.0 - balanced.samples_per_s / best.samples_per_s, 0.0)
        how = f"{balanced.times_run:.2f} times as fast on these machines, {_percent(behind)} behind the best split"
    else:
        rate = found.alternatives.samples_per_s
        how = f"between {balanced.least / rate:.2f} and {balanced.most / rate:.2f} times as fast on these machines"
    return [f'policy="lb-bsp" would be {how}.']


def _input(found: Figures) -> Verdict:
    alone = found.workers == 1
    who = "The rank waited for its" if alone else "All ranks waited for their"
    return Verdict(
        f"{who} own data for {found.kinds['input']:.0%} of the time.",
        "It computes faster than its data come."
        if alone
        else "They did so together or by turns: no rank lost much more by it than the others.",
        "Give the data loaders more workers or a faster disk, or prepare the data beforehand.",
    )


def _scatter(found: Figures) -> Verdict:
    return Verdict(
        f"The ranks took turns in being last: this cost {found.waiting_for_ranks:.0%} of the time.",
        "No rank is late more often than the others by much. The time of each rank scatters from round to round, and a "
        "round ends with the slowest.",
        " ".join(_gain(found)) or 'Make rounds longer (a larger global_batch), or try policy="lb-non-blocking".',
    )


def _transfer(found: Figures, causes: Sequence[Cause | None]) -> Verdict:
    cause = next((cause for cause in causes if cause is not None and cause.kind == "network"), None)
    each_ms = 1e3 * found.kinds["transfer"] * found.elapsed_s / found.rounds
    return Verdict(
        f"Transfers between ranks took {found.kinds['transfer']:.0%} of the time.",
        f"Even the rank that came last waited {each_ms:.3g} ms in a round." if cause is None else cause.evidence,
        "Make rounds longer (a larger global_batch), compress gradients, or use a faster network."
        if cause is None
        else cause.way_out,
    )


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"Ranks {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def comparison(names: Sequence[str], found: Sequence[Figures]) -> str:
    """Say which of two runs is faster, and by how much."""
    one, other = found
    first, second = names
    times = other.samples_per_s / one.samples_per_s
    if abs(times - 1.0) < 0.01:
        text = f"{first} and {second} did equally many samples per second, within a hundredth."
    elif times > 1:
        text = f"{second} did {times:.2f} times as many samples per second as {first}."
    else:
        text = f"{first} did {1 / times:.2f} times as many samples per second as {second}."
    saved = one.waiting_for_ranks - other.waiting_for_ranks
    text += f" Waiting for late ranks took {one.waiting_for_ranks:.1%} and {other.waiting_for_ranks:.1%} of the time"
    text += "." if abs(saved) >= 0.005 else ", about the same."
    if (one.workers, one.global_batch) != (other.workers, other.global_batch):
        text += " They differ in ranks or global batch, so this compares more than the policy."
    return text
