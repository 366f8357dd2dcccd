"""The state machine of a round, driven by hand: two balancers, a fake clock, and a sum instead of Horovod."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from hvd_hetero.balancer import Balancer
from hvd_hetero.consistency import WatchedParameter
from hvd_hetero.errors import HeteroError, PlanMismatchError, RoundStateError
from hvd_hetero.policies import BSP, LBBSP, NonBlocking
from hvd_hetero.rounds import FinishedRound, MicroBatch, RoundPlan


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Ranks whose speed in samples per second is given; they work one after the other on one clock each."""

    def __init__(self, policy, speeds, global_batch, **options) -> None:
        self.clocks = [Clock() for _ in speeds]
        self.speeds = speeds
        self.finished: list[FinishedRound] = []
        self.balancers = [
            Balancer(policy, rank, len(speeds), global_batch, clock=clock, **options)
            for rank, clock in enumerate(self.clocks)
        ]
        self.balancers[0].observer = self.finished.append

    def round(self, input_s: float = 0.0, used: dict[int, int] | None = None) -> list[float]:
        vectors = []
        for rank, (balancer, clock) in enumerate(zip(self.balancers, self.clocks, strict=True)):
            plan = balancer.plan()
            sizes = (used[rank],) if used and rank in used else plan.sizes(rank) or (0,)
            for i, size in enumerate(sizes, start=1):
                balancer.begin(MicroBatch(plan, size, i == len(sizes)), input_s)
                clock.now += size / self.speeds[rank]
                if i < len(sizes):
                    balancer.pause()
            vectors.append(balancer.report())
        end = max(clock.now for clock in self.clocks) + 0.01
        for clock in self.clocks:
            clock.now = end
        return [balancer.agree(sum(vectors)) for balancer in self.balancers]


def test_all_ranks_hold_the_same_plans_and_reach_equal_times():
    job = Job(LBBSP(), [300.0, 100.0, 200.0], 120)
    for _ in range(12):
        job.round()
        assert len({balancer.plan() for balancer in job.balancers}) == 1
    assert job.balancers[0].plan().samples == pytest.approx((60, 20, 40), abs=2)
    assert job.finished[-1].table.busy_s.max() < 1.03 * 0.2


def test_computing_is_timed_without_waiting_and_waiting_is_told_one_round_later():
    job = Job(BSP(), [200.0, 100.0], 100)
    job.round()
    job.round()
    table = job.finished[1].table
    assert table.column("compute_s") == pytest.approx([0.25, 0.5])
    assert table.column("wait_s") == pytest.approx([0.26, 0.01])
    assert np.isnan(job.finished[0].table.column("wait_s")).all()
    assert job.finished[1].elapsed_s == pytest.approx(0.51)


def test_waiting_for_others_inside_a_micro_batch_is_waiting_and_not_computing():
    """A layer that talks to other ranks keeps the fast one waiting until the slow one is there."""
    job = Job(LBBSP("memoryless", tolerance=0.0), [200.0, 100.0], 120)
    for _ in range(3):
        vectors = []
        plan = job.balancers[0].plan()
        forward_s = [x / speed / 2 for x, speed in zip(plan.samples, job.speeds, strict=True)]
        for balancer, clock, mine_s, x in zip(job.balancers, job.clocks, forward_s, plan.samples, strict=True):
            balancer.begin(MicroBatch(plan, x))
            clock.now += mine_s
            with balancer.meter.waiting_for_others():
                clock.now += max(forward_s) - mine_s + 0.0625
            clock.now += mine_s  # backward
            vectors.append(balancer.report())
            with balancer.meter.waiting_for_others():  # the micro-batch is over: it is waiting as it is
                clock.now += 0.03125
        end = max(clock.now for clock in job.clocks)
        for clock in job.clocks:
            clock.now = end
        for balancer in job.balancers:
            balancer.agree(sum(vectors))
    assert [f.plan.samples for f in job.finished] == [(60, 60), (60, 60), (80, 40)], "after the round of warming up"
    table = job.finished[2].table
    assert table.column("compute_s") == pytest.approx([0.4, 0.4])
    assert table.column("wait_s") == pytest.approx([0.3 + 0.09375, 0.09375]), "of the round before"


