"""What survives a change of the ranks: who was there keeps what it knows of itself, and shares are found again."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.elastic import Member, MembershipState
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, LBNonBlocking, NonBlocking, SelfAdaptive
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.session import Session
from hvd_hetero.testing import run_on_threads

GLOBAL_BATCH = 120


class Rank:
    """A process: its speed, and what it remembers."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now = 5.0
        self.membership = MembershipState()
        self.balancer: Balancer


def resume(ranks) -> list[bool]:
    """Let all take up their last commits together; return whether they are the very same ranks, as each says."""
    return run_on_threads(
        lambda n: ranks[n].membership.resume(ranks[n].balancer, wire_of_this_thread(), "t"), len(ranks)
    )


def meet(ranks, policy=LBBSP, global_batch=GLOBAL_BATCH, rounds_ahead=0):
    """A new membership of these processes, in this order; rank 0's common knowledge is everybody's."""
    common = copy.deepcopy(ranks[0].membership.common)
    for number, rank in enumerate(ranks):
        rank.membership.common = common
        rank.balancer = Balancer(policy(), number, len(ranks), global_batch, clock=lambda rank=rank: rank.now)
        rank.balancer.set_rounds_ahead(rounds_ahead)
    resume(ranks)
    plans = {tuple(rank.balancer.plan(ahead) for ahead in range(rounds_ahead + 1)) for rank in ranks}
    assert len(plans) == 1, "all ranks must decide alike"
    return ranks[0].balancer.plan()


def rounds(ranks, count, commit=True):
    for _ in range(count):
        rows = []
        for number, rank in enumerate(ranks):
            plan = rank.balancer.plan()
            sizes = plan.sizes(number)
            for i, size in enumerate(sizes, start=1):
                rank.balancer.begin(MicroBatch(plan, size, i == len(sizes)))
                rank.now += size / rank.speed
                if i < len(sizes):
                    rank.balancer.pause()
            rows.append(rank.balancer.report())
        for rank in ranks:
            rank.balancer.agree(sum(rows))
    if commit:
        for rank in ranks:
            rank.membership.capture(rank.balancer)
    return ranks[0].balancer.plan()


def trained(speeds, policy=LBBSP, **options):
    ranks = [Rank(speed) for speed in speeds]
    meet(ranks, policy, **options)
    rounds(ranks, 20)
    return ranks


def late(plan, ranks):
    """How much later than the best split this one ends."""
    end_s = max(x / rank.speed for x, rank in zip(plan.samples, ranks, strict=True))
    return end_s * sum(rank.speed for rank in ranks) / plan.total - 1


def test_the_first_plan_after_a_loss_is_the_best_for_those_that_are_left():
    a, b, c = trained([300.0, 100.0, 200.0])
    plan = meet([c, a])  # in whatever order they are numbered now
    assert plan.samples == pytest.approx((48, 72), abs=2)
    assert a.balancer.rounds == 20, "rounds are counted on"
    assert rounds([c, a], 10).samples == pytest.approx(plan.samples, abs=2)
    assert b.membership.has_taken_part


@pytest.mark.parametrize("policy", [LBBSP, lambda: LBBSP("ema"), lambda: LBBSP("narx")], ids=["mixture", "ema", "narx"])
def test_within_ten_rounds_of_a_join_the_shares_are_within_5_per_cent_of_the_best(policy):
    a, b = trained([300.0, 100.0], policy)
    newcomer = Rank(200.0)
    plan = meet([a, b, newcomer], policy)
    assert plan.samples == (60, 20, 40), "an equal share for who is not known; the rest by speed"
    assert late(rounds([a, b, newcomer], 10), [a, b, newcomer]) <= 0.05


def test_a_newcomer_begins_with_a_fresh_predictor_and_survivors_with_theirs():
    a, b = trained([300.0, 100.0])
    newcomer = Rank(200.0)
    meet([a, b, newcomer])
    assert [rank.balancer.meter.learner.predictor.rounds > 10 for rank in (a, b, newcomer)] == [True, True, False]
    assert math.isnan(newcomer.balancer.meter.learner.expected())


