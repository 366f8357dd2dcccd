"""What a record says of samples that cost unequally much (``cost_of``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.words import percent

__all__ = ["cost_notes", "in_mean_samples"]


def in_mean_samples(run: Run) -> Run:
    """Return the run with its samples counted by what they cost, so that a rank's speed does not follow its batch."""
    if not run.work.any():
        return run
    return replace(run, samples=np.where(run.work > 0.0, run.work, run.samples))


def cost_notes(run: Run) -> list[str]:
    """Return what a sample costs, what filling batches up costs, and what division by cost has saved."""
    measured = run.cost_number + run.cost_length + run.cost_square + run.cost_padded > 0.0
    if not (run.work.any() and measured.any()):
        return []
    rounds = measured.any(axis=1)
    number, length, square, padded = (
        float(np.median(of[measured])) for of in (run.cost_number, run.cost_length, run.cost_square, run.cost_padded)
    )
    terms = {"": number, " L": length, " L²": square, " · the longest L of its batch": padded}
    fit = " + ".join(f"{of:.2g}{unit}" for unit, of in terms.items() if of)
    padding = float((run.padding * run.work)[rounds].sum() / run.work[rounds].sum())
    by_number = float(np.median(run.by_number[rounds].max(axis=1)))
    return [
        f"A sample of length L costs {fit} of a mean one, as measured; {percent(padding)} of the work is filling up "
        f"batches. Divided by number, the latest rank would have taken {by_number:.2f} times as long."
    ]
