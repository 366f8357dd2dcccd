"""Rounds from data without random access, against the permutation that deals the same samples."""

import json

import pytest

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.reading import Mark
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.rounds import RoundPlan


def shared(length: int, least: int = 1, readers: int = 0) -> SharedStream:
    return SharedStream(lambda epoch: range(1000 * epoch, 1000 * epoch + length), least, depends_on=readers)


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
    shorter = shared(5)
    shorter.load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match=r"state.* 9 samples.* 5\b.*resume"):
        shorter.holds(1)


def test_a_state_is_small_however_many_samples_are_done_since_the_last_mark():
    stream = shared(5_000)
    for _ in range(400):
        stream.take(RoundPlan.of([5, 5]), 0)
        stream.finish([5, 5])
    assert len(json.dumps(stream.state_dict())) < 200


def test_the_next_epoch_reads_the_next_pass():
    stream = shared(4)
    stream.start(1)
    assert stream.take(RoundPlan.of([2, 2]), 1).part == [1002, 1003]


def marked(length: int, every: int) -> SharedStream:
    """A stream that can be opened again after each so many samples."""

    def read(epoch, at=0):
        for number in range(at, length):
            if number % every == 0:
                yield Mark(number)
            read.samples.append(number)
            yield number

    read.samples = []
    stream = SharedStream(read)
    stream.read = read
    return stream


@pytest.mark.parametrize("rounds", range(9))
def test_a_stream_goes_on_from_its_own_state_and_reads_again_what_is_not_done_since(rounds):
    """Rank 1 leaves some undone in each round, so what is done has holes."""
    stream, plan = marked(60, every=5), RoundPlan((3, 4), (3, 4), "first")
    done = []
    for _ in range(rounds):
        part = stream.take(plan, 0).part + stream._open[-1][1][3:]
        done += part[:3] + [number for number, _ in part[3:5]]
        stream.finish([3, 2])
    stream.take(plan, 0)  # in flight, and so not done
    resumed = marked(60, every=5)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    while resumed.holds(1):
        cut = resumed.take(RoundPlan.of([4]), 0)
        done += cut.part
        resumed.finish([len(cut.part)])
    assert sorted(done) == list(range(60))
    first = next(number for number in range(60) if number not in done[: 5 * rounds])
    assert min(resumed.read.samples) == first // 5 * 5, "from the last mark before what is not done"


def test_mistakes_are_told_with_a_remedy():
    with pytest.raises(ValueError, match=r"version 7.*version 5.*resume"):
        shared(3).load_state_dict({"version": 7, "stream": "whole"})
    with pytest.raises(ValueError, match=r"stream='shard'.*stream='whole'.*resume"):
        shared(3).load_state_dict({"version": 5, "stream": "shard"})
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
