"""One line in the log for each change of the split, with the reason. Level INFO, so that it is off by default.

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("hvd_hetero.telemetry.changes").setLevel(logging.INFO)

A policy gives no reason for its decisions. The reason given is the figure that has changed most since the last
change: a limit of memory, else a rank's expected speed, else its time at work.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from hvd_hetero.rounds import RoundPlan, RoundTable

__all__ = ["ChangeLog", "reason"]

_SHOWN = 8
"""More ranks than this are not listed one by one."""
_NOTABLE = 0.01  # of a figure; smaller changes explain nothing

Floats = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)


class ChangeLog:
    """Rank 0's lines in the log when plans change."""

    def __init__(self) -> None:
        self._table: RoundTable | None = None  # of the last change

    def __call__(self, round: int, before: RoundPlan, after: RoundPlan, table: RoundTable) -> None:
        """Log the change from one plan to another, by this table, if there is one; it holds from a round on."""
        if after is before or (after.samples, after.micro_batches) == (before.samples, before.micro_batches):
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info("from round %d on, %s: %s", round, _change(before, after), reason(self._table, table))
        self._table = table


def _change(before: RoundPlan, after: RoundPlan) -> str:
    what, old, new = "batches", before.samples, after.samples
    if old == new:
        what, old, new = "micro-batches", before.micro_batches, after.micro_batches
    if len(old) <= _SHOWN:
        return f"{what} {_listed(old)} -> {_listed(new)}"
    moved = np.abs(np.subtract(new, old))
    rank = int(moved.argmax())
    return f"{what} of {np.count_nonzero(moved)} of {len(old)} ranks, as rank {rank}'s: {old[rank]} -> {new[rank]}"


def reason(before: RoundTable | None, now: RoundTable) -> str:
    """Return what has changed since the table of the last change (None: there was none)."""
    limits = now.column("limit")
    fell = limits > 0 if before is None else (limits > 0) & (limits != before.column("limit"))
    if fell.any():
        rank = int(fell.argmax())
        return f"the memory of rank {rank} holds {limits[rank]:.0f} samples at once"
    speeds = now.column("samples_per_s")
    if before is None and np.isfinite(speeds).all():
        return f"the ranks expect {_figures(speeds)} samples/s"
    if before is not None and (found := _most_changed(before.column("samples_per_s"), speeds)) is not None:
        rank, ratio = found
        return f"rank {rank} expects {speeds[rank]:.4g} samples/s, {ratio:.2f} times what it did at the last change"
    busy = now.busy_s
    if before is not None and (found := _most_changed(before.busy_s, busy)) is not None:
        rank, ratio = found
        return f"rank {rank} was at work for {busy[rank]:.3g} s, {ratio:.2f} times as long as at the last change"
    return f"the ranks were at work for {_figures(busy)} s"


def _most_changed(before: Floats, now: Floats) -> tuple[int, float] | None:
    """Return the rank whose figure has changed most, and the ratio; None if none has changed notably."""
    known = (before > 0) & (now > 0) & np.isfinite(before) & np.isfinite(now)
    ratios = np.divide(now, before, out=np.ones_like(now), where=known)
    rank = int(np.abs(np.log(ratios)).argmax())
    return None if abs(ratios[rank] - 1.0) < _NOTABLE else (rank, float(ratios[rank]))


def _figures(values: Floats) -> str:
    if len(values) <= _SHOWN:
        return " ".join(f"{value:.4g}" for value in values)
    return f"{values.min():.4g} to {values.max():.4g} (median {np.median(values):.4g})"


def _listed(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))
