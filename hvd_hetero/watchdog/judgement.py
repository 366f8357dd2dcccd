"""Judge from the other ranks' answers why a rank waits: a pure function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_hetero.watchdog.patience import Patience
from hvd_hetero.watchdog.whereabouts import Whereabouts

_NAMED = 4  # ranks that a message names; it counts the others (arbitrary)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why a rank waits."""

    text: str
    ends: bool
    """True if the job cannot go on, or not within the time it has."""
    speaks: bool
    """True if this rank writes the message, where several see the same."""
    silence: bool = False
    """True if it waits for a rank that has answered before, and does not now."""


def judge(
    mine: Whereabouts,
    others: Sequence[Whereabouts],
    silent: Mapping[int, float],
    patience: Patience,
    way_out: str,
    hosts: Sequence[str] = (),
    gives_up_s: float = math.inf,
) -> Judgement:
    """Return why this rank waits, given the others' answers.

    ``silent`` maps each rank that does not answer to the seconds of its silence, or to NaN if it has never answered:
    the network may keep packets from it. ``hosts`` names the host of each rank; where there are several, the message
    names the host of a rank without an answer. Collectives fail by themselves ``gives_up_s`` after a rank fell silent.

    Ranks in different collectives cannot go on if *all* of them wait, because a rank at work may still come. All must
    have waited for some time, or they may have just met.
    """
    unheard = [rank for rank, seconds in silent.items() if seconds != seconds]
    lost = {rank: seconds for rank, seconds in silent.items() if seconds == seconds}
    busy = [other for other in others if not other.waits]
    apart = [other for other in others if other.waits and other.stage != mine.stage]
    waited = f"rank {mine.rank} has waited for {mine.for_s:.0f} s in round {mine.round}, at {mine.where}, "
    # Ranks at the same stage see the same, so only the first of them speaks.
    speaks = not any(other.rank < mine.rank for other in others if other.waits and other.stage == mine.stage)
    if lost:
        ends = max(lost.values()) >= patience.silent
        named = _named([_at(rank, hosts) for rank in lost])
        text = f"{waited}for {named}, which {_does(lost)} not answer: stopped, or its machine is gone, overloaded "
        text += "or cut off."
        later = _later(ends, patience.silent, "silent")
        if not ends and gives_up_s < patience.silent:
            later = f"Collectives fail after {gives_up_s:g} s of it."
        return Judgement(f"{text} {later}", ends, speaks or ends, silence=True)
    if busy:
        ends = mine.for_s >= patience.busy
        named = _named([f"rank {other.rank}, which is at {other.where}" for other in busy])
        text = f"{waited}for {named}, at work as far as its stack shows. If it waits for others: {way_out}."
        return Judgement(f"{text} {_later(ends, patience.busy, 'busy')}", ends, speaks or ends)
    if unheard:
        named = _named([_at(rank, hosts) for rank in unheard])
        text = f"{waited}and {named} never answered: the network may keep UDP packets from it. "
        return Judgement(text + "Look at its stack (py-spy dump --pid …).", False, speaks)
    if apart:
        # Each must have been there for as long as it takes from the warning to the end.
        ends = mine.for_s >= patience.deadlock and all(
            other.for_s >= min(patience.deadlock - patience.warn, patience.deadlock / 2) for other in apart
        )
        named = _named([f"rank {other.rank} in round {other.round}, at {other.where}" for other in apart])
        text = f"{waited}for {named}, and all ranks wait, in different collectives. {way_out}."
        return Judgement(f"{text} {_later(ends, patience.deadlock, 'deadlock')}", ends, speaks or ends)
    ends = mine.for_s >= patience.silent
    where = {other.where: other for other in others}
    if set(where) == {mine.where}:
        text = f"{waited}where all ranks are, and the collective does not end: the network may be slow, or broken."
    else:
        where.pop(mine.where, None)
        named = _named([f"rank {other.rank}, at {other.where}" for other in where.values()])
        text = f"{waited}for {named}, and all ranks wait. If these are different collectives: {way_out}."
    return Judgement(f"{text} {_later(ends, patience.silent, 'silent')}", ends, speaks or ends)


def _at(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if len(set(hosts)) > 1 else f"rank {rank}"


def _named(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more ranks" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


def _does(ranks: Mapping[int, float]) -> str:
    return "does" if len(ranks) == 1 else "do"


def _later(ends: bool, seconds: float, name: str) -> str:
    if ends:
        return f"The job ends (Patience({name}={seconds:g}))."
    if seconds == float("inf"):
        return "The job goes on when it comes."
    return f"The job ends after {seconds:g} s of it (Patience({name}=…))."