def test_a_micro_batch_that_failed_takes_its_waiting_along():
    clock = Clock()
    balancer = Balancer(BSP(), 0, 1, 8, clock=clock)
    tables = []
    balancer.observer = lambda finished: tables.append(finished.table)
    for fails in (True, False):
        if fails:
            balancer.begin(MicroBatch(balancer.plan(), 8))
            with balancer.meter.waiting_for_others():
                clock.now += 8.0
            balancer.out_of_memory()
        balancer.begin(MicroBatch(balancer.plan(), 8))
        clock.now += 1.0
        vector = balancer.report()
        clock.now += 0.5
        balancer.agree(vector)
    assert tables[1].figures("wait_s") == [0.5]
    assert [t.figures("compute_s") for t in tables] == [[1.0], [1.0]]


@pytest.mark.parametrize(("in_layers_s", "transfer_s"), [(0.0, 0.5), (0.25, float("nan"))])
def test_the_transfer_to_come_is_the_shortest_wait_before_unless_layers_waited_too(in_layers_s, transfer_s):
    clock = Clock()
    balancer = Balancer(BSP(), 0, 1, 8, clock=clock)
    for _ in range(3):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        with balancer.meter.waiting_for_others():
            clock.now += in_layers_s
        clock.now += 1.0
        vector = balancer.report()
        expected = balancer.waiting()
        clock.now += 0.5
        balancer.agree(vector)
    assert expected == pytest.approx((0.5, transfer_s), nan_ok=True)


def test_waiting_for_data_and_applying_the_update_count_as_work_but_apart():
    job = Job(LBBSP("memoryless"), [100.0, 100.0], 100)
    job.round()
    job.balancers[0].meter.applied(0.25)
    job.balancers[1].meter.applied(0.0)
    job.round(input_s=0.25)
    table = job.finished[1].table
    assert table.column("input_s") == pytest.approx([0.25, 0.25])
    assert table.column("compute_s") == pytest.approx([0.75, 0.5])
    assert table.column("samples_per_s") == pytest.approx([50.0, 50 / 0.75])


@pytest.mark.parametrize(("rank_s", "shows_after"), [(0.02, 2), (0.002, 3)])
def test_what_short_rounds_teach_is_learned_while_others_compute_and_told_a_round_later(rank_s, shows_after):
    job = Job(LBBSP("memoryless"), [30 / rank_s, 10 / rank_s], 40)
    shares = []
    for _ in range(5):
        shares.append(job.balancers[0].plan().samples)
        job.round()
    # The first round teaches nothing.
    assert shares[: shows_after + 1] == [(20, 20)] * shows_after + [(25, 15)]


def test_a_round_that_there_was_time_to_learn_from_is_learned_once():
    job = Job(LBBSP("memoryless"), [1e5, 1e5], 40)
    learned = []
    for balancer in job.balancers:
        balancer.meter.learner.predictor.update = lambda *told, of=balancer, **drivers: learned.append(of.rank)
    for number in range(3):
        for balancer, clock in zip(job.balancers, job.clocks, strict=True):
            balancer.begin(MicroBatch(balancer.plan(), 20, True))
            clock.now += 2e-4
        summed = sum(balancer.report() for balancer in job.balancers)
        if number == 1:
            job.balancers[0].waiting()
            assert learned == [0]
        for balancer in job.balancers:
            balancer.agree(summed)
    assert sorted(learned) == [0, 0, 1, 1]


def test_weights_and_rescaling_give_the_mean_over_all_samples():
    """Gradients 1, 2, 3, … of single samples, accumulated as the frameworks do, give their plain mean."""
    plan = RoundPlan((5, 3), (3, 1))
    samples = np.arange(1.0, 9.0)
    clock = Clock()
    total = 0.0
    for rank in range(2):
        balancer = Balancer(BSP(), rank, 2, 8, clock=clock)
        mine = samples[plan.start(rank) : plan.start(rank) + plan.samples[rank]]
        accumulated, sizes = 0.0, plan.sizes(rank)
        for i, size in enumerate(sizes, start=1):
            balancer.begin(MicroBatch(plan, size, i == len(sizes)))
            assert balancer.gradient.rescale <= 1.0
            assert balancer.accumulating == (i > 1)
            accumulated = accumulated * balancer.gradient.rescale + mine[:size].mean()
            mine = mine[size:]
            if i < len(sizes):
                balancer.pause()
        assert balancer.closing
        total += accumulated * balancer.gradient.factor
    assert total == pytest.approx(samples.mean(), rel=1e-14)


