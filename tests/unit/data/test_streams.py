"""Rounds from data without random access, against the permutation that deals the same samples."""

import json

import pytest

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.stream_orders import ShardStream, SharedStream
from hvd_hetero.rounds import RoundPlan


def shared(length: int, least: int = 1, readers: int = 0) -> SharedStream:
    return SharedStream(lambda epoch: range(1000 * epoch, 1000 * epoch + length), least, readers)


@pytest.mark.parametrize(
    ("mine", "other"), [((8,), (9,)), ((8,), (12,)), ((8, 5), (13, 5)), ((8, 5), (40, 5)), ((20,), (20, 1, 2))]
)
def test_a_rank_that_ends_alone_or_reads_otherwise_is_told_apart_in_the_last_common_round(mine, other):
    streams = [shared(*mine), shared(*other)]
    for _ in range(9):
        assert all(stream.holds(stream._least) for stream in streams), "none has gone"
        first, second = (stream.take(RoundPlan.of([2, 2]), 0).fingerprint for stream in streams)
        for stream in streams:
            stream.finish([2, 2])
        if first != second:
            break
    assert first != second


def test_a_stream_that_became_shorter_is_told():
    stream = shared(10)
    stream.take(RoundPlan.of([4, 4]), 0)
    stream.finish([4, 4])
    with pytest.raises(ValueError, match=r"state.* 9 samples.* 5\b.*resume"):
        shared(5).load_state_dict(stream.state_dict())


def test_the_next_epoch_reads_the_next_pass():
    stream = shared(4)
    stream.start(1)
    assert stream.take(RoundPlan.of([2, 2]), 1).part == [1002, 1003]


def early(*samples: int) -> RoundPlan:
    """A plan by which a rank may leave some of its samples undone."""
    return RoundPlan(samples, samples, "first")


def shards(length: int, rank: int, rounds: int = 3) -> ShardStream:
    return ShardStream(lambda number: [f"{rank}.{number}.{i}" for i in range(length)], rounds, rank, 2)


def test_what_a_shard_has_not_done_comes_first_again():
    stream = shards(9, rank=0)
    assert stream.take(early(4, 4), 0).part == ["0.0.0", "0.0.1", "0.0.2", "0.0.3"]
    stream.finish([1, 4])
    assert stream.take(RoundPlan.of([2, 4], 1), 0).part == ["0.0.1", "0.0.2"]
    stream.start(1)  # the round was abandoned
    assert stream.take(RoundPlan.of([2, 4], 1), 0).part == ["0.0.1", "0.0.2"]


def test_what_collate_leaves_out_of_a_shard_is_done_all_the_same():
    stream = shards(9, rank=0)
    stream.take(RoundPlan.of([4, 4]), 0)
    stream.finish([3, 4])
    assert stream.take(RoundPlan.of([1, 4]), 0).part == ["0.0.4"]
    assert stream.state_dict()["done"] == [4, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_goes_on_in_its_own_shard_from_the_state_of_one(rank):
    through = [shards(5, each) for each in range(2)]
    for number in range(4):
        if number == 3:
            for stream in through:
                stream.start(1)
        for each, stream in enumerate(through):
            stream.take(early(1, 3), each)
            stream.finish([1, 2])
    assert through[0].state_dict() == through[1].state_dict()
    resumed = shards(5, rank)
    resumed.load_state_dict(json.loads(json.dumps(through[0].state_dict())))
    assert resumed.epoch == 1
    while through[rank].holds(1):
        plan = RoundPlan.of([2, 2])
        assert resumed.take(plan, rank) == through[rank].take(plan, rank)
        resumed.finish([2, 2])
        through[rank].finish([2, 2])
    assert not resumed.holds(1)


@pytest.mark.parametrize(
    "make",
    [lambda n: SharedStream(lambda epoch: range(9), 1, n), lambda n: ShardStream(lambda number: range(9), 3, 0, 2, n)],
    ids=["whole", "shard"],
)
def test_a_state_of_other_readers_is_refused_for_samples_came_in_another_order(make):
    with pytest.raises(ValueError, match=r"num_workers=2.*num_workers=0.*resume"):
        make(0).load_state_dict(make(2).state_dict())


def test_mistakes_are_told_with_a_remedy():
    with pytest.raises(ValueError, match=r"rank 1.*no samples.*stream='whole'"):
        shards(0, rank=1).take(RoundPlan.of([1, 1]), 1)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"rounds_per_epoch.*every rank"):
            ShardStream(lambda number: [], wrong, 0, 2)
    with pytest.raises(ValueError, match=r"state.* 3 ranks.* 2\b.*resume"):
        shards(3, 0).load_state_dict(shards(3, 0).state_dict() | {"done": [1, 1, 1]})
    for stream in (shared(3), shards(3, 0)):
        with pytest.raises(ValueError, match=r"version 7.*version 3.*resume"):
            stream.load_state_dict({"version": 7, "stream": stream.kind})
    with pytest.raises(ValueError, match=r"stream='shard'.*stream='whole'.*resume"):
        shared(3).load_state_dict(shards(3, 0).state_dict())
    with pytest.raises(ValueError, match=r"random access.*stream='whole'.*resume"):
        shared(3).load_state_dict(SharedPermutation(3).state_dict())
    empty = shared(0)
    assert not empty.holds(1)
    with pytest.raises(ValueError, match=r"sample.*every rank.*epoch 0 "):
        empty.take(RoundPlan.of([1, 1]), 0)
    over = shared(2)
    over.take(RoundPlan.of([1, 1]), 0)
    with pytest.raises(ValueError, match=r"epoch.*start the next"):
        over.take(RoundPlan.of([1, 1]), 0)
