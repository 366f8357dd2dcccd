"""Ranks that take turns in being slow, and what all of them have besides."""

import numpy as np
import pytest
from report_runs import run_of

from hvd_hetero.tools.report.build import report_of
from hvd_hetero.tools.report.causes import causes

ROUNDS = 80


def in_turns(extra_s, each=1, **readings):
    """Two ranks of 50 ms a round, of which now one and now the other takes longer, for so many rounds each."""
    turn = np.arange(ROUNDS)[:, None] // each % 2 == [0, 1]
    own_s = 0.05 + extra_s * turn
    elapsed_s = own_s.max(axis=1) + 0.002
    columns = {name: np.broadcast_to(reading, own_s.shape) for name, reading in readings.items()}
    columns |= {"wait_s": elapsed_s[:, None] - own_s, "cpu": np.ones_like(own_s), "memory": np.full_like(own_s, 0.5)}
    return run_of(np.full(own_s.shape, 10), own_s, elapsed_s, start=0, **columns), turn


@pytest.mark.parametrize("column", ["contended", "stolen", "stalled"])
@pytest.mark.parametrize("share", [0.05, 0.08, 0.2])
@pytest.mark.parametrize("extra_s", [0.04, 0.1, 0.3])
def test_a_reading_that_all_ranks_share_explains_no_turns(column, share, extra_s):
    """The readings scatter by a fifth, and each costs a sixth of the time, or up to a third."""
    noise = np.random.default_rng(0).uniform(0.8, 1.2, (ROUNDS, 2))
    run, _ = in_turns(extra_s, **{column: share * noise})
    verdict = report_of(run, "run", replayed=False).verdict
    assert (verdict.kind, verdict.causes) == ("computing", ())
    assert {cause.kind for cause in causes(run) if cause} <= {"unknown"}


@pytest.mark.parametrize("column", ["throttled", "collecting"])
def test_pauses_that_explain_half_of_the_turns_are_not_why(column):
    run, _ = in_turns(0.1, **{column: 0.08})
    assert report_of(run, "run", replayed=False).verdict.kind == "computing"


def test_others_that_come_to_one_rank_and_then_to_the_other_are_why_both_are_slow():
    """For eight rounds each, as long as another process is there; half of its time then."""
    run, turn = in_turns(0.05, each=8)
    run.contended[:] = 0.5 * turn
    verdict = report_of(run, "run", replayed=False).verdict
    assert [cause.kind for cause in causes(run)] == ["competition"] * 2
    assert verdict.causes == ("competition",)


def test_a_rank_that_is_slow_on_the_whole_is_still_told():
    """Rank 1 takes four times as long in the first quarter, and no reading says why."""
    run, _ = in_turns(0.0)
    run.compute_s[: ROUNDS // 4, 1] *= 4
    run.elapsed_s[:] = run.compute_s.max(axis=1) + 0.002
    run.wait_s[:] = run.elapsed_s[:, None] - run.compute_s
    verdict = report_of(run, "run", replayed=False).verdict
    assert (verdict.kind, verdict.causes) == ("late", ("unknown",))