@pytest.mark.parametrize("policy", [LBBSP, lambda: SelfAdaptive(total=12, every=3), lambda: ElasticBSP(lookahead=4)])
def test_the_very_same_ranks_go_on_as_if_nothing_had_happened(policy):
    ranks = trained([300.0, 100.0], policy)
    undisturbed = rounds(copy.deepcopy(ranks), 5)
    rounds(ranks, 3, commit=False)  # lost
    meet(ranks, policy)
    assert rounds(ranks, 5) == undisturbed


def test_ranks_in_another_order_are_another_membership():
    a, b = trained([300.0, 100.0])
    assert meet([b, a]).samples == (30, 90)


def test_self_adaptive_allocation_takes_up_the_ratio_of_the_survivors():
    a, _, c = trained([300.0, 100.0, 100.0], lambda: SelfAdaptive(total=12, every=4))
    assert meet([a, c], lambda: SelfAdaptive(total=12, every=4)).micro_batches == (9, 3)


def test_elastic_bsp_waits_until_all_speeds_are_known():
    a, b = trained([300.0, 100.0], lambda: ElasticBSP(lookahead=4))
    policy = lambda: ElasticBSP(lookahead=4)  # noqa: E731
    assert meet([a, b, Rank(100.0)], policy).micro_batches == (1, 1, 1)


@pytest.mark.parametrize("policy", [BSP, lambda: NonBlocking(3)], ids=["bsp", "non-blocking"])
def test_policies_that_learn_nothing_begin_as_ever(policy):
    ranks = trained([300.0, 100.0, 100.0], policy)
    assert meet(ranks[:2], policy) == policy().first(2, GLOBAL_BATCH)


def test_after_a_change_of_ranks_shares_go_on_and_the_number_of_micro_batches_is_found_anew():
    """A rank that joins knows no trials, and all must decide alike."""
    a, b, c = ranks = [Rank(speed) for speed in (300.0, 100.0, 200.0)]
    meet(ranks, LBNonBlocking)
    assert rounds(ranks, 8).micro_batches == (4, 4, 4), "a trial"
    plan = meet([c, a], LBNonBlocking)
    assert (plan.micro_batches, plan.ends) == ((1, 1), "first")
    assert plan.samples == pytest.approx((48, 72), abs=2)
    assert rounds([c, a], 8).micro_batches == (4, 4)
    meet([c, a, b], LBNonBlocking)  # it comes back, and knows an old speed
    plan = rounds([c, a, b], 8)
    assert plan.micro_batches == (4, 4, 4)
    assert late(plan, [c, a, b]) <= 0.05


@pytest.mark.parametrize("count", [6, 9, 20])
def test_the_very_same_ranks_go_on_with_their_trials(count):
    def plans(again):
        ranks = [Rank(speed) for speed in (300.0, 100.0)]
        meet(ranks, LBNonBlocking)
        rounds(ranks, count)
        if again:
            meet(ranks, LBNonBlocking)
        return [rounds(ranks, 1) for _ in range(20)]

    undisturbed = plans(again=False)
    assert len({plan.micro_batches for plan in undisturbed}) > 1
    assert plans(again=True) == undisturbed


def test_what_fits_no_memory_is_remembered_by_who_has_found_it_out():
    a, b, c = trained([300.0, 100.0, 200.0])
    c.balancer.meter.memory.failed = 20
    rounds([a, b, c], 1)
    plan = meet([a, c])
    assert max(plan.sizes(1)) <= 20
    assert c.balancer.meter.limit == 20


def test_another_global_batch_and_another_lead_renegotiate():
    ranks = trained([300.0, 100.0])
    assert meet(ranks, global_batch=80).samples == (60, 20)
    ranks = trained([300.0, 100.0])
    assert meet(ranks, rounds_ahead=2).samples == (90, 30)


def test_with_another_predictor_plans_go_on_and_speeds_are_measured_anew(caplog):
    ranks = trained([300.0, 100.0])
    assert meet(ranks, lambda: LBBSP("ema", tolerance=0)).samples == pytest.approx((90, 30), abs=2)
    assert math.isnan(ranks[0].balancer.meter.learner.expected())
    assert "begins to measure its speed again" in caplog.text
    assert rounds(ranks, 10).samples == pytest.approx((90, 30), abs=2)


