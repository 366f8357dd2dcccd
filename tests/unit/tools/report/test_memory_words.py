"""What a report says of memory: each rank's line, and where memory decides the split."""

from __future__ import annotations

import numpy as np
import pytest
from report_runs import run_of

from hvd_hetero.tools.report.build import report_of

ROUNDS = 20


def bounded(samples=(40, 24), speeds=(100.0, 200.0), limit=(0, 24), policy="lb-bsp", **columns):
    of = {name: np.tile(value, (ROUNDS, 1)) for name, value in columns.items()}
    seconds = np.tile(np.array(samples) / speeds, (ROUNDS, 1))
    return run_of(
        samples=np.tile(samples, (ROUNDS, 1)), compute_s=seconds, elapsed_s=seconds.max(axis=1) + 0.01, policy=policy,
        samples_per_s=np.tile(speeds, (ROUNDS, 1)), limit=np.tile(limit, (ROUNDS, 1)), **of,
    )  # fmt: skip


def test_the_verdict_says_where_memory_decides_the_split():
    why = report_of(bounded(), "made", replayed=False).verdict.why
    assert "Memory, not speed, decides the split: rank 1 could take 43 samples by speed, and holds 24." in why


def test_rounds_that_a_line_of_several_mixes_with_short_ones_are_at_the_bound_too():
    run = bounded()
    mixed = run.replace(samples=run.samples - [8, 6])
    assert "rank 1 could take 43 samples" in report_of(mixed, "made", replayed=False).verdict.why


@pytest.mark.parametrize(
    "case", [{"speeds": (170.0, 100.0)}, {"limit": (0, 0)}, {"limit": (0, 60)}, {"policy": "bsp"}, {"policy": "static"}]
)
def test_nothing_is_said_where_speed_or_the_policy_decides_it(case):
    assert "Memory" not in report_of(bounded(**case), "made", replayed=False).verdict.why


def test_the_line_the_bound_and_the_peak_of_each_rank_are_told():
    memory = {"memory_base_mib": (0.0, 1024.0), "memory_slope_mib": (0.0, 450.0), "memory_peak_mib": (0.0, 11500.0)}
    assert report_of(bounded(**memory), "made", replayed=False).costs == (
        "Memory of a micro-batch of x samples, rank 1: 1,024 + 450 x MiB, 11,500 MiB at the peak, at most 24 samples."
    )
    assert report_of(bounded(limit=(0, 0)), "made", replayed=False).costs == ""
