"""Judge from the other ranks' answers why a rank waits: a pure function."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvd_hetero.watchdog.patience import Patience
from hvd_hetero.watchdog.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why a rank waits, and whether the job can go on."""

    text: str
    ends: bool
    """True if the job cannot go on, or not within the time it has."""
    reports: bool
    """True if this rank writes the message, where several see the same."""
    silence: bool = False
    """True if it waits for a rank that has answered before, and does not now."""


def judge(
    mine: Whereabouts,
    others: Sequence[Whereabouts],
    silent: Mapping[int, float],
    patience: Patience,
    remedy: str,
    hosts: Sequence[str] = (),
    collective_timeout_s: float = math.inf,
) -> Judgement:
    """Return why this rank waits, given the others' answers.

    ``silent`` maps each rank that does not answer to the seconds of its silence. These are NaN if it has never
    answered: the network may keep packets from it. ``hosts`` names the host of each rank; where there are several, the
    message names the host of a rank without an answer. Collectives fail ``collective_timeout_s`` after a rank fell
    silent.
    """
    lost = {rank: seconds for rank, seconds in silent.items() if seconds == seconds}
    busy = [other for other in others if not other.waits]
    same_stage = [other for other in others if other.waits and other.stage == mine.stage]
    other_stage = [other for other in others if other.waits and other.stage != mine.stage]
    limit, waited_s = "silent", mine.for_s
    if lost:
        waited_s = max(lost.values())
        named = _named(f"{_at(rank, hosts)}, which does not answer" for rank in lost)
        why = f"for {named}: stopped, or its machine is gone, overloaded or cut off."
    elif busy:
        limit = "busy"
        named = _named(f"rank {other.rank}, which is at {other.where}" for other in busy)
        why = f"for {named}, at work as far as its stack shows. If it waits for others: {remedy}."
    elif silent:
        named = _named(_at(rank, hosts) for rank in silent)
        why = f"and {named} never answered: the network may keep UDP packets from it. "
        limit, why = "", why + "Look at its stack (py-spy dump --pid …)."
    elif other_stage:
        # Ranks in different collectives cannot go on if *all* of them wait; a rank at work may still come.
        limit = "deadlock"
        # Each must have been there for as long as it takes from the warning to the end.
        if any(other.for_s < min(patience.deadlock - patience.warn, patience.deadlock / 2) for other in other_stage):
            waited_s = 0.0
        named = _named(f"rank {other.rank} in round {other.round}, at {other.where}" for other in other_stage)
        why = f"for {named}, and all ranks wait, in different collectives. {remedy}."
    elif elsewhere := {other.where: other for other in others if other.where != mine.where}:
        named = _named(f"rank {other.rank}, at {other.where}" for other in elsewhere.values())
        why = f"for {named}, and all ranks wait. If these are different collectives: {remedy}."
    else:
        why = "where all ranks are, and the collective does not end: the network may be slow, or broken."
    ends_s = getattr(patience, limit, math.inf)
    ends = waited_s >= ends_s
    if ends:
        then = f" The job ends (Patience({limit}={ends_s:g}))."
    elif lost and collective_timeout_s < ends_s:
        then = f" Collectives fail after {collective_timeout_s:g} s of it."
    elif ends_s == math.inf:
        then = " The job goes on when it comes." if limit else ""
    else:
        then = f" The job ends after {ends_s:g} s of it (Patience({limit}=…))."
    text = f"rank {mine.rank} has waited for {mine.for_s:.0f} s in round {mine.round}, at {mine.where}, {why}{then}"
    # Ranks at the same stage see the same, so only the first of them reports.
    first = all(mine.rank < other.rank for other in same_stage)
    return Judgement(text, ends, first or ends, silence=bool(lost))


def _at(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 else f"rank {rank}"


def _named(ranks: Iterable[str]) -> str:
    texts = list(ranks)
    # More than four would make the message unreadable (arbitrary).
    more = len(texts[4:])
    return "; ".join(texts[:4]) + (f" and {more} more ranks" if more else "")
