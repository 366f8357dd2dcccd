"""The cutter against oracles: all ranks cut the same rounds, and each sample is done once, whatever happens to them."""

from __future__ import annotations

import json
from collections import deque
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import EndingLists, SharedList

from hvd_hetero.bounds import Room
from hvd_hetero.columns import COLUMNS
from hvd_hetero.data.cutter import Cutter, Parts
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_order import Cut
from hvd_hetero.data.stream_orders import EndingShard, SharedStream
from hvd_hetero.planner import Planner
from hvd_hetero.policies import BSP, LBBSP, StaticAllocation
from hvd_hetero.rounds import MicroBatch, RoundPlan, RoundReport, RoundTable

EPOCHS = 2
ZEROS = dict.fromkeys(COLUMNS, 0.0)


def shares_of(seed):
    """What a policy asks of each share."""
    return {"minimum": 1 + seed % 2, "multiple_of": 1 + seed // 2 % 3}


class Plans:
    """A balancer's plans, each drawn from the number of its round."""

    def __init__(self, rank, workers, rounds_ahead, seed):
        self.rank, self.workers, self.rounds_ahead, self._seed = rank, workers, rounds_ahead, seed
        self.rounds = 0
        self.policy, self.room = SimpleNamespace(**shares_of(seed)), Room()

    def plan(self, ahead=0):
        assert 0 <= ahead <= self.rounds_ahead, "no plan is known further ahead"
        random = np.random.default_rng([self._seed, self.rounds + ahead])
        samples = random.integers(0, 7, self.workers)
        samples[random.integers(self.workers)] += 1
        plan = RoundPlan.of(samples, int(random.integers(1, 4)))
        return RoundPlan(plan.samples, plan.micro_batches, "first" if random.integers(3) else "all")


class Rank:
    """Draws micro-batches as a DataLoader does: some ahead of those that it is asked to do."""

    def __init__(self, order, plans, least, random):
        self.plans = plans
        plans.policy.keeps_total, plans.global_batch = False, least
        self.cutter = Cutter(order, plans, plans.rank, drop_last=least > 1)
        self._random = random
        self._pending = deque()
        self._source = self.cutter.micro_batches()

    def _draw(self):
        work, part = next(self._source, (None, None))
        if work is None:
            return False
        assert len(part) == work.samples
        assert work.round <= self.plans.rounds + self.plans.rounds_ahead
        self._pending.append((work, list(part)))
        return True

    def draw_ahead(self):
        """Some more, while plans are known: the next round may have to be cut for one."""
        for _ in range(self._random.integers(5)):
            at_end = not self._pending or self._pending[-1][0].last
            if at_end and self.cutter.ahead > self.plans.rounds_ahead:
                break
            if not self._draw():
                break

    def upcoming(self):
        """The next micro-batch of the round at hand; None: no round follows in this epoch."""
        while self._pending and self._pending[0][0].round < self.plans.rounds:
            self._pending.popleft()
        if not self._pending and not self._draw():
            if not self.cutter.more:
                return None
            self._source = self.cutter.micro_batches()  # samples have come back after it had come to its end
            assert self._draw()
        return self._pending.popleft()

    def do(self, *, stops):
        """One round: what was done of it, whole micro-batches or parts, and whether it may be stopped early."""
        done = []
        while True:
            work, part = self.upcoming()
            parts = Parts(work, part, max(work.samples, 1), memory_in_use=False) if work.samples else None
            if parts is None:
                return done
            while parts:
                small, samples = parts.take()
                assert small.samples == len(samples) > 0
                if len(samples) > 1 and not self._random.integers(4):
                    parts.again(int(self._random.integers(1, len(samples))))
                    continue
                parts.memory_in_use = False
                done += samples
                if small.last or (stops and not self._random.integers(3)):
                    return done


def play(orders_of, oracle_of, *, workers, rounds_ahead, least, seed, stop_every):
    """Train for some epochs; returns what was done in each of them, by rank."""
    random = np.random.default_rng(seed)

    def job():
        return [
            Rank(order, Plans(rank, workers, rounds_ahead, seed), least, random)
            for rank, order in enumerate(orders_of())
        ]

    ranks, oracle, epochs, finished = job(), None, [], 0
    while ranks[0].cutter.epoch_at_hand < EPOCHS:
        begun = {rank.cutter.begin() for rank in ranks}
        assert len(begun) == 1, "ranks disagree on where an epoch begins"
        epoch = ranks[0].cutter.order.epoch
        if epoch == len(epochs):
            assert oracle is None or oracle.next_round(ranks[0].plans.plan()) is None, "an epoch was left too early"
            oracle = oracle_of(epoch, oracle)
            epochs.append([[] for _ in range(workers)])
        while True:
            for rank in ranks:
                rank.draw_ahead()
            if stop_every and finished == stop_every:
                state, rounds = json.loads(json.dumps(ranks[0].cutter.state_dict())), ranks[0].plans.rounds
                ranks, finished = job(), 0
                for rank in ranks:
                    rank.plans.rounds = rounds
                    rank.cutter.load_state_dict(state)
                break
            works = [rank.upcoming() for rank in ranks]
            if None in works:
                assert works == [None] * workers, "ranks disagree on where an epoch ends"
                break
            for rank, work in zip(ranks, works, strict=True):
                rank._pending.appendleft(work)
            plan, parts = oracle.next_round(ranks[0].plans.plan())
            assert {work.plan for work, _ in works} == {plan}
            assert len({(work.data, work.epoch, work.round) for work, _ in works}) == 1
            whole = random.integers(workers)
            if not parts[whole]:
                whole = next(i for i, part in enumerate(parts) if part)
            done = [rank.do(stops=plan.ends == "first" and i != whole) for i, rank in enumerate(ranks)]
            for i, (mine, part) in enumerate(zip(done, parts, strict=True)):
                assert mine == part[: len(mine)]
                assert plan.ends == "first" or mine == part
                epochs[epoch][i] += mine
            counts = [len(mine) for mine in done]
            oracle.finish(parts, counts)
            rows = [
                RoundReport(**ZEROS | {"samples": n, "ended": rank.cutter.order.ends_after(n)}).vector(i, workers)
                for i, (n, rank) in enumerate(zip(counts, ranks, strict=True))
            ]
            for rank in ranks:
                rank.cutter.finish(RoundTable(sum(rows), workers))
                rank.plans.rounds += 1
            finished += 1
    return epochs


jobs = {
    "workers": st.integers(1, 4),
    "seed": st.integers(0, 2**16),
    "stop_every": st.sampled_from([0, 1, 2, 5]),
}


@given(length=st.integers(1, 70), rounds_ahead=st.integers(0, 3), least=st.sampled_from([1, 1, 6]), **jobs)
def test_a_permutation_is_shared_out_as_by_the_oracle(length, rounds_ahead, least, **job):
    def samples(epoch):
        return np.random.Generator(np.random.PCG64([7, epoch])).permutation(length).tolist()

    epochs = play(
        lambda: [SharedPermutation(length, shuffle=True, seed=7) for _ in range(job["workers"])],
        lambda epoch, before: SharedList(
            samples(epoch), rounds_ahead=rounds_ahead, least=least, **shares_of(job["seed"])
        ),
        rounds_ahead=rounds_ahead, least=least, **job,
    )  # fmt: skip
    for parts in epochs:
        done = list(chain.from_iterable(parts))
        assert len(set(done)) == len(done) > length - least
        assert set(done) <= set(range(length))


@given(length=st.integers(1, 70), least=st.sampled_from([1, 1, 6]), **jobs)
def test_a_whole_stream_is_shared_out_as_by_the_oracle(length, least, **job):
    def read(epoch):
        return range(1000 * epoch, 1000 * epoch + length)

    epochs = play(
        lambda: [SharedStream(read, least) for _ in range(job["workers"])],
        lambda epoch, before: SharedList(read(epoch), least=least, **shares_of(job["seed"])),
        rounds_ahead=0, least=least, **job,
    )  # fmt: skip
    for epoch, parts in enumerate(epochs):
        done = list(chain.from_iterable(parts))
        assert len(set(done)) == len(done) > length - least
        assert set(done) <= set(read(epoch))


@given(lengths=st.lists(st.integers(1, 30), min_size=4, max_size=4), **jobs)
def test_shards_that_end_by_themselves_are_read_once_as_by_the_oracle(lengths, **job):
    workers = job["workers"]
    lists = [[f"{rank}.{i}" for i in range(length)] for rank, length in enumerate(lengths[:workers])]
    epochs = play(
        lambda: [EndingShard(lambda epoch, r=r: lists[r], r, workers) for r in range(workers)],
        lambda epoch, before: EndingLists(lists), rounds_ahead=0, least=1, **job,
    )  # fmt: skip
    assert epochs == [lists] * EPOCHS


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 11, 12, 16, 17, 18, 19, 20])
@pytest.mark.parametrize("rounds_ahead", [0, 3])
@pytest.mark.parametrize(
    ("policy", "workers", "share"),
    [(BSP(), 3, 1), (LBBSP(minimum=2, multiple_of=2), 2, 2), (StaticAllocation([3, 1]), 2, 1), (BSP(), 1, 1)],
)
@pytest.mark.parametrize("whole_stream", [False, True])
def test_no_rank_is_without_its_share_where_an_epoch_has_one_for_all(
    length, rounds_ahead, policy, workers, share, whole_stream
):
    rounds_of = []
    for rank in range(workers):
        plans = Planner(policy, workers, 8)
        plans.set_rounds_ahead(0 if whole_stream else rounds_ahead)
        plans.rank = rank
        order = SharedStream(lambda epoch: range(length)) if whole_stream else SharedPermutation(length)
        cutter = Cutter(order, plans, plans.rank)
        cutter.begin()
        cuts = []
        while cutter.more:
            cuts.append(cutter.cut())
            if cutter.ahead > plans.rounds_ahead:
                order.finish([float(x) for x in cuts[-1 - plans.rounds_ahead].plan.samples])
                plans.rounds += 1
        assert len(cuts) == cutter.rounds_of(length)
        rounds_of.append(cuts)
    assert {tuple(cut.plan for cut in cuts) for cuts in rounds_of} == {tuple(cut.plan for cut in rounds_of[0])}
    totals = [cut.plan.total for cut in rounds_of[0]]
    assert sum(totals) == length
    assert all(total == 8 for total in totals[:-2])
    enough = length >= share * workers
    assert min(min(cut.plan.samples) for cut in rounds_of[0]) >= (share if enough else 0)
    assert all(share * workers <= total < 8 + share * workers for total in totals) or not enough
    if policy.name != "static":
        assert all(set(cut.plan.micro_batches) == {1} for cut in rounds_of[0]) or not enough


