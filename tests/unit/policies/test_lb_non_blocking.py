"""LB-BSP's shares in non-blocking rounds: shares, number of micro-batches, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvd_hetero.policies import LBBSP, LBNonBlocking, resolve_policy
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundReport, RoundTable
from hvd_hetero.simulation import BestSplit, Cluster, Compute, Worker, simulate
from hvd_hetero.simulation.variation import Jitter, SlowDown

BATCH = 384


def told(policy: LBNonBlocking, plan: RoundPlan, speeds: list[float], fixed: list[float]) -> FinishedRound:
    """A round of ranks that tell their own speed, of micro-batches of the first plan's size, and fixed cost."""
    nothing = dict.fromkeys(RoundReport.__dataclass_fields__, 0.0)
    rows = [
        RoundReport(**nothing | {"samples": x, "micro_batches": k, "samples_per_s": v, "fixed_samples": b})
        for x, k, v, b in zip(plan.samples, plan.micro_batches, speeds, fixed, strict=True)
    ]
    vectors = [row.vector(rank, len(rows)) for rank, row in enumerate(rows)]
    return FinishedRound(0, 0, plan, RoundTable(np.sum(vectors, axis=0), len(rows)), 1.0)


def run(policy: LBNonBlocking, paces: list[float], fixed: list[float], rounds: int) -> list[RoundPlan]:
    """Ranks of x + β samples at these paces each second; all plans."""
    plans = [policy.first(len(paces), BATCH)]
    size = plans[0].typical_size
    speeds = [u * size / (size + b) for u, b in zip(paces, fixed, strict=True)]
    for _ in range(rounds):
        plans.append(policy.next(plans[-1], told(policy, plans[-1], speeds, fixed)))
    return plans


def test_the_name_gives_the_policy():
    assert isinstance(resolve_policy("lb-non-blocking"), LBNonBlocking)


def test_micro_batches_of_a_rank_have_one_size_and_take_all_ranks_as_long():
    plan = run(LBNonBlocking(micro_batches=8), [300.0, 200.0, 100.0], [0.0] * 3, 3)[-1]
    assert plan.samples == (192, 128, 64)
    assert plan.micro_batches == (8, 8, 8)
    assert plan.ends == "first"


def test_shares_make_room_for_the_fixed_cost_of_a_micro_batch_and_not_of_the_round():
    plan = run(LBNonBlocking(micro_batches=8), [300.0, 100.0], [0.0, 4.0], 3)[-1]
    sizes = [plan.sizes(rank)[0] for rank in range(2)]
    assert sizes[0] / 300 == pytest.approx((sizes[1] + 4) / 100)


@pytest.mark.parametrize(("fixed", "number"), [(0.0, 16), (0.2, 8), (3.0, 4), (40.0, 1)])
def test_the_number_of_micro_batches_saves_what_it_can_at_their_fixed_cost(fixed, number):
    plans = run(LBNonBlocking(), [300.0, 200.0, 100.0], [fixed] * 3, 60)
    assert {plan.micro_batches for plan in plans[40:]} == {(number,) * 3}
    idle = 0.5 - (1 - 2.0**-3) / 3
    cost = sum(max(fixed, 0.0005 * v) for v in (300.0, 200.0, 100.0))  # half a millisecond at least
    lost = {k: cost * k + idle * BATCH / k for k in (1, 2, 4, 8, 16, 32)}
    assert lost[number] <= min(lost.values()) + 0.005 * BATCH


def test_it_begins_with_two_and_stays_eight_rounds_before_there_are_more():
    counts = [plan.micro_batches[0] for plan in run(LBNonBlocking(), [200.0, 200.0], [0.0] * 2, 17)]
    assert counts == [2] * 8 + [4] * 8 + [8] * 2


def test_plans_that_are_fixed_ahead_with_another_number_do_not_count():
    policy = LBNonBlocking()
    old = policy.first(2, BATCH)
    plan = old
    for _ in range(8):
        plan = policy.next(plan, told(policy, old, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (4, 4)
    for _ in range(10):  # the rounds of a lead of ten
        plan = policy.next(plan, told(policy, old, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (4, 4)
    for _ in range(8):
        plan = policy.next(plan, told(policy, plan, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (8, 8)


def test_a_round_has_the_largest_multiple_of_the_number_that_the_global_batch_holds():
    assert LBNonBlocking(micro_batches=8).first(3, 100).samples == (32, 32, 32)


def test_too_small_a_global_batch_is_refused():
    with pytest.raises(ValueError, match=r"global_batch must be at least 24.*got 20"):
        LBNonBlocking(micro_batches=8).first(3, 20)


def test_a_state_of_another_number_of_micro_batches_is_refused():
    policy = LBNonBlocking(micro_batches=8)
    policy.first(2, BATCH)
    state = policy.state_dict() | {"number": 4}
    with pytest.raises(ValueError, match="resume with the ranks, global_batch and micro_batches that saved it"):
        policy.load_state_dict(state)


def scattering(workers: int, variation: Jitter | SlowDown, seed: int = 0) -> Cluster:
    speeds = [400.0 / (1 + i) for i in range(workers)]
    return Cluster(tuple(Worker(Compute.at_speed(v), variation=(variation,)) for v in speeds), seed=seed)


def test_it_loses_less_than_half_of_what_lb_bsp_loses_where_speeds_scatter_from_round_to_round():
    clusters = [scattering(3, Jitter("round", 0.15), seed) for seed in range(8)]
    best, lb, ours = (
        sum(simulate(cluster, make(), BATCH, 150).rate(30) for cluster in clusters)
        for make in (BestSplit, LBBSP, LBNonBlocking)
    )
    assert best - ours < 0.5 * (best - lb)


def test_it_is_faster_than_lb_bsp_by_a_fifth_where_micro_batches_stumble():
    cluster = scattering(3, SlowDown("batch", 4.0, 0.1))
    lb, ours = (simulate(cluster, p, BATCH, 150).rate(30) for p in (LBBSP(), LBNonBlocking()))
    assert ours > 1.2 * lb


def test_ranks_that_stumble_get_more_micro_batches_than_others_at_the_same_fixed_cost():
    policies = [LBNonBlocking(), LBNonBlocking()]
    for policy, stumble in zip(policies, (1.0, 1.6), strict=True):
        plan = policy.first(2, BATCH)
        for number in range(60):
            finished = told(policy, plan, [200.0, 200.0], [2.0, 2.0])
            busy_s = [1.0, 1.0 + (stumble - 1.0) / plan.micro_batches[0]][:: 1 if number % 2 else -1]
            plan = policy.next(plan, replace(finished, table=finished.table.replaced("compute_s", busy_s)))
    assert policies[0].state_dict()["number"] < policies[1].state_dict()["number"]
