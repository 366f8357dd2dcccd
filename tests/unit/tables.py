"""Tables of rounds, as tests say them."""

from __future__ import annotations

import numpy as np

from hvd_hetero.columns import COLUMNS
from hvd_hetero.rounds import RoundTable


def table(workers: int, **figures) -> RoundTable:
    """The table of so many ranks with these figures, one for all ranks or one for each; all else is 0."""
    rows = np.zeros((workers, len(COLUMNS)))
    for name, of_ranks in figures.items():
        rows[:, list(COLUMNS).index(name)] = of_ranks
    return RoundTable(rows.ravel(), workers)
