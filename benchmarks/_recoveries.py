"""Recoveries of elastic jobs by step, from the telemetry of each membership and the marks of faults."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd_hetero.telemetry import Recovery, read_run
from hvd_hetero.telemetry.recoveries import STEPS

_COLUMNS = ("notice", *STEPS, "in all")


@dataclass(frozen=True)
class Change:
    """One change of the ranks."""

    membership: int
    """Number of the membership that it led to."""
    before: int
    """Ranks before it."""
    recovery: Recovery
    killed_at: float | None
    """Time at which the latest rank was killed before the first survivor noticed; None: no rank was killed."""

    @property
    def after(self) -> int:
        """Ranks after it."""
        return len(self.recovery.total_s)

    @property
    def kind(self) -> str:
        """Name the change, as the table does."""
        return "kill" if self.killed_at is not None else "join" if self.recovery.joined.any() else "other"

    def rows(self, *, newcomers: bool) -> list[dict[str, float]]:
        """Return the seconds of each step of each survivor, or of each newcomer; in all from the kill on."""
        steps, found = self.recovery.steps, []
        for rank in np.flatnonzero(self.recovery.joined == newcomers).tolist():
            row = {step: float(seconds[rank]) for step, seconds in steps.items() if np.isfinite(seconds[rank])}
            row["in all"] = float(self.recovery.total_s[rank])
            if self.killed_at is not None and not newcomers:
                row["notice"] = float(self.recovery.noticed_at[rank]) - self.killed_at
                row["in all"] += row["notice"]
            found.append(row)
        return found


def changes(directory: Path, sizes: dict[int, int]) -> list[Change]:
    """Return the changes of a job, whose memberships had so many ranks each, in order of time."""
    struck = [mark.read_text().split() for mark in directory.glob("fault.*")]  # when, in which process, what
    killed_at = sorted(float(at) for at, _, kind in struck if kind == "kill")
    found: list[Change] = []
    ended_at = 0.0
    before: int | None = None
    for membership, ranks in sorted(sizes.items()):
        file = directory / f"run.{membership}.telemetry"
        recovery = next(iter(read_run(file).recoveries), None) if file.exists() else None
        if recovery is not None and before is not None and np.isfinite(recovery.noticed_at).any():
            noticed_at = float(np.nanmin(recovery.noticed_at))
            kills = [at for at in killed_at if ended_at < at <= noticed_at]
            found.append(Change(membership, before, recovery, kills[-1] if kills else None))
            ended_at = float(np.nanmax(recovery.noticed_at))
        before = ranks
    return found


def table(found: Iterable[Change]) -> str:
    """Return the table of recoveries by step: median and longest, over all ranks that went through them."""
    groups: dict[tuple[str, int, bool], list[Change]] = {}
    for change in found:
        for newcomers in (False, True):
            if change.rows(newcomers=newcomers):
                ranks = change.before if change.kind == "kill" else change.after
                groups.setdefault((change.kind, ranks, newcomers), []).append(change)
    names = " | ".join(column.replace("_", " ") for column in _COLUMNS)
    lines = [f"| ranks | who | times | {names} |", "|---|---|---:|" + "---:|" * len(_COLUMNS)]
    words = {"kill": "killed, of", "join": "joined, now", "other": "neither, now"}
    for (kind, ranks, newcomers), group in sorted(groups.items(), key=lambda item: (item[0][0] != "kill", item[0])):
        rows = [row for change in group for row in change.rows(newcomers=newcomers)]
        cells = [_cell([row[column] for row in rows if column in row]) for column in _COLUMNS]
        who = "newcomers" if newcomers else "survivors"
        lines.append(f"| {words[kind]} {ranks} | {who} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else "-"
