"""What a rank that waits makes of the others' answers: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_hetero.watchdog.patience import Patience
from hvd_hetero.watchdog.whereabouts import Whereabouts

__all__ = ["Finding", "judge"]

_NAMED = 4  # ranks in a message; of more their number is given (arbitrary)


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a rank waits."""

    text: str
    ends: bool
    """whether the job cannot go on, or not in the time that is given to it"""
    speaks: bool
    """whether it is for this rank to say so, where all see the same"""


def judge(
    mine: Whereabouts, others: Sequence[Whereabouts], silent: Mapping[int, float], patience: Patience, way_out: str
) -> Finding:
    """Why this rank waits, by what others answer.

    ``silent`` has the ranks that do not answer, with the seconds for which they have not; NaN for those that never
    have, of which nothing is known: packets may be kept from them.

    Ranks in different collectives cannot go on if *all* wait: a rank at work may yet come. That they have waited for
    some time, all of them, tells this from ranks that have just met.
    """
    unheard = [rank for rank, seconds in silent.items() if seconds != seconds]
    lost = {rank: seconds for rank, seconds in silent.items() if seconds == seconds}
    busy = [other for other in others if not other.waits]
    apart = [other for other in others if other.waits and other.place != mine.place]
    waited = f"rank {mine.rank} has waited for {mine.for_s:.0f} s in round {mine.round}, at {mine.where}, "
    # Those in the same place see the same. The first of them speaks.
    speaks = not any(other.rank < mine.rank for other in others if other.waits and other.place == mine.place)
    if lost:
        ends = max(lost.values()) >= patience.silent
        named = _named([f"rank {rank}" for rank in lost])
        text = f"{waited}for {named}, which {_does(lost)} not answer: stopped, or its machine is gone or overloaded."
        return Finding(f"{text} {_later(ends, patience.silent, 'silent')}", ends, speaks or ends)
    if busy:
        ends = mine.for_s >= patience.busy
        named = _named([f"rank {other.rank}, which is at {other.where}" for other in busy])
        text = f"{waited}for {named}, and does not wait there."
        return Finding(f"{text} {_later(ends, patience.busy, 'busy')}", ends, speaks or ends)
    if unheard:
        named = _named([f"rank {rank}" for rank in unheard])
        text = f"{waited}and {named} never answered: the network may keep UDP packets from it. "
        return Finding(text + "Look at its stack (py-spy dump --pid …).", False, speaks)
    if apart:
        # Each must have been there for as long as there was to go on after the warning.
        ends = mine.for_s >= patience.deadlock and all(
            other.for_s >= min(patience.deadlock - patience.warn, patience.deadlock / 2) for other in apart
        )
        named = _named([f"rank {other.rank} in round {other.round}, at {other.where}" for other in apart])
        text = f"{waited}for {named}, and all ranks wait, in different collectives. {way_out}."
        return Finding(f"{text} {_later(ends, patience.deadlock, 'deadlock')}", ends, speaks or ends)
    ends = mine.for_s >= patience.silent
    where = {other.where: other for other in others}
    if set(where) == {mine.where}:
        text = f"{waited}where all ranks are, and the collective does not end: the network may be slow, or broken."
    else:
        where.pop(mine.where, None)
        named = _named([f"rank {other.rank}, at {other.where}" for other in where.values()])
        text = f"{waited}for {named}, and all ranks wait. If these are different collectives: {way_out}."
    return Finding(f"{text} {_later(ends, patience.silent, 'silent')}", ends, speaks or ends)


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