@pytest.mark.parametrize("late", [False, True])
def test_gradients_count_by_their_weights(late):
    """Means over w_ij of something, 0 on a micro-batch and on a rank: their mean over all, in every round."""
    plan = RoundPlan((6, 2, 2), (3, 1, 1))
    balancers = [Balancer(BSP(), rank, 3, 10, clock=Clock()) for rank in range(3)]
    rng = np.random.default_rng(3)
    for _ in range(4):
        weights = [[*(0.0, 40.0, 7.5)], [float(rng.integers(1, 300))], [0.0]]
        gradients = [rng.normal(size=len(of)) for of in weights]
        vectors, gathered = [], 0.0
        for balancer, of, own in zip(balancers, weights, gradients, strict=True):
            accumulated = 0.0
            for i, (weight, gradient) in enumerate(zip(of, own, strict=True), start=1):
                told = None if late else weight
                balancer.begin(MicroBatch(plan, 2, i == len(of), weight=told))
                if late:
                    balancer.weigh(weight)
                accumulated = accumulated * balancer.gradient.rescale + (gradient if weight else 0.0)
                if i < len(of):
                    balancer.pause()
            vectors.append(balancer.report())
            gathered += accumulated * balancer.gradient.factor
        corrections = [balancer.agree(sum(vectors)) for balancer in balancers]
        expected = sum(map(np.dot, weights, gradients)) / sum(map(sum, weights))
        assert [gathered * correction for correction in corrections] == [pytest.approx(expected, rel=1e-13)] * 3


def test_samples_off_the_plan_are_corrected_by_what_was_really_used():
    job = Job(BSP(), [100.0, 100.0], 100)
    assert job.round(used={0: 25}) == [pytest.approx(100 / 75)] * 2
    assert job.round() == [1.0, 1.0]


def test_a_round_in_which_nobody_had_data_changes_nothing():
    job = Job(BSP(), [100.0, 100.0], 100)
    assert job.round(used={0: 0, 1: 0}) == [1.0, 1.0]


def test_ranks_with_another_order_of_the_data_stop_with_an_error_that_names_them():
    balancers = [Balancer(BSP(), rank, 3, 9, clock=Clock()) for rank in range(3)]
    vectors = []
    for rank, balancer in enumerate(balancers):
        balancer.begin(MicroBatch(balancer.plan(), 3, data=77 if rank == 2 else 5))
        vectors.append(balancer.report())
    with pytest.raises(PlanMismatchError, match=r"ranks \[2\].*order of the data.*policy"):
        balancers[0].agree(sum(vectors))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"settings": 0.1}, r"ranks \[1\].*hyper-parameters"),
        ({"parameter_norm": 1.01, "bits": 3}, r"ranks \[1\].* parameters"),
    ],
)
def test_ranks_that_update_unlike_are_told_so(own, message):
    balancers = [Balancer(BSP(), rank, 2, 4, clock=Clock()) for rank in range(2)]
    vectors = []
    for rank, balancer in enumerate(balancers):
        balancer.agreement.watch([WatchedParameter("w", 1, 4)])
        balancer.begin(MicroBatch(balancer.plan(), 2))
        vectors.append(balancer.report(**({"settings": 0.2, "parameter_norm": 1.0} | (own if rank == 1 else {}))))
    with pytest.raises(PlanMismatchError, match=message):
        balancers[0].agree(sum(vectors))


@pytest.mark.parametrize(("contents", "alike"), [((7.0, 7.0001), True), ((7.0, 7.1), False), ((0.0, 0.0), True)])
def test_ranks_that_cut_a_round_from_other_samples_are_told_so(contents, alike):
    balancers = [Balancer(BSP(), rank, 2, 4, clock=Clock()) for rank in range(2)]
    vectors = []
    for balancer, number in zip(balancers, contents, strict=True):
        balancer.begin(MicroBatch(balancer.plan(), 2, contents=number))
        vectors.append(balancer.report())
    with (
        contextlib.nullcontext()
        if alike
        else pytest.raises(PlanMismatchError, match=r"round 0: ranks \[1\].*samples.*rank 0")
    ):
        balancers[0].agree(sum(vectors))


def test_a_short_round_says_nothing_of_the_speed():
    """With a cost per round, the speed of a short round is not that of a whole one."""
    job = Job(LBBSP("memoryless"), [100.0, 100.0], 100)
    job.round()
    job.round()
    before = [b.meter.learner.predictor.predict() for b in job.balancers]
    short = RoundPlan.of([2, 1])
    vectors = []
    for balancer, clock, size in zip(job.balancers, job.clocks, (2, 1), strict=True):
        balancer.begin(MicroBatch(short, size))
        clock.now += 1.0
        vectors.append(balancer.report())
    for balancer in job.balancers:
        balancer.agree(sum(vectors))
    assert [b.meter.learner.predictor.predict() for b in job.balancers] == before


