"""One line in the log for each change of the split. Level INFO, so that it is off by default; WARNING if a rank rests.

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("hvd_hetero.telemetry.changes").setLevel(logging.INFO)

A policy gives no reason for its decisions. The line has its inputs: the speeds that the ranks expect, or else how long
they were at work, and the limits of their memory.
"""

from __future__ import annotations

import logging

import numpy as np

from hvd_hetero.rounds import RoundPlan, RoundTable

# With more ranks, a line has a summary.
LISTED_RANKS = 8

logger = logging.getLogger(__name__)


def log_change(round: int, before: RoundPlan, after: RoundPlan, table: RoundTable) -> None:
    """Log the change from one plan to another, by this table, if there is one; it holds from a round on."""
    if (after.samples, after.micro_batches) == (before.samples, before.micro_batches):
        return
    if logger.isEnabledFor(logging.INFO):
        logger.info("from round %d on, %s: %s", round, _change(before, after), _inputs_of(table))


def log_rests(round: int, plan: RoundPlan, announced: set[int]) -> None:
    """Warn of ranks that do no samples from a round on, and add them to ``announced``: once each, despite trials."""
    if new := [rank for rank in np.flatnonzero(plan.shares == 0).tolist() if rank not in announced]:
        announced.update(new)
        more = f" and {len(new) - LISTED_RANKS} more" if len(new) > LISTED_RANKS else ""
        several, listed = len(new) > 1, ", ".join(map(str, new[:LISTED_RANKS])) + more
        logger.warning(
            "%s no samples from round %d on, because rounds are shorter without %s. %s retried now and then. Removing "
            "%s from the job would also shorten the allreduce",
            f"ranks {listed} get" if several else f"rank {listed} gets", round, "them" if several else "it",
            "They are" if several else "It is", "them" if several else "it",
        )  # fmt: skip


def _change(before: RoundPlan, after: RoundPlan) -> str:
    what, old, new = "batches", before.samples, after.samples
    if old == new:
        what, old, new = "micro-batches", before.micro_batches, after.micro_batches
    if len(old) <= LISTED_RANKS:
        return f"{what} {' '.join(map(str, old))} -> {' '.join(map(str, new))}"
    moved = np.abs(np.subtract(new, old))
    rank = int(moved.argmax())
    return f"{what} of {np.count_nonzero(moved)} of {len(old)} ranks, as rank {rank}'s: {old[rank]} -> {new[rank]}"


def _inputs_of(table: RoundTable) -> str:
    speeds, limits = table.figures("samples_per_s"), table.figures("limit")
    if np.isfinite(speeds).all():
        inputs = f"the ranks expect {_listed(speeds)} samples/s"
    else:
        inputs = f"the ranks were at work for {_listed(table.busy_s.tolist())} s"
    return f"{inputs}; {_listed(limits)} samples fit in memory (0: not known)" if any(limits) else inputs


def _listed(values: list[float]) -> str:
    if len(values) <= LISTED_RANKS:
        return " ".join(f"{value:.4g}" for value in values)
    return f"{min(values):.4g} to {max(values):.4g} (median {np.median(values):.4g})"
