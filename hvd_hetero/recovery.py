"""The clock of a recovery: how long each step took on this rank, from noticing a change of ranks to the next round.

Steps follow each other without a gap: what ends one begins the next, so they sum to the total. Where another failure
comes before the first round is over, the steps are done again and their seconds add up; the time until it was noticed
counts to the step in which it came.

Without a change of ranks, nothing here runs in a round.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hvd_hetero.telemetry.recoveries import STEPS

__all__ = ["RecoveryClock", "SoFar", "age_s", "record_of"]

logger = logging.getLogger(__name__)

SoFar: TypeAlias = dict[str, float | None]
"""One rank's seconds up to its first round, as plain data: keys of a recovery's record."""

_WORDS = {
    "start": "start", "leave": "leaving", "rendezvous": "rendezvous", "broadcast": "broadcast", "set_up": "set-up",
    "first_round": "first round",
}  # fmt: skip


def age_s() -> float:
    """Return the seconds since this rank began, to a hundredth; NaN where the system does not say (not Linux).

    It began with its process. A process that was started ahead, and kept no rank waiting, began when it got its place.
    """
    if given_at := os.environ.get("HOROVOD_GIVEN_PLACE_AT"):
        return time.monotonic() - float(given_at)
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return math.nan


class RecoveryClock:
    """One rank's clock. ``clock`` gives monotonic seconds, ``now`` seconds since 1970, ``age_s`` the rank's age."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        age_s: Callable[[], float] = age_s,
    ) -> None:
        self._clock, self._now, self._age_s = clock, now, age_s
        self._is_new = True
        self.stop()

    @property
    def running(self) -> bool:
        """True from a change of ranks until the first round after it is over."""
        return self._began is not None

    def stop(self) -> None:
        """Forget this recovery: it is over, or there was none."""
        self._began: float | None = None
        self._latest = 0.0
        self._at_hand = ""
        self._seconds: dict[str, float] = {}
        self._noticed_at = self._noticed_s = math.nan

    def notice(self, since_round_s: float = math.nan, *, failed: bool = True) -> None:
        """Begin: a failure, or a change of hosts, was noticed so long after the last round (NaN: there was none)."""
        if self._began is None:
            self._began = self._latest = self._clock()
            self._noticed_at, self._noticed_s = self._now(), since_round_s
        else:
            self.over(self._at_hand)
        self._at_hand = "leave" if failed else "rendezvous"

    def arrive(self) -> None:
        """Begin at the start of the rank, if this is its first membership; the others are about to send their state.

        A new process does not know yet whether this is a recovery. If not, ``stop`` follows.
        """
        if self._is_new and self._began is None and math.isfinite(age_s := self._age_s()):
            self._latest = self._clock()
            self._began = self._latest - age_s
            self._seconds["start"] = age_s
            self._at_hand = "broadcast"
        self._is_new = False

    def over(self, step: str) -> float:
        """End a step and begin the next one; return the seconds that the step took this time."""
        if self._began is None:
            return 0.0
        now = self._clock()
        took_s, self._latest = now - self._latest, now
        self._seconds[step] = self._seconds.get(step, 0.0) + took_s
        self._at_hand = STEPS[min(STEPS.index(step) + 1, len(STEPS) - 1)]
        return took_s

    @property
    def so_far(self) -> SoFar:
        """The steps that are over, and their total, measured separately; None: not known, or no such step."""
        total_s = math.nan if self._began is None else self._latest - self._began
        found = {"noticed_at": self._noticed_at, "noticed_s": self._noticed_s, "total_s": total_s}
        found |= {f"{step}_s": self._seconds.get(step, math.nan) for step in STEPS}
        return {key: round(value, 6) if math.isfinite(value) else None for key, value in found.items()}

    def agreed(self, session: Any) -> None:
        """Meet, before the first round, and exchange the steps so far, in collective calls.

        The rest follows by itself when the first round is over: a line in the log, and the record on rank 0.
        """
        balancer = session.balancer
        session.wire.allgather_object(None, name=f"{session.prefix}.recovered")  # the round begins for all at once
        self.over("set_up")
        ranks = session.wire.allgather_object(self.so_far, name=f"{session.prefix}.recovery")

        def first_round_is_over() -> None:
            first_round_s = self.over("first_round")
            self._tell(balancer.rank, balancer.workers, balancer.finished.round)
            self.stop()
            session.note_recovery(record_of(ranks, first_round_s))

        if self.running:
            balancer.next_round_over = first_round_is_over

    def _tell(self, rank: int, workers: int, round: int) -> None:
        """Say in the log how long it took to go on, from this round."""
        if self._began is None or not logger.isEnabledFor(logging.INFO):
            return
        steps = ", ".join(f"{_WORDS[step]} {self._seconds[step]:.2f} s" for step in STEPS if step in self._seconds)
        total_s = self._latest - self._began
        if "start" in self._seconds:
            what = f"has joined from round {round} on, {total_s:.2f} s after it began"
        else:
            what = f"goes on from round {round}, {total_s:.2f} s after it noticed a change of ranks"
        noticed = ""
        if math.isfinite(self._noticed_at):
            clock = time.strftime("%H:%M:%S", time.localtime(self._noticed_at))
            noticed = f"; noticed at {clock}.{int(self._noticed_at % 1 * 1000):03d}"
            if math.isfinite(self._noticed_s):
                noticed += f", {self._noticed_s:.2f} s after its last round"
        logger.info("rank %d of %d %s: %s%s", rank, workers, what, steps, noticed)


def record_of(ranks: Sequence[SoFar], first_round_s: float) -> dict[str, Any]:
    """Return the record of a recovery, from each rank's steps before the first round, and the seconds of that round.

    All ranks begin the first round together and end it together, so rank 0's time is the time of all.
    """
    first_round_s = round(first_round_s, 6)
    columns: dict[str, Any] = {key: [each[key] for each in ranks] for key in ranks[0]}
    columns["first_round_s"] = [(begun or 0.0) + first_round_s for begun in columns["first_round_s"]]  # or was lost
    columns["total_s"] = [None if s is None else s + first_round_s for s in columns["total_s"]]
    return columns