def test_an_discarded_round_leaves_no_trace():
    job = Job(BSP(max_micro_batch=10), [100.0, 100.0], 40)
    balancer = job.balancers[0]
    balancer.begin(MicroBatch(balancer.plan(), 10, last=False))
    balancer.pause()
    balancer.discard_round()
    assert not balancer.in_round
    job.round()
    assert job.finished[0].table.column("samples").tolist() == [20, 20]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["begin", "begin"], "every micro-batch"),
        (["begin", "report", "begin"], "next batch"),
        (["report"], r"computing.*between two rounds"),
        (["pause"], "computing"),
        (["begin", "report", "discard_round"], "discarded"),
    ],
)
def test_calls_out_of_order_say_what_was_expected(calls, message):
    balancer = Balancer(BSP(), 0, 1, 4, clock=Clock())
    steps = {
        "begin": lambda: balancer.begin(MicroBatch(balancer.plan(), 4)),
        "report": balancer.report,
        "pause": balancer.pause,
        "discard_round": balancer.discard_round,
    }
    for call in calls[:-1]:
        steps[call]()
    with pytest.raises(RoundStateError, match=message):
        steps[calls[-1]]()


def test_a_late_change_of_the_lead_is_refused():
    job = Job(BSP(), [1.0], 4)
    job.round()
    with pytest.raises(RoundStateError, match=r"0 rounds ahead.*num_workers"):
        job.balancers[0].set_rounds_ahead(1)
    job.balancers[0].set_rounds_ahead(0)  # no change: a second loader of the same kind


@pytest.mark.parametrize(
    ("global_batch", "error", "message"),
    [
        (3, ValueError, r"global_batch.* 3 .* 4 ranks"),
        (2.5, TypeError, r"global_batch.* 2\.5"),
        (True, TypeError, r"global_batch.* True"),
    ],
)
def test_an_impossible_global_batch_is_named(global_batch, error, message):
    with pytest.raises(error, match=message):
        Balancer(BSP(), 0, 4, global_batch, clock=Clock())


class Board:
    """Signals between ranks of one process."""

    def __init__(self) -> None:
        self.ended = -1

    def raise_signal(self, round: int) -> None:
        self.ended = max(self.ended, round)

    def raised(self, round: int) -> bool:
        return self.ended >= round


def non_blocking_round(job: Job, board: Board) -> list[float]:
    """Micro-batch by micro-batch in the order of time, as ranks that compute at the same time would."""
    for balancer in job.balancers:
        balancer.signals = board
    vectors: dict[int, np.ndarray] = {}
    at_work: dict[int, list[int]] = {rank: list(b.plan().sizes(rank)) for rank, b in enumerate(job.balancers)}
    ends = dict.fromkeys(at_work, job.clocks[0].now)
    while at_work:
        rank = min(at_work, key=lambda r: ends[r] + at_work[r][0] / job.speeds[r])
        balancer, clock, size = job.balancers[rank], job.clocks[rank], at_work[rank].pop(0)
        balancer.begin(MicroBatch(balancer.plan(), size, not at_work[rank]))
        clock.now = ends[rank] = ends[rank] + size / job.speeds[rank]
        if at_work[rank] and not balancer.stop_early():
            balancer.pause()
        else:
            del at_work[rank]
            vectors[rank] = balancer.gradient.factor, balancer.report()
    end = max(clock.now for clock in job.clocks) + 0.01
    for clock in job.clocks:
        clock.now = end
    factors = {balancer.agree(sum(v for _, v in vectors.values())) for balancer in job.balancers}
    return [weight * factors.copy().pop() for _, (weight, _) in sorted(vectors.items())]


def test_when_the_first_rank_is_done_the_others_stop_after_the_micro_batch_at_hand():
    job = Job(NonBlocking(4), [400.0, 150.0, 90.0], 120)
    weights = non_blocking_round(job, Board())
    table = job.finished[-1].table
    # At speed 400, four micro-batches of 10 take 0.1 s: the others have then done one, and have begun the next.
    assert table.column("samples").tolist() == [40, 20, 10]
    assert table.column("micro_batches").tolist() == [4, 2, 1]
    assert weights == pytest.approx([10 / 70] * 3), "each sample weighs the same, whoever did it"