@pytest.mark.parametrize(("survivors", "same"), [([0, 1, 2], True), ([0, 1], False), ([0], False), ([1, 2], False)])
def test_some_of_the_ranks_are_not_the_same_ranks_whichever_were_lost(survivors, same):
    ranks = trained([300.0, 200.0, 100.0], BSP)
    for rank in ranks:
        rank.membership.capture(rank.balancer)
    left = [ranks[old] for old in survivors]
    for number, rank in enumerate(left):
        rank.balancer = Balancer(BSP(), number, len(left), GLOBAL_BATCH, clock=lambda: 0.0)
    assert resume(left) == [same] * len(left)


def test_before_the_first_commit_there_is_nothing_to_take_up():
    ranks = [Rank(1.0), Rank(2.0)]
    meet(ranks)
    assert ranks[0].balancer.rounds == 0
    assert not ranks[0].membership.has_taken_part


class Broadcast:
    """From rank 0, whose survival is given."""

    def __init__(self, root):
        self.root = root

    def broadcast_object(self, obj, root_rank, name):
        root = self.root
        return copy.deepcopy((root.common, root.cursor, root.mixes, root.resets, root.rates_for))


def test_everybody_has_what_rank_0_has_committed_and_the_same_number_of_resets():
    (rank,) = trained([300.0], BSP)
    rank.membership.capture(rank.balancer, {"cursor": 7}, mixes=True)
    rank.membership.resets = 3
    newcomer = Rank(1.0)
    shared = newcomer.membership.broadcast(Broadcast(rank.membership))
    assert newcomer.membership.common is None, "until all else has been heard, too"
    newcomer.membership.accept(shared)
    assert newcomer.membership.common == rank.membership.common
    assert (newcomer.membership.cursor, newcomer.membership.mixes, newcomer.membership.resets) == (
        {"cursor": 7},
        True,
        3,
    )
    assert not newcomer.membership.has_taken_part


def test_before_the_first_commit_there_is_no_mean_of_models_to_go_on_from():
    rank = Rank(1.0)
    meet([rank], BSP)
    assert not rank.membership.mixes, "there would be none that counts"


def test_the_linear_rule_scales_by_what_was_committed_if_that_is_wanted(caplog):
    (rank,) = trained([300.0], BSP, global_batch=40)
    assert rank.membership.rate_factor(80, scales=True) == 2.0
    assert "the global batch was 40 and is 80 now; learning rates were scaled alike" in caplog.text
    assert rank.membership.rate_factor(80, scales=False) == 1.0
    assert "learning rates stay as they are (scale_learning_rate=True would scale them, too)" in caplog.text
    assert rank.membership.rate_factor(40, scales=True) == 1.0
    assert Rank(1.0).membership.rate_factor(80, scales=True) == 1.0


def test_the_linear_rule_holds_from_the_first_round_on_and_not_from_the_first_commit():
    membership = MembershipState()
    assert membership.rate_factor(40, scales=True) == 1.0
    assert membership.rate_factor(80, scales=True) == 2.0
    assert membership.rate_factor(80, scales=True) == 2.0, "until a commit, what is gone back to are the rates for 40"


def test_speeds_that_are_not_numbers_do_not_disturb_the_renegotiation():
    policy = LBBSP()
    plan = policy.first(3, 90)
    assert policy.renegotiate(plan, [math.nan, math.inf, -1.0]) == plan
    assert policy.renegotiate(plan, [200.0, math.nan, 100.0]).samples == (40, 30, 20)
    assert np.sum(policy.renegotiate(plan, [1e300, 1e-300, 1.0]).samples) == 90


class Values:
    """Horovod's ``ObjectState``, as far as it matters here."""

    def __init__(self, broadcast, rank, **values):
        self._saved_state = values

    def restore(self):
        """Nothing was committed."""


class State(Member, Values):
    """An elastic state of nothing."""

    def _load_parts(self):
        pass


def test_telemetry_that_cannot_be_opened_after_a_reset_ends_alone(tmp_path, monkeypatch, caplog):
    """The table of docs/reliability.md: a file ends no job. Before any reset a wrong path is an error, told at once."""
    monkeypatch.setattr(Session, "resumes", False)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run.jsonl"
    with pytest.raises(OSError, match="folder"):
        Session("bsp", 0, 1, 8, path)
    State(copy.deepcopy, lambda: 0).reset()
    training = Session("bsp", 0, 1, 8, path)
    training.close()
    assert [record.getMessage()[:42] for record in caplog.records] == ["telemetry ends here, training goes on: can"]
