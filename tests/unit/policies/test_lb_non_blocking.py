"""LB-BSP's shares in non-blocking rounds: shares, number of micro-batches, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hvd_hetero.columns import COLUMNS
from hvd_hetero.policies import LBBSP, LBNonBlocking, resolve_policy
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundReport, RoundTable
from hvd_hetero.tools.simulation import BestSplit, Cluster, Compute, RoundSimulation, Worker, simulate
from hvd_hetero.tools.simulation.variation import Jitter, RandomSlowDown, Recorded

BATCH = 384


def told(plan: RoundPlan, speeds: list[float], fixed: list[float], **figures: float) -> FinishedRound:
    """A round of ranks that tell their own speed, of micro-batches of the first plan's size, and fixed cost."""
    nothing = dict.fromkeys(COLUMNS, 0.0) | figures
    rows = []
    for x, k, v, b in zip(plan.samples, plan.micro_batches, speeds, fixed, strict=True):
        busy_s = (x + k * b) / (v * (1 + b / (BATCH / len(speeds))))
        mine = {"samples": x, "micro_batches": k, "samples_per_s": v, "fixed_samples": b, "compute_s": busy_s}
        mine["timed_samples"] = x
        rows.append(RoundReport(**nothing | mine))
    vectors = [row.vector(rank, len(rows)) for rank, row in enumerate(rows)]
    return FinishedRound(0, 0, plan, RoundTable(np.sum(vectors, axis=0), len(rows)), 1.0)


def run(policy: LBNonBlocking, paces: list[float], fixed: list[float], rounds: int) -> list[RoundPlan]:
    """Ranks of x + β samples at these paces each second; all plans."""
    plans = [policy.first(len(paces), BATCH)]
    size = plans[0].typical_size
    speeds = [u * size / (size + b) for u, b in zip(paces, fixed, strict=True)]
    for _ in range(rounds):
        plans.append(policy.next(plans[-1], told(plans[-1], speeds, fixed)))
    return plans


def test_the_name_gives_the_policy():
    assert isinstance(resolve_policy("lb-non-blocking"), LBNonBlocking)


def test_micro_batches_of_a_rank_have_one_size_and_take_all_ranks_as_long():
    plan = run(LBNonBlocking(micro_batches=8), [300.0, 200.0, 100.0], [0.0] * 3, 8)[-1]
    assert plan.samples == (192, 128, 64)
    assert plan.micro_batches == (8, 8, 8)
    assert plan.ends == "first"


def test_shares_make_room_for_the_fixed_cost_of_a_micro_batch_and_not_of_the_round():
    plan = run(LBNonBlocking(micro_batches=8), [300.0, 100.0], [0.0, 4.0], 8)[-1]
    sizes = [plan.sizes(rank)[0] for rank in range(2)]
    assert sizes[0] / 300 == pytest.approx((sizes[1] + 4) / 100)


def counts(plans: list[RoundPlan]) -> list[int]:
    return [plan.micro_batches[0] for plan in plans]


def test_it_begins_with_one_and_leaves_out_two():
    assert counts(run(LBNonBlocking(), [200.0, 200.0], [0.0] * 2, 24)) == [1] * 8 + [4] * 8 + [8] * 8 + [16]


@pytest.mark.parametrize(("share", "numbers"), [(1, {1}), (6, {1, 3}), (18, {1, 4, 8})])
def test_micro_batches_hold_two_samples_in_the_mean_at_least(share, numbers):
    cluster = Cluster(tuple(Worker(Compute.at_speed(100.0), variation=(Jitter("round", 0.3),)) for _ in range(3)))
    seen = set()
    simulate(cluster, LBNonBlocking(), 3 * share, 150, observer=lambda done: seen.update(done.plan.micro_batches))
    assert seen == numbers


