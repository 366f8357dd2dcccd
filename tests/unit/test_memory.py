"""Bounds of memory: said, learned from a gauge, and what shares come of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from late_jobs import Job

from hvd_hetero.balancer import Balancer
from hvd_hetero.bounds import Room, bounds_array, bounds_of_ranks
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.measurement.memory import MemoryMeter
from hvd_hetero.planner import Planner
from hvd_hetero.policies import BSP, LBBSP, Goodput, NonBlocking, StaticAllocation
from hvd_hetero.rounds import FinishedRound, MicroBatch, RoundPlan, RoundReport, RoundTable

GIB = 2.0**30


def best(speeds, heads, most, total):
    """The least time of the latest rank over all splits that fit, by brute force."""
    splits = itertools.product(*(range(1, min(int(m), total) + 1) for m in most[:-1]))
    rest = ((*split, total - sum(split)) for split in splits)
    return min(
        max((x + h) / u for x, h, u in zip(split, heads, speeds, strict=True))
        for split in rest
        if 1 <= split[-1] <= most[-1]
    )


def unbounded(speeds, heads, total):
    """The real-valued split in which all end together, in integers."""
    level = (total + sum(heads)) / sum(speeds)
    shares = [max(int(u * level - h), 1) for u, h in zip(speeds, heads, strict=True)]
    shares[int(np.argmax(speeds))] += total - sum(shares)
    return RoundPlan.of(shares)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_left_of_a_capped_share_goes_where_it_delays_least(seed):
    dice = np.random.default_rng(seed)
    workers, total = int(dice.integers(2, 4)), int(dice.integers(24, 40))
    speeds, heads = dice.uniform(1.0, 4.0, workers), dice.uniform(0.0, 3.0, workers) * (seed % 2)
    most = dice.integers(total // workers // 2, total, workers)
    most[-1] = max(most[-1], total - most[:-1].sum())
    plan = unbounded(speeds, heads, total).capped(most, heads)
    assert plan.total == total
    assert (plan.shares <= most).all()
    latest = max((plan.shares + heads) / speeds)
    assert latest <= best(speeds, heads, most, total) + 1.0 / speeds.min(), "but for a sample"


def test_a_share_is_capped_and_keeps_to_its_multiple():
    assert RoundPlan.of([48, 16]).capped(np.array([30, 64])).samples == (30, 34)
    assert RoundPlan.of([48, 16]).capped(np.array([30, 64]), multiple_of=8).samples == (24, 40)
    assert RoundPlan.of([48, 16]).capped(np.array([20, 10])).samples == (43, 21), "in proportion, where nobody can"
    assert RoundPlan.of([0, 12]).capped(np.array([9, 8])).samples == (4, 8), "a rank that rests has room"
    plan = RoundPlan.of([4, 4])
    assert plan.capped(np.array([4, 9])) is plan


@pytest.mark.parametrize("policy", [BSP, LBBSP, lambda **more: StaticAllocation([1, 1], **more)])
def test_bounds_of_each_rank_cap_shares_where_all_do_equally_many_micro_batches(policy):
    planner = Planner(policy(max_micro_batch=[40, 24]), 2, 60)
    assert planner.plan().micro_batches == (1, 2), "where each accumulates as it needs"
    planner.require_equal_counts(1)
    assert planner.plan().samples == (36, 24)
    with pytest.raises(
        ValueError, match=r"global_batch=70 .*rank 0: 40, rank 1: 24\).*global_batch=64 .*micro_batches=2"
    ):
        Planner(policy(max_micro_batch=[40, 24]), 2, 70).require_equal_counts(1)
    planner = Planner(policy(max_micro_batch=[40, 24]), 2, 70)
    planner.require_equal_counts(1, exactly=False)
    assert planner.plan().samples == (35, 35), "two micro-batches each"


def test_bounds_are_resolved_by_the_names_of_devices(caplog):
    assert bounds_array(bounds_of_ranks("b", {"small": 24}, 2, ["large", "small"]), 2).tolist() == [2**24, 24]
    assert bounds_array(bounds_of_ranks("b", 7, 2), 2).tolist() == [7, 7]
    assert bounds_of_ranks("max_micro_batch", {"smal": 24}, 2, ["large", "small"], logs=True) == (2**24, 2**24)
    assert "max_micro_batch names ['smal'], which no rank has; the devices are ['large', 'small']" in caplog.text
    with pytest.raises(ValueError, match=r"max_micro_batch must hold one bound for each of 3 ranks, got 2: \[4, 8\]"):
        Planner(BSP(max_micro_batch=[4, 8]), 3, 12)
    with pytest.raises(ValueError, match="by the names of devices is for PyTorch"):
        Planner(BSP(max_micro_batch={"gpu": 8}), 2, 12)
    with pytest.raises(ValueError, match=r"max_micro_batch\['small'\] must be at least 1, got 0"):
        BSP(max_micro_batch={"small": 0})


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize(("samples", "rounds"), [(51, [12, 12, 12, 11, 4]), (49, [12, 12, 12, 9, 4]), (48, [12] * 4)])
def test_a_remainder_that_memory_does_not_hold_besides_is_a_round_of_its_own(samples, rounds, exactly):
    from hvd_hetero.data.cutter import Cutter

    planner = Planner(BSP(max_micro_batch=3), 2, 12)
    cutters = [Cutter(SharedPermutation(samples), planner, rank) for rank in range(2)]
    planner.require_equal_counts(2, exactly=exactly)
    assert cutters[0].rounds_of(samples) == len(rounds)
    done, visited = [], []
    for cutter in cutters:
        cutter.begin()
    while cutters[0].more:
        cuts = [cutter.cut() for cutter in cutters]
        for cut, cutter in zip(cuts, cutters, strict=True):
            assert [work.samples <= 3 for work in cut.micro_batches()] == [True, True]
            visited += list(cut.part)
            cutter.finish_as_planned()
        done.append(sum(cut.samples for cut in cuts))
    assert done == rounds
    assert sorted(visited) == list(range(samples))


class Gauge:
    """A device of so many GiB, of whose samples each kind of model takes more or less."""

    others, others_until = 0.5, math.inf
    """GiB of another tenant, from round 5 on until this one."""

    def __init__(self, kind, size, balancer, seed):
        self.kind, self.size, self.balancer = kind, size * GIB, balancer
        self.dice = np.random.default_rng(seed)
        self.rounds = 0

    def needs(self, x):
        x = float(x)
        base, each = 1.0, 0.45
        gib = {
            "a line": base + each * x,
            "noise": (base + each * x) * (1.0 + 0.02 * self.dice.uniform(-1.0, 1.0)),
            "steps": base + each * 4 * math.ceil(x / 4),
            "a large model": 5.0 + 0.25 * x,
            "nothing but samples": 0.5 * x,
            "attention": base + 0.2 * x + 0.008 * x * x,
            "a workspace": base + 0.4 * x + (1.0 if x >= 22 else 0.0),
            "another tenant": base + each * x,
            "a leak": base + each * x + 0.0002 * self.rounds,
            "flat at first": base + each * max(x, 8.0),
        }[self.kind]
        return gib * GIB

    def reset(self):
        self.rounds = self.balancer.rounds

    def peak(self):
        self.rounds = self.balancer.rounds
        return self.needs(self.balancer.work.samples)

    def available(self):
        there = self.kind == "another tenant" and 5 <= self.rounds < self.others_until
        return self.size - (self.others * GIB if there else 0.0)


KINDS = [
    "a line", "noise", "steps", "a large model", "nothing but samples", "attention", "a workspace", "another tenant",
    "a leak", "flat at first",
]  # fmt: skip


def trained(policy, kind, speeds, sizes, total, rounds=80, first=True, seed=1):
    """Ranks in simulated time; raises where one needs more memory than there is."""
    job = Job(policy, speeds, total)
    for rank, (balancer, size) in enumerate(zip(job.balancers, sizes, strict=True)):
        balancer.meter.memory.gauge = Gauge(kind, size, balancer, seed + rank)
        balancer.planner.require_equal_counts(1, exactly=False)
        if first:
            balancer.planner.begin_by_memory([size * GIB for size in sizes])
    for number in range(rounds):
        plan = job.balancers[0].plan()
        assert {balancer.plan() for balancer in job.balancers} == {plan}
        for rank, balancer in enumerate(job.balancers):
            gauge = balancer.meter.memory.gauge
            needs = gauge.needs(plan.samples[rank])
            assert needs <= gauge.available(), f"round {number}: rank {rank} is out of memory, {plan.samples}"
        job.round()
    return job


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speeds", [[100.0, 100.0], [100.0, 200.0], [200.0, 100.0]], ids=str)
@pytest.mark.parametrize("policy", [LBBSP, lambda: LBBSP(device="gpu")], ids=["cpu", "gpu"])
def test_ranks_keep_to_memory_before_anything_fails_and_take_the_best_split_that_fits(kind, speeds, policy):
    total, sizes = 56, [24.0, 12.0]
    job = trained(policy, kind, speeds, sizes, total)
    shares = job.balancers[0].plan().shares
    fits = []
    for balancer in job.balancers:
        gauge = balancer.meter.memory.gauge
        fits.append(max(x for x in range(1, total) if gauge.needs(x) <= 0.9 * gauge.available()))
    latest = max(x / u for x, u in zip(shares, speeds, strict=True))
    assert (shares <= np.array(fits) + 1).all()
    assert latest <= 1.08 * best(speeds, [0.0, 0.0], fits, total)
    assert max(balancer.meter.memory.bound for balancer in job.balancers) > 0


@pytest.mark.parametrize("policy", [BSP, lambda: StaticAllocation([1, 1]), LBBSP])
def test_shares_return_once_another_tenant_has_left_the_card(policy, monkeypatch):
    monkeypatch.setattr(Gauge, "others", 13.5)
    crowded = trained(policy, "another tenant", [100.0, 100.0], [60.0, 24.0], 40, first=False)
    assert crowded.balancers[0].plan().samples[1] == int((0.9 * (24.0 - 13.5) - 1.0) / 0.45)
    monkeypatch.setattr(Gauge, "others_until", 40)
    alone = trained(policy, "another tenant", [100.0, 100.0], [60.0, 24.0], 40, first=False)
    assert alone.balancers[0].plan().samples == (20, 20)


def test_the_line_is_learned_within_a_few_per_cent_of_where_memory_ends():
    job = trained(lambda: LBBSP(device="gpu"), "noise", [100.0, 200.0], [40.0, 30.0], 80)
    memory = job.balancers[1].meter.memory
    ends = (0.9 * 30.0 - 1.0) / 0.45
    assert memory.base + memory.slope * ends == pytest.approx(0.9 * 30.0 * GIB, rel=0.05)
    assert memory.slope == pytest.approx(0.45 * GIB, rel=0.1)
    assert memory.bound == pytest.approx(ends, rel=0.1)
    row = job.finished[-1].table
    assert row.column("memory_slope_mib") == pytest.approx([0.45 * 1024] * 2, rel=0.1)
    assert row.column("limit")[1] == memory.bound


@pytest.mark.parametrize(
    ("sizes", "shares"), [((24.0, 12.0), (40, 20)), ((24.0, 24.0), (31, 30)), ((24.0, 0.0), (31, 30))]
)
def test_the_first_split_is_by_memory_where_that_is_less_than_an_equal_share(sizes, shares):
    planner = Planner(LBBSP(), 2, sum(shares))
    planner.begin_by_memory(sizes)
    assert planner.plan().samples == shares
    planner = Planner(BSP(), 2, 60)
    planner.begin_by_memory(sizes)
    assert planner.plan().samples == (30, 30), "which stay, as the policy says"


@pytest.mark.parametrize("policy", [LBBSP, lambda: LBBSP(device="gpu")], ids=["cpu", "gpu"])
def test_with_memory_to_spare_shares_grow_by_a_quarter_at_a_time_and_are_never_cut(policy):
    def plans(gib):
        job = Job(policy, [300.0, 100.0], 64, fixed_s=0.05)
        for balancer in job.balancers if gib else ():
            balancer.meter.memory.gauge = Gauge("a line", gib, balancer, 0)
        made = []
        for _ in range(70):
            made.append(job.balancers[0].plan())
            job.round()
        return made

    measured = plans(1000.0)
    assert measured[-1] == plans(0)[-1]
    assert {plan.micro_batches for plan in measured} == {(1, 1)}
    shares = np.array([plan.shares for plan in measured])
    assert (shares[1:] <= np.maximum.accumulate(shares)[:-1] * 1.25 + 1).all()


def test_what_is_said_holds_where_memory_that_ended_leaves_too_little_room_for_a_round():
    room = Room(bounds_array([3, 3], 2), least=2)
    room.hold([3, 2])
    assert room.bounded(RoundPlan.of([7, 5])).samples == (6, 6)
    assert room.bounded(RoundPlan.of([6, 4])).samples == (6, 4)


def test_a_global_batch_that_adapts_grows_as_far_as_ranks_hold_it():
    planner = Planner(BSP(), 2, Goodput(start=16, least=16, most=64))
    planner.require_equal_counts(1, exactly=False)
    assert planner.goodput.chosen(16, (1e6, 1e6), lambda total: 1.0) == 32, "twice as many at most"
    planner.room.hold([18, 13])
    planner.goodput.fits = planner.room.most_held(16)
    assert 16 < planner.goodput.chosen(16, (1e6, 1e6), lambda total: 1.0) <= 31


def agreed(planner, limits):
    """Let all ranks have done the plan, and say what they hold."""
    plan = planner.plan()
    rows = [RoundReport(samples=plan.samples[rank], limit=of).vector(rank, 2) for rank, of in enumerate(limits)]
    planner.learn(FinishedRound(planner.rounds, 0, plan, RoundTable(sum(rows), 2), 1.0))
    return planner.plan()


@pytest.mark.parametrize(
    ("policy", "counts"), [(NonBlocking(2), [(2, 2), (2, 4), (2, 2)]), (LBBSP(), [(1, 1), (1, 4), (1, 1)])]
)
def test_a_bound_that_falls_and_rises_again_cuts_shares_only_meanwhile(policy, counts):
    planner = Planner(policy, 2, 24)
    assert [agreed(planner, limits).micro_batches for limits in ((0, 0), (0, 3), (0, 0))] == counts


@pytest.mark.parametrize(("limits", "total"), [((18, 13), 24), ((40, 40), 48), ((9, 6), 16)])
def test_a_global_batch_that_adapts_falls_where_ranks_no_longer_hold_it(limits, total):
    planner = Planner(BSP(), 2, Goodput(start=48, least=16, most=64))
    planner.require_equal_counts(1, exactly=False)
    assert agreed(planner, limits).total == total


@pytest.mark.parametrize("least", [1, 2])
def test_a_global_batch_that_adapts_stays_where_its_rounds_need_more_micro_batches_by_what_is_said(least):
    planner = Planner(BSP(max_micro_batch=8), 2, Goodput(start=32, least=16, most=64))
    planner.require_equal_counts(least, exactly=False)
    assert agreed(planner, (8, 8)).total == 32
    assert planner.goodput.chosen(32, (1e6, 1e6), lambda total: 1.0) == 64
    assert agreed(planner, (8, 4)).total == 24, "the largest that two micro-batches of each hold"


def test_what_was_learned_of_a_card_holds_in_another_job_on_the_same_cards_alone():
    def job(*cards):
        return [Balancer(LBBSP(), rank, 2, 60, clock=lambda: 0.0, devices=cards) for rank in range(2)]

    before = job("large", "small")
    memory = before[1].meter.memory
    memory.gauge, memory.share = Gauge("a line", 12.0, before[1], 0), 0.9
    for size in (8, 16):
        before[1].begin(MicroBatch(RoundPlan.of([60 - size, size]), size))
        memory.done(warm=True)
        before[1].discard_round()
    holds = int((0.9 * 12.0 - 1.0) / 0.45)
    assert memory.learned == holds
    before[1].planner._plans[0] = RoundPlan.of([40, 20])
    state = before[1].state_dict()
    for cards, learned, shares in ((("large", "small"), holds, (40, 20)), (("large", "large"), 0, (30, 30))):
        after = job(*cards)[1]
        after.load_state_dict(state)
        assert (after.meter.memory.learned, after.plan().samples) == (learned, shares)


def test_the_ranks_that_are_left_begin_within_what_they_have_learned():
    job = trained(LBBSP, "a line", [100.0] * 3, [24.0, 24.0, 12.0], 60)
    states = [balancer.state_dict() for balancer in job.balancers[1:]]
    left = Job(LBBSP, [100.0, 100.0], 60).balancers
    for balancer, state in zip(left, states, strict=True):
        balancer.planner.require_equal_counts(1)
        balancer.meter.load_state_dict(state["pace"])
    prospects = [(balancer.meter.learner.expected(), balancer.meter.limit) for balancer in left]
    for balancer in left:
        balancer.resume(states[0], prospects, same_ranks=False)
        assert balancer.plan().samples[1] <= (0.9 * 12.0 - 1.0) / 0.45 < 30


def test_a_new_membership_begins_within_what_is_said_and_what_ranks_hold():
    planner = Planner(LBBSP(max_micro_batch=[40, 24]), 2, 60)
    planner.require_equal_counts(1)
    state = planner.state_dict()
    planner.renegotiate(state, [100.0, 300.0], [0, 22])
    assert planner.plan().samples == (38, 22)
    planner.require_equal_counts(1)
    assert planner.plan().samples == (38, 22)


def test_bounds_that_allow_less_than_a_round_share_it_in_their_proportion():
    job = Job(LBBSP, [100.0, 100.0], 60)
    for balancer, bound in zip(job.balancers, [30, 15], strict=True):
        balancer.meter.memory.failed = bound
        balancer.planner.require_equal_counts(1, exactly=False)
    for _ in range(4):
        job.round()
    assert job.balancers[0].plan().samples == (40, 20)


def test_what_is_said_and_what_has_failed_bound_together():
    memory = MemoryMeter()
    assert memory.bound == memory.learned == 0
    memory.user_bound = 50
    assert (memory.bound, memory.learned) == (50, 0)
    memory.fail(40)
    assert (memory.bound, memory.learned) == (36, 36)
    memory.begin(8.0)
    memory.done(warm=True)
    assert memory.row()["limit"] == 36, "without a gauge nothing is measured"
    other = MemoryMeter()
    other.load_state_dict(memory.state_dict())
    assert other.learned == 36


def test_an_error_that_cannot_be_survived_names_rank_moment_size_line_and_bound():
    balancer = Job(BSP, [100.0, 100.0], 60).balancers[1]
    balancer.begin(MicroBatch(balancer.plan(), 30))
    message = (
        "round 0: rank 1 ran out of memory in a backward pass; set max_micro_batch of the policy below 30, or free "
    )
    assert str(balancer.out_of_memory_error("in a backward pass")) == f"{message}memory"
    memory = balancer.meter.memory
    memory.base, memory.slope, memory.failed = 3.0 * GIB, 0.25 * GIB, 21
    line = "memory. A micro-batch of x samples takes 3072 + 256 x MiB on this rank, so 21 fit"
    assert str(balancer.out_of_memory_error("in a backward pass")) == message + line
