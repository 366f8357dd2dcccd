"""What a record says of samples that cost unequally much (``cost_of``)."""

from __future__ import annotations

import numpy as np

from hvd_hetero.rounds import CostRule
from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.words import percent

_UNITS = "", " L", " L²", " M", " M²"


def cost_note(run: Run) -> str:
    """Return what a sample costs, what filling batches up costs, and what division by cost has saved; "": not known."""
    columns = [getattr(run, f"cost_{name}") for name in CostRule._fields]
    measured = (sum(columns) > 0.0) & (run.work > 0.0)
    if not measured.any():
        return ""
    rounds = measured.any(axis=1)
    costs = [float(np.median(column[measured])) for column in columns]
    fit = " + ".join(f"{cost:.2g}{unit}" for unit, cost in zip(_UNITS, costs, strict=True) if cost)
    padding = float((run.padding * run.work)[rounds].sum() / run.work[rounds].sum())
    by_number = float(np.median(run.by_number[rounds].max(axis=1)))
    longest = ", M being the longest of its batch" if "M" in fit else ""
    return (
        f"A sample of length L costs {fit} of a mean one, as measured{longest}; {percent(padding)} of the work is "
        f"filling up batches. Divided by number, the latest rank would have taken {by_number:.2f} times as long."
    )
