"""What a report says of samples that cost unequally much."""

from __future__ import annotations

import numpy as np
import pytest
from report_runs import run_of

from hvd_hetero.tools.report.made import report_of

ROUNDS = 20


def unequal(**costs):
    """Rank 1 has few long samples: as much work as rank 0, in as long a time."""
    samples, work = np.tile([15, 5], (ROUNDS, 1)), np.tile([10.0, 10.0], (ROUNDS, 1))
    seconds = np.full((ROUNDS, 2), 1.0)
    return run_of(samples=samples, compute_s=seconds, elapsed_s=np.full(ROUNDS, 1.1), work=work, **costs)


def test_a_rank_with_few_long_samples_is_not_called_slow():
    found = report_of(unequal(), "made", replayed=False).figures
    fast, slow = found.ranks.samples_per_s
    assert (fast, slow) == pytest.approx((10.0, 10.0))


def test_the_fit_and_what_padding_and_division_by_number_cost_are_told():
    columns = {"cost_number": 0.25, "cost_length": 0.015, "cost_square": 0.0, "cost_padded": 0.001, "by_number": 1.5}
    columns = {name: np.full((ROUNDS, 2), of) for name, of in columns.items()}
    (note,) = (
        note for note in report_of(unequal(**columns, padding=np.tile([0.1, 0.3], (ROUNDS, 1))), "made").notes
        if "length" in note
    )  # fmt: skip
    for figure in ("0.25 + 0.015 L + 0.001 M of a mean one", "20% of the work", "1.50 times as long"):
        assert figure in note
    assert "L²" not in note


def test_nothing_is_said_where_all_samples_cost_the_same():
    assert not any("length" in note for note in report_of(unequal(), "made", replayed=False).notes)