def test_a_micro_batch_that_would_keep_the_first_rank_waiting_is_not_begun():
    """At first the second micro-batch of rank 1 is done soon after rank 0 is, then long after it."""
    job = Job(NonBlocking(4), [400.0, 160.0, 90.0], 120)
    board = Board()
    non_blocking_round(job, board)
    non_blocking_round(job, board)
    assert job.finished[1].table.column("samples").tolist() == [40, 20, 10]
    job.speeds[1] = 120.0  # its second micro-batch would end at 0.167 s, and the round at 0.1
    non_blocking_round(job, board)
    assert job.finished[2].table.column("samples").tolist() == [40, 10, 10]


def test_a_rank_that_expects_the_end_too_early_does_not_end_the_round_and_expects_nothing_of_the_next():
    job = Job(NonBlocking(4), [400.0, 150.0], 80)
    board = Board()
    non_blocking_round(job, board)
    job.speeds = [100.0, 100.0]  # all at once slower than the last round's end
    non_blocking_round(job, board)
    assert job.finished[1].table.column("micro_batches").tolist() == [1, 1]
    assert not board.raised(1)
    non_blocking_round(job, board)
    assert job.finished[2].table.column("micro_batches").tolist() == [4, 4]


def test_where_work_is_queued_the_clock_tells_nothing_of_the_end():
    job = Job(NonBlocking(4), [400.0, 120.0], 80)
    board = Board()
    for balancer in job.balancers:
        balancer.meter.queued = True
    for number in range(3):
        non_blocking_round(job, board)
        assert job.finished[number].table.column("samples").tolist() == [40, 20]


def test_a_round_that_is_given_up_after_an_expected_end_leaves_the_next_one_to_signal():
    job = Job(NonBlocking(4), [400.0, 120.0], 80)
    board = Board()
    non_blocking_round(job, board)
    late = job.balancers[1]
    late.begin(MicroBatch(late.plan(), 10, False))
    job.clocks[1].now += 1.0
    assert late.stop_early()
    late.discard_round()
    job.speeds = [100.0, 400.0]
    non_blocking_round(job, board)
    assert job.finished[1].table.column("samples")[1] == 40
    assert board.raised(1)


def test_a_long_update_is_no_reason_to_expect_an_early_end():
    """Two equal ranks, whose update takes as long as ten micro-batches."""
    job = Job(NonBlocking(4), [400.0, 400.0], 80)
    board = Board()
    for number in range(5):
        for balancer, clock in zip(job.balancers, job.clocks, strict=True):
            clock.now += 0.25
            balancer.meter.applied(0.25)
        non_blocking_round(job, board)
        assert job.finished[number].table.column("micro_batches").tolist() == [4, 4]


def test_the_papers_rule_waits_for_the_signal():
    job = Job(NonBlocking(4, anticipates=False), [400.0, 120.0], 80)
    board = Board()
    for number in range(3):
        non_blocking_round(job, board)
        assert job.finished[number].table.column("samples").tolist() == [40, 20]


def test_by_the_papers_rule_a_rank_that_stopped_early_weighs_less_and_nothing_makes_up_for_it():
    job = Job(NonBlocking(4, scaling="n/N"), [400.0, 150.0, 90.0], 120)
    weights = non_blocking_round(job, Board())
    assert weights == pytest.approx([10 / 120, 10 / 120 * 2 / 4, 10 / 120 * 1 / 4])


def test_the_papers_rule_goes_by_samples_where_micro_batches_are_unequal():
    job = Job(NonBlocking(4, scaling="n/N"), [400.0, 100.0], 12)
    assert job.balancers[1].plan().sizes(1) == (1, 1, 2, 2)
    weights = non_blocking_round(job, Board())
    assert job.finished[-1].table.figures("samples") == [6, 2]
    # Of the last micro-batch, in whose units the gradient is accumulated: 2 of 12, and 1 of 12 times 2 of 6 samples.
    assert weights == pytest.approx([2 / 12, 1 / 12 * 2 / 6])


