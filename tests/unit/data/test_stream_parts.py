"""Parts of a stream that ranks read: every sample once, whoever reads which part and however long it is."""

from __future__ import annotations

import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.bounds import Room
from hvd_hetero.data.reading import Mark
from hvd_hetero.data.sample_order import EpochEnd
from hvd_hetero.data.stream_parts import StreamParts
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.testing import ThreadRankError, run_on_threads

EPOCH, BATCH = 2, 8


class Gather:
    """What all ranks give, once all have."""

    def __init__(self, ranks):
        self.calls = 0
        self._barrier, self._given = threading.Barrier(ranks), [None] * ranks

    def of(self, rank):
        def gather(mine):
            self._given[rank] = mine
            if self._barrier.wait() == 0:
                self.calls += 1
            everywhere = list(self._given)
            self._barrier.wait()
            return everywhere

        return gather


def source(lengths, read=lambda sample: None):
    """Samples of a part, which can be opened again after each fifth."""

    def samples(number, part, of, state):
        for i in range(state or 0, lengths[part]):
            if i % 5 == 0:
                yield Mark(i)
            read((part, i))
            yield number, part, i

    return samples


def play(lengths, ranks, seed, *, stop=None, state=None, early=False, own=False, in_step=0, read=lambda sample: None):
    """What each rank did, the state after round ``stop``, and how often ranks told each other; shares are drawn."""
    gather = Gather(ranks)

    def case(rank):
        order = StreamParts(source(lengths, read), len(lengths), rank, ranks, gather.of(rank), own=own)
        order.end = EpochEnd(joins=True, room=Room(least=in_step))
        if state is None:
            order.start(EPOCH)
        else:
            order.load_state_dict(state)
        done, rounds = [], 0
        while order.holds(1):
            dice = random.Random(f"{seed}.{rounds}")
            samples = [dice.randint(min(in_step, 1), 6) for _ in range(ranks)]
            samples[dice.randrange(ranks)] += 1
            ends = "first" if early and dice.random() < 0.5 else "all"
            cut = order.take(RoundPlan(tuple(samples), tuple(map(bool, samples)), ends), rank)
            assert not in_step or min(cut.plan.samples) > 0, "a reducer waits for each rank"
            counts = list(cut.plan.samples)
            if cut.plan.ends == "first":
                counts = [dice.randint(0, count) for count in counts]
                counts[dice.randrange(ranks)] = max(cut.plan.samples)
                counts = [min(pair) for pair in zip(counts, cut.plan.samples, strict=True)]
            rounds += 1
            if stop == rounds:  # in flight, and so not done
                return done, json.dumps(order.state_dict())
            done += cut.part[: counts[rank]]
            order.finish(counts)
        return done, None

    outcomes = run_on_threads(case, ranks)
    (then,) = {state for _, state in outcomes}
    return [done for done, _ in outcomes], then and json.loads(then), gather.calls


@settings(max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 10, 40]), min_size=1, max_size=9),
    ranks=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    how=st.sampled_from(["all", "early", "in step", "own"]),
    stop=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 2**16),
)
def test_every_sample_is_done_once_whatever_ranks_and_interruptions(lengths, ranks, how, stop, seed):
    own, in_step = how == "own", int(how == "in step")
    lengths = [4 + lengths[0], *lengths[1:]]
    if own or in_step:  # the same ranks go on
        ranks = ranks[:1] * len(ranks)
    if own:
        lengths = [lengths[i % len(lengths)] for i in range(ranks[0])]
    done, state = [], None
    for i, size in enumerate(ranks):
        parts, state, _ = play(
            lengths, size, seed + i, stop=stop if i < 3 else None, state=state, early=how == "early", own=own,
            in_step=in_step,
        )  # fmt: skip
        done += [sample for part in parts for sample in part]
        if state is None:
            break
    assert sorted(done) == sorted((EPOCH, part, i) for part, length in enumerate(lengths) for i in range(length))


def test_a_rank_that_is_ahead_gets_more_parts_and_few_messages_are_sent():
    done, _, calls = play([50] * 12, 3, 1)
    parts = [{part for _, part, _ in mine} for mine in done]
    assert min(map(len, parts)) >= 4
    assert calls < 600 / BATCH, "fewer than rounds"


def test_to_go_on_reads_again_from_the_last_marks_alone():
    again = []
    _, state, _ = play([100] * 3, 3, 1, stop=20)
    before = {part: place["mark"][0] for _, part, _, place in state["parts"] if place is not None}
    play([100] * 3, 2, 1, state=state, read=again.append)
    assert all(i >= before.get(part, 0) for part, i in again)
    assert min(before.values()) > 20
    assert len(again) == len(set(again)), "no sample twice"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("apart", [1, 4, 6, 7, 9])
def test_parts_begin_again_and_go_on_from_epoch_to_epoch_and_from_any_round(own, apart):
    gather = Gather(2)

    def case(rank):
        order, done, rounds = None, [], 0
        for epoch in range(6):
            for _ in range(4):
                if rounds % apart == 0:
                    state = order and json.loads(json.dumps(order.state_dict()))
                    order = StreamParts(source([5, 9]), 2, rank, 2, gather.of(rank), own=own, rounds=4)
                    order.load_state_dict(state) if state else order.start(epoch)
                rounds += 1
                assert order.holds(1)
                done += order.take(RoundPlan((2, 3), (2, 3), "first"), rank).part[: 1 + rank]
                order.finish([1, 2])
            assert not order.holds(1)
            order.start(epoch + 1)
        return done

    done = run_on_threads(case, 2)
    for rank, length in enumerate((5, 9)):
        assert len(done[rank]) == 24 * (1 + rank)
        assert not own or [sample[1:] for sample in done[rank]] == [(rank, i % length) for i in range(24 * (1 + rank))]
    assert len({*done[0], *done[1]}) == 24 * 3, "none twice in a pass"


def test_what_cannot_be_read_is_told_with_a_remedy():
    def parts(lengths, **options):
        gather = Gather(len(lengths))
        return lambda rank: StreamParts(
            source(lengths), len(lengths), rank, len(lengths), gather.of(rank), **options
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"rounds_per_epoch.*every rank"):
        parts([1, 1], own=True, rounds=0)(0)
    state = parts([3, 3, 3], own=True)(0).state_dict()
    with pytest.raises(ValueError, match=r"state.* 3 ranks.* 2\b.*resume"):
        parts([3, 3], own=True)(0).load_state_dict(state)
    for made, name in ((parts([0, 0]), "every rank"), (parts([4, 0], own=True, rounds=2), "rank 1")):
        with pytest.raises(ThreadRankError, match=f"at least one sample.* epoch 0 had none on {name}"):
            run_on_threads(lambda rank, made=made: made(rank).take(RoundPlan.of([1, 1]), rank), 2)
