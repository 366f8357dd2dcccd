"""How a report names ranks and writes shares."""

from __future__ import annotations

import math

import pytest

from hvd_hetero.telemetry.report.words import UNKNOWN, named_ranks, percent


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
