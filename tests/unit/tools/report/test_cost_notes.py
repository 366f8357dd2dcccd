"""What a report says of samples that cost unequally much."""

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
    report = report_of(unequal(**columns, padding=np.tile([0.1, 0.3], (ROUNDS, 1))), "made")
    note = report.costs
    assert note not in report.notes, "nothing is missing"
    for figure in ("0.25 + 0.015 L + 0.001 M of a mean one", "20% of the work", "1.50 times as long"):
        assert figure in note
    assert "L²" not in note


def test_nothing_is_said_where_all_samples_cost_the_same():
    assert report_of(unequal(), "made", replayed=False).costs == ""


@pytest.mark.parametrize("times", [1e9, 1e3, -1.0])
def test_work_that_cannot_be_true_counts_as_not_known(times):
    """A mean sample costs 1. The report goes by the samples, and says so."""
    run = unequal()
    report = report_of(run.replace(work=times * run.work), "made")
    assert report.figures.ranks.samples_per_s == pytest.approx((15.0, 5.0))
    assert any(note.startswith("work cannot be true in 20 of 20 rounds (ranks 0 and 1)") for note in report.notes)