def test_a_remainder_makes_no_micro_batch_larger_than_the_policy_allows():
    order, plans = SharedPermutation(9), Planner(BSP(max_micro_batch=4), 2, 8)
    plans.rank = 0
    cutter = Cutter(order, plans, plans.rank)
    cutter.begin()
    assert cutter.cut().plan == RoundPlan((5, 4), (2, 1))
    assert not cutter.more


def test_an_epoch_that_is_wanted_begins_unless_it_is_the_one_to_go_on_with():
    cutter = Cutter(SharedPermutation(10), Plans(0, 1, 0, 0), 0)
    assert (cutter.begin(), cutter.order.epoch, cutter.epoch) == (True, 0, 1)
    cutter.stop()
    cutter.want(0)
    assert (cutter.epoch_at_hand, cutter.begin(), cutter.order.epoch) == (0, False, 0)
    cutter.stop()
    cutter.want(5)
    assert (cutter.epoch_at_hand, cutter.begin(), cutter.order.epoch, cutter.epoch) == (5, True, 5, 6)


def test_an_epoch_with_nothing_left_for_a_round_of_then_is_over():
    whole = RoundPlan.of([4])
    for least, goes_on in ((2, True), (3, False)):
        order = SharedPermutation(10)
        plans = Plans(0, 1, 0, 0)
        plans.policy.keeps_total, plans.global_batch = False, least
        cutter = Cutter(order, plans, plans.rank, drop_last=True)
        cutter.begin()
        for _ in range(2):
            order.take(whole, 0)
            order.finish([4])
        other = Cutter(SharedPermutation(10), Plans(0, 1, 0, 0), 0)
        other.load_state_dict(cutter.state_dict())
        assert (other.epoch_at_hand == 0) == goes_on


