"""Policies are pure, decide alike everywhere, and give each rank what it can finish in the same time."""

from __future__ import annotations

import numpy as np
import pytest
from tables import table

from hvd_hetero.planner import Planner
from hvd_hetero.policies import BSP, LBBSP, Policy, StaticAllocation, resolve_policy
from hvd_hetero.rounds import FinishedRound, RoundPlan


def told(speeds: list[float], plan: RoundPlan | None = None, number: int = 1) -> FinishedRound:
    """A finished round in whose table the ranks predict these speeds for themselves, and had them."""
    plan = plan or RoundPlan.of([1000] * len(speeds))
    x, busy_s = plan.samples, [x / v if 0.0 < v < np.inf else 1.0 for x, v in zip(plan.samples, speeds, strict=True)]
    known = {"samples_per_s": speeds, "micro_batches": 1, "samples": x, "timed_samples": x, "compute_s": busy_s}
    return FinishedRound(number, 0, plan, table(len(speeds), **known), 1.0)


def settled(policy: Policy, global_batch: int, speeds: list[float], rounds: int = 12) -> RoundPlan:
    plan = policy.first(len(speeds), global_batch)
    for number in range(rounds):
        plan = policy.next(plan, told(speeds, plan, number))
    return plan


def test_bsp_gives_equal_shares_whatever_was_measured():
    plan = BSP().first(3, 100)
    assert plan.samples == (34, 33, 33)
    assert BSP().next(plan, told([9.0, 1.0, 1.0])) == plan


def test_bsp_cuts_shares_for_the_memory():
    assert Planner(BSP(max_micro_batch=10), 2, 50).plan().micro_batches == (3, 3)


def test_static_allocation_does_its_weights_in_micro_batches_of_one_size():
    plan = StaticAllocation([3, 7]).first(2, 500)
    assert plan.samples == (150, 350)
    assert plan.micro_batches == (3, 7)
    assert {size for rank in range(2) for size in plan.sizes(rank)} == {50}


def test_static_allocation_allows_a_rank_without_data():
    assert StaticAllocation([0, 4]).first(2, 8).samples == (0, 8)


def test_static_allocation_keeps_the_batch_where_the_weights_do_not_divide_it():
    plan = StaticAllocation([3, 7]).first(2, 512)
    assert plan.total == 512
    assert all(51 <= size <= 52 for rank in range(2) for size in plan.sizes(rank))


def test_lb_bsp_divides_in_proportion_to_the_predicted_speeds():
    assert settled(LBBSP(), 60, [3.0, 1.0, 2.0]).samples == (30, 10, 20)


def test_lb_bsp_takes_a_micro_batch_no_further_than_a_third_beyond_what_was_measured():
    policy = LBBSP()
    plan = policy.first(2, 240)
    once = policy.next(plan, told([3.0, 1.0], plan))
    assert once.samples == (150, 90)
    assert policy.next(once, told([3.0, 1.0], once)).samples == (172, 68)


@pytest.mark.parametrize(("batch", "step", "shares"), [(4, 1, (3, 1)), (64, 16, (48, 16)), (96, 16, (64, 16, 16))])
def test_lb_bsp_also_moves_shares_of_which_a_third_is_less_than_a_step(batch, step, shares):
    speeds = [float(share) for share in shares]
    assert settled(LBBSP(multiple_of=step), batch, speeds).samples == shares


def test_lb_bsp_changes_the_number_of_micro_batches():
    """One of 28 becomes two of 16 and 17, which are smaller than what was measured by more than a third."""
    assert settled(LBBSP(max_micro_batch=32), 56, [33.0, 23.0]).samples == (33, 23)


def test_lb_bsp_leaves_a_split_that_is_good_enough():
    policy = LBBSP(tolerance=0.05)
    plan = policy.first(2, 200)
    assert policy.next(plan, told([1.02, 1.0])) == plan
    assert policy.next(plan, told([1.3, 1.0], plan)) != plan


@pytest.mark.parametrize("unknown", [float("nan"), 0.0, -5.0, float("inf")])
def test_lb_bsp_keeps_the_share_of_a_rank_without_a_usable_speed(unknown):
    policy = LBBSP()
    plan = policy.first(3, 90)
    assert policy.next(plan, told([2.0, unknown, 1.0])).samples == (40, 30, 20)
    assert policy.next(plan, told([unknown, unknown, 1.0])) == plan


