"""How far a split may go by what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.columns import COLUMNS
from hvd_hetero.policies.evidence import Evidence
from hvd_hetero.rounds import RoundPlan, RoundReport, RoundTable

SIZE = 60.0


def table(samples, speeds, busy_s, fixed=0.0, cuts=1) -> RoundTable:
    rows = []
    for rank, x in enumerate(samples):
        row = dict.fromkeys(COLUMNS, 0.0)
        row |= {"timed_samples": x, "micro_batches": cuts, "compute_s": busy_s[rank]}
        row |= {"samples_per_s": speeds[rank], "fixed_samples": fixed}
        rows.append(RoundReport(**row).vector(rank, len(samples)))
    return RoundTable(sum(rows), len(samples))


def after(rounds: int, noise: float, fixed: float = 0.0, seed: int = 0) -> Evidence:
    """Two ranks that forecast 100 samples a second, and are off by ``noise``."""
    evidence, rng = Evidence(2, SIZE), np.random.default_rng(seed)
    for _ in range(rounds):
        speeds = 100.0 * np.exp(noise * rng.standard_normal(2))
        busy_s = (60 + fixed) / (1 + fixed / SIZE) / speeds
        evidence.learn(table((60, 60), (100.0, 100.0), busy_s, fixed))
    return evidence


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_rank_is_as_sure_as_its_forecasts_were_right(noise):
    doubts = [1.0 - after(200, noise, seed=seed).trusted_part(np.zeros(2)).mean() for seed in range(10)]
    # Half of 2/3, of the median of |x| / 0.67 for a normal x.
    assert np.mean(doubts) == pytest.approx(noise / 3, rel=0.4)


def test_where_all_is_fixed_cost_doubt_counts_twice():
    evidence = after(100, 0.05)
    little, much = (1.0 - evidence.trusted_part(np.full(2, fixed)) for fixed in (0.0, 1e6 * SIZE))
    assert much == pytest.approx(2 * little, rel=1e-3)


def test_a_rank_that_was_not_measured_teaches_nothing():
    evidence = Evidence(2, SIZE)
    evidence.learn(table((0, 60), (np.nan, 100.0), (0.0, 0.6)))
    evidence.learn(table((60, 0), (np.inf, 100.0), (np.nan, 0.6)))
    assert np.isfinite(evidence.trusted_part(np.zeros(2))).all()
    assert evidence.allowed_part(RoundPlan.of((60, 60)), RoundPlan.of((61, 59))) == 0.0, "rank 0 was never measured"


@pytest.mark.parametrize(
    ("wanted", "part"),
    [((70, 50), 1.0), ((80, 40), 0.75), ((50, 70), 1.0), ((119, 1), 15 / 59), ((60, 60), 1.0)],
)
def test_a_split_goes_a_third_beyond_what_was_measured(wanted, part):
    plan, evidence = RoundPlan.of((60, 60)), Evidence(2, SIZE)
    evidence.learn(table((60, 60), (100.0, 100.0), (0.6, 0.6)))
    assert evidence.allowed_part(plan, RoundPlan.of(wanted)) == pytest.approx(part)


def test_nothing_moves_before_the_first_measurement():
    evidence, plan = Evidence(2, SIZE), RoundPlan.of((60, 60))
    assert evidence.allowed_part(plan, RoundPlan.of((61, 59))) == 0.0
    assert evidence.allowed_part(plan, plan) == 1.0


@pytest.mark.parametrize(
    ("held", "wanted", "step"), [((2, 2), (3, 1), 1), ((1, 3), (2, 2), 1), ((32, 32), (48, 16), 16)]
)
def test_one_step_is_always_within_reach(held, wanted, step):
    evidence = Evidence(2, SIZE, step)
    evidence.learn(table(held, (100.0, 100.0), (0.6, 0.6)))
    assert evidence.allowed_part(RoundPlan.of(held), RoundPlan.of(wanted)) == 1.0


@pytest.mark.parametrize(("held", "wanted", "largest"), [((70, 58), (71, 57), 57), ((28, 28), (23, 33), 32)])
def test_another_number_of_micro_batches_is_within_reach(held, wanted, largest):
    """Two of 29 become one of 57, or one of 28 becomes two of 16: as many samples as a rank held, or nearly."""
    plan = RoundPlan(held, tuple(-(-x // largest) if rank else 1 for rank, x in enumerate(held)))
    after = RoundPlan(wanted, tuple(-(-x // largest) if rank else 1 for rank, x in enumerate(wanted)))
    assert plan.micro_batches != after.micro_batches
    evidence = Evidence(2, SIZE)
    rows = [table(held, (100.0, 100.0), (0.6, 0.6), cuts=of) for of in plan.micro_batches]
    cuts = rows[0].replaced("micro_batches", list(map(float, plan.micro_batches)))
    evidence.learn(cuts)
    assert evidence.allowed_part(plan, after) == 1.0


def test_a_saved_one_goes_on():
    evidence, other = after(30, 0.05), Evidence(2, SIZE)
    other.load_state_dict(json.loads(json.dumps(evidence.state_dict(), allow_nan=False)))
    assert (other.trusted_part(np.zeros(2)) == evidence.trusted_part(np.zeros(2))).all()
    for each in (evidence, other):
        each.learn(table((70, 50), (100.0, 100.0), (0.9, 0.45)))
    assert other.state_dict() == evidence.state_dict()
    fresh = Evidence(2, SIZE)
    fresh.load_state_dict(Evidence(2, SIZE).state_dict())
    assert fresh.allowed_part(RoundPlan.of((60, 60)), RoundPlan.of((61, 59))) == 0.0


@pytest.mark.parametrize("change", [{"least": [1.0]}, {"scatter": [-1.0, 0.1]}, {"most": [float("inf"), 1.0]}])
def test_a_state_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=r"Evidence.*resume"):
        Evidence(2, SIZE).load_state_dict({**after(3, 0.0).state_dict(), **change})
