"""How a report names ranks and writes shares."""

from __future__ import annotations

import math

import pytest

from hvd_hetero.tools.report.words import UNKNOWN, named_ranks, percent, percents


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([3], "rank 3"),
        ([3, 1], "ranks 3 and 1"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        ([0, 1, 2, 5], "ranks 0, 1, 2 and 1 more"),
        (list(range(9)), "ranks 0, 1, 2 and 6 more"),
    ],
)
def test_of_many_ranks_the_first_are_named_and_the_others_counted(ranks, named):
    assert named_ranks(ranks, 3) == named


def test_a_share_has_two_digits_or_so():
    shares = {0.4567: "46%", 0.0996: "10%", 0.0991: "9.9%", 0.0004: "0.0%", -1e-9: "0.0%", math.nan: UNKNOWN}
    assert {share: percent(share) for share in shares} == shares


def test_shares_of_a_whole_sum_to_it_as_they_are_shown():
    """Rounded one by one, these are 100.1 %."""
    assert percents([0.6665, 0.2225, 0.0555, 0.0555]) == ["66.7%", "22.2%", "5.6%", "5.5%"]
    assert percents([1.0, 0.0, -1e-12]) == ["100.0%", "0.0%", "0.0%"]