@pytest.mark.parametrize(
    ("fixed_s", "variation", "least", "most"),
    [
        (0.0, Jitter("round", 0.15), 4, 64),
        (0.0005, Jitter("round", 0.15), 4, 16),
        (0.064, Jitter("round", 0.15), 1, 1),
        (0.0005, RandomSlowDown("batch", 4.0, 0.1), 4, 32),
    ],
    ids=["nothing", "little", "half of a step", "little, with stumbles"],
)
def test_micro_batches_are_as_many_as_their_cost_and_the_scatter_of_times_make_fastest(fixed_s, variation, least, most):
    workers = tuple(Worker(Compute(0.001 * (1 + i), fixed_s * (1 + i)), variation=(variation,)) for i in range(3))
    seen = []
    simulate(Cluster(workers), LBNonBlocking(), BATCH, 300, observer=lambda done: seen.append(done.plan))
    late = counts(seen)[120:]
    assert sum(least <= number <= most for number in late) > 0.7 * len(late)


def test_in_a_trial_and_two_rounds_after_it_shares_keep_their_proportions():
    policy = LBNonBlocking()
    plans = [policy.first(2, BATCH)]
    for number in range(19):
        speeds = [300.0, 100.0] if number >= 8 else [200.0, 200.0]
        plans.append(policy.next(plans[-1], told(plans[-1], speeds, [0.0] * 2)))
    assert counts(plans) == [1] * 8 + [4] * 8 + [1] * 4
    assert {plan.samples for plan in plans[:19]} == {(192, 192)}
    assert plans[19].samples == (240, 144), "as far as measurements reach"


def test_transfers_belong_to_what_a_round_takes():
    """Rounds of four leave samples undone and pay for the same transfer."""

    def trial(transfer_s):
        policy = LBNonBlocking()
        plan = policy.first(2, BATCH)
        for _ in range(16):
            finished = told(plan, [200.0] * 2, [0.0] * 2, wait_s=transfer_s)
            if plan.micro_batches == (4, 4):  # a tenth sooner, with a seventh of the samples undone
                table = finished.table.replaced("compute_s", finished.table.column("compute_s") * 0.8)
                finished = replace(finished, table=table.replaced("samples", [165.0, 165.0]))
            plan = policy.next(plan, finished)
        return plan.micro_batches[0]

    assert trial(0.0) == 8, "4 was better than 1, so its other neighbour is next"
    assert trial(3.0) == 1