@pytest.mark.parametrize(
    ("most", "memory_in_use", "sizes"), [(4, False, [4, 3, 3]), (4, True, [2, 4, 4]), (1, True, [1] * 10)]
)
def test_parts_are_alike_but_for_a_first_small_one_after_a_failure(most, memory_in_use, sizes):
    parts = Parts(MicroBatch(RoundPlan.of([10]), 10, last=True), list(range(10)), most, memory_in_use=memory_in_use)
    got = []
    while parts:
        work, samples = parts.take()
        got.append(samples)
        parts.memory_in_use = False
        assert work.last == (not parts)
    assert [len(samples) for samples in got] == sizes
    assert list(chain.from_iterable(got)) == list(range(10))


@pytest.mark.parametrize(
    ("samples", "planned", "most", "expected"),
    [(12, 2, 0, [6, 6]), (12, 2, 6, [6, 6]), (12, 2, 5, [4, 4, 4]), (11, 1, 5, [3, 4, 4]), (3, 1, 1, [1, 1, 1])],
)
def test_micro_batches_hold_no_more_than_fits_whatever_was_planned(samples, planned, most, expected):
    plan = RoundPlan((samples, 4), (planned, 1))
    works = Cut(plan, 0, list(range(samples)), epoch=0, fingerprint=0).micro_batches(most)
    assert [work.samples for work in works] == expected
    assert [work.last for work in works] == [False] * (len(expected) - 1) + [True]


def test_a_rank_without_samples_has_one_empty_micro_batch_whatever_fits():
    works = Cut(RoundPlan((0, 4), (0, 1)), 0, [], epoch=0, fingerprint=0).micro_batches(3)
    assert [(work.samples, work.last) for work in works] == [(0, True)]