def test_a_micro_batch_that_does_not_fit_is_done_in_parts_and_plans_keep_to_what_fits():
    """Every rank learns of the limit with the table; it has headroom below the size that failed."""
    job = Job(BSP(), [100.0, 100.0], 200)
    vectors = []
    for rank, balancer in enumerate(job.balancers):
        plan = balancer.plan()
        balancer.begin(MicroBatch(plan, 100))
        sizes = [100]
        if rank == 1:
            parts = balancer.out_of_memory()
            assert balancer.between_updates, "the round has begun, and is not complete"
            sizes = [parts] * (100 // parts)
            assert parts == 50
        for i, size in enumerate(sizes, start=1):
            if len(sizes) > 1:
                balancer.begin(MicroBatch(plan, size, i == len(sizes)))
                assert balancer.gradient.rescale == 1.0
            if i < len(sizes):
                balancer.pause()
        vectors.append(balancer.report())
    assert {balancer.agree(sum(vectors)) for balancer in job.balancers} == {1.0}
    table = job.finished[-1].table
    assert table.column("samples").tolist() == [100, 100]
    assert table.column("limit").tolist() == [0, 90]
    assert job.balancers[0].plan() == job.balancers[1].plan()
    assert job.balancers[0].plan().samples == (100, 100)
    assert job.balancers[0].plan().micro_batches == (1, 2)


def test_a_round_whose_gathered_part_is_lost_begins_again_with_its_limit_known_and_teaches_nothing():
    job = Job(BSP(max_micro_batch=50), [100.0, 100.0], 200)
    job.round()
    plain, short = job.balancers
    for size in (50, 50):
        short.begin(MicroBatch(short.plan(), size, False))
        job.clocks[1].now += 7.0
        if short.meter.round.micro_batches == 0:
            short.pause()
    assert short.out_of_memory(again=True) == 25
    assert not short.in_round
    vectors = []
    for balancer, sizes in ((plain, (50, 50)), (short, (25,) * 4)):
        for i, size in enumerate(sizes, start=1):
            balancer.begin(MicroBatch(balancer.plan(), size, i == len(sizes)))
            if i < len(sizes):
                balancer.pause()
        assert balancer.gradient.factor == sizes[-1] / 200
        vectors.append(balancer.report())
    assert {balancer.agree(sum(vectors)) for balancer in job.balancers} == {1.0}
    table = job.finished[-1].table
    assert table.column("samples").tolist() == [100, 100], "each sample once"
    assert table.column("compute_s")[1] == 0.0, "of the attempt that was lost nothing is told"
    assert table.column("limit").tolist() == [50, 45]
    assert table.column("timed_samples").tolist() == [100, 0]


def test_a_single_sample_that_does_not_fit_is_the_end():
    balancer = Job(BSP(), [1.0, 1.0], 2).balancers[0]
    balancer.begin(MicroBatch(balancer.plan(), 1))
    with pytest.raises(HeteroError, match=r"rank 0 .*memory.*smaller model"):
        balancer.out_of_memory()


def test_a_resumed_balancer_plans_as_the_first_would_have():
    job = Job(LBBSP(), [300.0, 100.0], 120)
    for _ in range(4):
        job.round()
    again = Job(LBBSP(), [300.0, 100.0], 120)
    for old, new in zip(job.balancers, again.balancers, strict=True):
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert again.balancers[0].rounds == 4
    for _ in range(4):
        job.round()
        again.round()
        assert job.balancers[0].plan() == again.balancers[1].plan()


@pytest.mark.parametrize(("change", "named"), [({"plans": []}, "num_workers"), ({"version": 0}, "version 0")])
def test_the_state_of_another_version_or_lead_is_refused(change, named):
    balancer = Job(LBBSP(), [300.0, 100.0], 120).balancers[0]
    with pytest.raises(ValueError, match=named):
        balancer.load_state_dict(balancer.state_dict() | change)
    if "version" in change:
        with pytest.raises(ValueError, match=named):
            balancer.resume(balancer.state_dict() | change, [(100.0, 0)] * 2, same_ranks=False)


def test_a_state_whose_predictor_is_refused_leaves_the_plans_as_they_were():
    job = Job(LBBSP(), [300.0, 100.0], 120)
    for _ in range(4):
        job.round()
    state, fresh = job.balancers[0].state_dict(), Job(LBBSP(), [300.0, 100.0], 120).balancers[0]
    learner = state["pace"]["learner"] | {"predictor": {"predictor": "another"}}
    plan = fresh.plan()
    with pytest.raises(ValueError, match="start without a state"):
        fresh.load_state_dict(state | {"pace": state["pace"] | {"learner": learner}})
    assert (fresh.rounds, fresh.plan()) == (0, plan)


def test_the_end_of_the_next_round_is_told_once_and_before_the_round_is_observed():
    job = Job(BSP(), [200.0, 100.0], 100)
    balancer = job.balancers[0]
    told = []
    balancer.observer = lambda finished: told.append(finished.round)
    balancer.next_round_over = lambda: told.append("over")
    job.round()
    job.round()
    assert told == ["over", 0, 1]