def test_rounds_that_were_planned_before_the_number_changed_do_not_count():
    policy = LBNonBlocking()
    old = policy.first(2, BATCH)
    plan = old
    for _ in range(8):
        plan = policy.next(plan, told(old, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (4, 4)
    for _ in range(10):  # the rounds of a lead of ten
        plan = policy.next(plan, told(old, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (4, 4)
    for _ in range(8):
        plan = policy.next(plan, told(plan, [200.0] * 2, [0.0] * 2))
    assert plan.micro_batches == (8, 8)


@pytest.mark.parametrize(
    ("figure", "absurd", "number"),
    [
        *(
            ("compute_s", absurd, 4) for absurd in (float("nan"), float("inf"), -1.0, 1e200)
        ),  # every second round counts
        *(("wait_s", absurd, 8) for absurd in (float("nan"), -1.0)),  # a round counts without it
        *(("wait_s", absurd, 1) for absurd in (float("inf"), 1e200)),  # no round counts
    ],
)
def test_a_time_that_cannot_be_true_decides_nothing(figure, absurd, number):
    policy = LBNonBlocking()
    plan = policy.first(2, BATCH)
    for round in range(16):
        finished = told(plan, [200.0] * 2, [0.0] * 2)
        if figure == "wait_s" or round % 2:
            finished = replace(finished, table=finished.table.replaced(figure, [absurd, absurd]))
        plan = policy.next(plan, finished)
    assert plan.micro_batches == (number, number)
    json.dumps(policy.state_dict(), allow_nan=False)


def test_where_memory_cuts_every_share_the_number_is_at_least_theirs():
    """Else 4 would be tried in place of 1, find the same rounds, and larger numbers would never be tried."""
    policy, limit = LBNonBlocking(), np.full(2, 20.0)
    plan = policy.first(2, BATCH).within(limit)
    assert plan.micro_batches == (10, 10)
    plan = policy.next(plan, told(plan, [200.0] * 2, [0.0] * 2, limit=20.0))
    assert plan.micro_batches == (8, 8)
    assert plan.within(limit).micro_batches == (10, 10)


def test_where_memory_cuts_some_shares_rounds_count():
    policy, limits = LBNonBlocking(), np.array([0.0, 50.0])
    plan = policy.first(2, BATCH).within(limits)
    for _ in range(8):
        finished = told(plan, [200.0] * 2, [0.0] * 2)
        plan = policy.next(plan, replace(finished, table=finished.table.replaced("limit", limits))).within(limits)
    assert plan.micro_batches == (4, 4)


def test_a_round_has_the_largest_multiple_of_the_number_that_the_global_batch_holds():
    assert LBNonBlocking(micro_batches=8).first(3, 100).samples == (32, 32, 32)


def test_too_small_a_global_batch_is_refused():
    with pytest.raises(ValueError, match=r"global_batch.* 24\b.* 20\b"):
        LBNonBlocking(micro_batches=8).first(3, 20)


def test_a_state_of_other_numbers_of_micro_batches_is_refused():
    chosen, fixed = LBNonBlocking(), LBNonBlocking(micro_batches=8)
    for policy in (chosen, fixed):
        policy.first(2, BATCH)
    for policy, other in ((chosen, fixed), (fixed, chosen)):
        with pytest.raises(ValueError, match=r"state.*resume.*micro_batches"):
            policy.load_state_dict(other.state_dict())


def test_a_restored_policy_goes_on_with_the_number_and_the_trials():
    cluster = scattering(3, RandomSlowDown("batch", 4.0, 0.1))
    run = RoundSimulation(cluster, LBNonBlocking(), BATCH)
    run.run(100)
    policy = run.policy
    other = LBNonBlocking()
    other.first(3, BATCH)
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    plan = RoundPlan.of([192, 128, 64])
    assert policy.renegotiate(plan, [3.0, 2.0, 1.0]) == other.renegotiate(plan, [3.0, 2.0, 1.0])
    assert other.renegotiate(plan, [3.0, 2.0, 1.0]).micro_batches[0] > 1
    assert other.state_dict() == policy.state_dict()


def scattering(workers: int, variation: Jitter | RandomSlowDown, seed: int = 0) -> Cluster:
    speeds = [400.0 / (1 + i) for i in range(workers)]
    return Cluster(tuple(Worker(Compute.at_speed(v), variation=(variation,)) for v in speeds), seed=seed)


def test_it_loses_less_than_half_of_what_lb_bsp_loses_where_speeds_scatter_from_round_to_round():
    clusters = [scattering(3, Jitter("round", 0.15), seed) for seed in range(2)]
    best, lb, ours = (
        sum(simulate(cluster, make(), BATCH, 150).rate(30) for cluster in clusters)
        for make in (BestSplit, LBBSP, LBNonBlocking)
    )
    assert best - ours < 0.5 * (best - lb)


def test_it_is_faster_than_lb_bsp_by_a_fifth_where_micro_batches_stumble():
    cluster = scattering(3, RandomSlowDown("batch", 4.0, 0.1))
    lb, ours = (simulate(cluster, p, BATCH, 150).rate(30) for p in (LBBSP(), LBNonBlocking()))
    assert ours > 1.2 * lb


@pytest.mark.parametrize("number", [None, 8])
def test_after_a_freeze_the_share_of_a_rank_comes_back_within_twenty_rounds(number):
    frozen = Recorded("round", (1.0,) * 40 + (50.0,) + (1.0,) * 200)
    workers = (Worker(Compute.at_speed(200.0)), Worker(Compute.at_speed(200.0), variation=(frozen,)))
    shares = []

    def note(done: FinishedRound) -> None:
        shares.append(done.plan.samples[1] / done.plan.total)

    simulate(Cluster(workers), LBNonBlocking(micro_batches=number), BATCH, 61, observer=note)
    if number is not None:  # else it is the turn of another number, and shares stay
        assert min(shares[41:50]) < 0.45
    assert shares[-1] == pytest.approx(0.5, abs=0.02)