def test_lb_bsp_keeps_minimum_and_multiple():
    assert settled(LBBSP(minimum=8, multiple_of=8), 128, [1000.0, 1.0]).samples == (120, 8)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: LBBSP(minimum=0), ValueError, "minimum"),
        (lambda: LBBSP(minimum=1.5), TypeError, "minimum"),
        (lambda: LBBSP(minimum=True), TypeError, "minimum"),
        (lambda: LBBSP(multiple_of=0), ValueError, "multiple_of"),
        (lambda: LBBSP(multiple_of=8.0), TypeError, "multiple_of"),
        (lambda: LBBSP(tolerance=1.5), ValueError, "tolerance"),
        (lambda: LBBSP(max_micro_batch=0), ValueError, "max_micro_batch"),
        (lambda: LBBSP(predictor="emma"), ValueError, "'emma'.*'ema'"),
        (lambda: BSP(max_micro_batch=0), ValueError, "max_micro_batch"),
        (lambda: BSP(max_micro_batch="a"), TypeError, "max_micro_batch"),
        (lambda: BSP(max_micro_batch=np.bool_(True)), TypeError, "max_micro_batch"),
        (lambda: StaticAllocation([1, -2]), ValueError, r"weights\[1\]"),
        (lambda: StaticAllocation([1, 2.5]), TypeError, r"weights\[1\]"),
        (lambda: StaticAllocation([0, 0]), ValueError, "weights"),
        (lambda: StaticAllocation(3), TypeError, "weights"),
        (lambda: StaticAllocation([1, 2]).first(3, 90), ValueError, "weights"),
        (lambda: StaticAllocation([10, 20]).first(2, 20), ValueError, "global_batch"),
        (lambda: resolve_policy("lb_bps"), ValueError, "'lb_bps'.*'lb-bsp'"),
        (lambda: resolve_policy("static"), ValueError, r"StaticAllocation\("),
        (lambda: resolve_policy(LBBSP), TypeError, r"LBBSP\("),
        (lambda: resolve_policy(3), TypeError, "policy"),
    ],
)
def test_bad_arguments_are_named(make, error, named):
    with pytest.raises(error, match=named):
        make()


@pytest.mark.parametrize(
    ("policy", "workers", "global_batch", "message"),
    [
        (LBBSP(multiple_of=8), 2, 100, r"multiple_of=8.* 2 ranks.*global_batch=100.*=96 or 104"),
        (LBBSP(multiple_of=8), 3, 25, r"multiple_of=8.*global_batch=25.*global_batch=24 or 32"),
        (LBBSP(minimum=60), 2, 100, r"global_batch.* 120 .*minimum=60.*=100.*lower minimum"),
        (LBBSP(minimum=3, multiple_of=8), 4, 31, r"global_batch.* 32 .* 4 ranks.*minimum=3.*multiple_of=8.* 8 "),
        (LBBSP(multiple_of=8), 4, 31, r"global_batch.* 32 .*raise global_batch.*lower multiple_of.*fewer ranks"),
        (LBBSP(), 3, 2, r"global_batch.* 3 .*minimum=1.*raise global_batch, or"),
    ],
)
def test_a_global_batch_that_cannot_be_divided_is_told_in_the_users_terms(policy, workers, global_batch, message):
    """The error speaks of what the user set, and its advice can be followed: never of a total or a minimum of 0."""
    with pytest.raises(ValueError, match=message) as refused:
        policy.first(workers, global_batch)
    assert "total" not in str(refused.value)
    assert "0 is allowed" not in str(refused.value)


@pytest.mark.parametrize("workers", range(1, 8))
def test_lb_bsp_starts_with_the_plan_of_bsp(workers):
    """Without multiples the first shares are equal, the lower ranks holding one sample more, as everywhere."""
    for global_batch in range(workers, 40):
        assert LBBSP().first(workers, global_batch) == BSP().first(workers, global_batch)


def test_integers_of_numpy_are_taken_for_what_they_are():
    """A number from an array makes the plan that the plain number makes."""
    numpy = LBBSP(minimum=np.int32(8), multiple_of=np.uint8(4), max_micro_batch=np.int64(6))
    assert numpy.first(2, 40) == LBBSP(minimum=8, multiple_of=4, max_micro_batch=6).first(2, 40)
    assert StaticAllocation(np.array([3, 7])).first(2, 500) == StaticAllocation([3, 7]).first(2, 500)
    assert StaticAllocation(w for w in (3, 7)).weights == (3, 7)


def test_a_policy_is_found_by_name_or_taken_as_it_is():
    assert isinstance(resolve_policy("bsp"), BSP)
    assert isinstance(resolve_policy("lb-bsp"), LBBSP)
    own = StaticAllocation([1])
    assert resolve_policy(own) is own
    assert isinstance(own, Policy)
