"""Recoveries of elastic jobs, from the telemetry of each membership, its ranks' logs, and the marks of faults."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.telemetry import read_run


@dataclass(frozen=True)
class Change:
    """One change of the ranks."""

    membership: int
    """Number of the membership that it led to."""
    before: int
    """Ranks before it."""
    after: int
    recovered_s: float
    """Seconds from noticing it to the end of the first round, on rank 0."""
    from_kill_s: float
    """Seconds from the latest kill to the end of the first round; NaN: no rank was killed."""

    @property
    def kind(self) -> str:
        """Name the change, as the table does."""
        if not math.isnan(self.from_kill_s):
            return "kill"
        return "join" if self.after > self.before else "other"


def changes(directory: Path, sizes: dict[int, int], events: Iterable[dict[str, Any]]) -> list[Change]:
    """Return the changes of a job, whose memberships had so many ranks each, in order of time."""
    struck = [mark.read_text().split() for mark in directory.glob("fault.*")]  # when, in which process, what
    killed_at = sorted(float(at) for at, _, kind in struck if kind == "kill")
    ended = [(event["membership"], event["now_s"]) for event in events if "finished" in event]
    found: list[Change] = []
    before, former_at = 0, 0.0
    for membership, ranks in sorted(sizes.items()):
        file = directory / f"run.{membership}.telemetry"
        first_at = min((at for number, at in ended if number == membership), default=math.nan)
        recovered_s = read_run(file).recovered_s[:1] if file.exists() else ()
        if before and sum(recovered_s):
            kills = [at for at in killed_at if former_at < at <= first_at]
            from_kill_s = first_at - kills[-1] if kills else math.nan
            found.append(Change(membership, before, ranks, float(recovered_s[0]), from_kill_s))
            former_at = first_at
        before = ranks
    return found


def table(found: Iterable[Change]) -> str:
    """Return the table of recoveries: median and longest."""
    groups: dict[tuple[str, int], list[Change]] = {}
    for change in found:
        groups.setdefault((change.kind, change.before if change.kind == "kill" else change.after), []).append(change)
    lines = ["| ranks | times | since it was noticed | since the kill |", "|---|---:|---:|---:|"]
    words = {"kill": "killed, of", "join": "joined, now", "other": "neither, now"}
    for (kind, ranks), group in sorted(groups.items(), key=lambda item: (item[0][0] != "kill", item[0])):
        noticed = _cell([change.recovered_s for change in group])
        killed = _cell([change.from_kill_s for change in group])
        lines.append(f"| {words[kind]} {ranks} | {len(group)} | {noticed} | {killed} |")
    return "\n".join(lines)


def _cell(seconds: Sequence[float]) -> str:
    return "-" if math.isnan(seconds[0]) else f"{statistics.median(seconds):.2f}, {max(seconds):.2f}"
