"""Buckets: every gradient once, limits kept, and nothing decided by what ranks do not share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_hetero.communication.bucket_sizes import ALONE_FROM_BYTES, BUCKET_BYTES, BUCKET_GRADIENTS, divide


def sizes_of(seed: int, count: int) -> list[int]:
    """Between a few bytes and a few times the largest bucket, small ones as frequent as large ones."""
    return [int(2**x) for x in np.random.default_rng(seed).uniform(2, 24, count)]


def room_of(to_come: int) -> int:
    """Bytes of a bucket that is opened when so many are still to come."""
    return to_come if to_come < ALONE_FROM_BYTES else min(BUCKET_BYTES, to_come // 2)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 300])
@pytest.mark.parametrize("seed", range(5))
def test_buckets_hold_every_gradient_once_in_order_and_keep_their_limits(seed, count):
    sizes = sizes_of(seed, count)
    buckets = divide(sizes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(count))
    assert all(bucket == sorted(bucket) for bucket in buckets)
    last = [bucket[-1] for bucket in buckets]
    assert last == sorted(last), "they come as they fill"
    for bucket in buckets:
        assert len(bucket) <= BUCKET_GRADIENTS
        if len(bucket) > 1:
            assert sum(sizes[i] for i in bucket) <= room_of(sum(sizes[bucket[0] :]))
            assert max(sizes[i] for i in bucket) < ALONE_FROM_BYTES


@pytest.mark.parametrize("sizes", [[0], [0, 8, 2 * ALONE_FROM_BYTES], [2 * ALONE_FROM_BYTES, 0], [8, 0, 8]])
def test_gradients_without_any_number_are_in_a_bucket_too(sizes):
    assert sorted(i for bucket in divide(sizes) for i in bucket) == list(range(len(sizes)))


@pytest.mark.parametrize("seed", range(10))
def test_a_bucket_is_left_open_no_longer_than_it_must_be_and_closed_no_sooner(seed):
    """A small gradient opens a bucket only where the one before had no room for it."""
    sizes = sizes_of(seed, 300)
    small = [bucket for bucket in divide(sizes) if sizes[bucket[0]] < ALONE_FROM_BYTES]
    small.sort(key=lambda bucket: bucket[0])
    for one, other in itertools.pairwise(small):
        assert one[-1] < other[0], "one is open at a time"
        room = room_of(sum(sizes[one[0] :])) - sum(sizes[i] for i in one)
        assert len(one) == BUCKET_GRADIENTS or sizes[other[0]] > room


def test_large_gradients_go_alone_and_small_ones_between_them_together():
    """Five dense layers, the last first: kernels by themselves, all biases with the last of them."""
    assert divide([4096, 2**22] * 5) == [[1], [3], [5], [7], [0, 2, 4, 6, 8], [9]]


def test_equal_small_gradients_halve_what_is_to_come_towards_the_end():
    size = ALONE_FROM_BYTES // 4
    lengths = [len(bucket) for bucket in divide([size] * 100)]
    assert lengths[:2] == [BUCKET_BYTES // size] * 2
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert ALONE_FROM_BYTES <= 2 * lengths[-1] * size < 2 * ALONE_FROM_BYTES, "the rest is not worth dividing"


def test_many_tiny_gradients_are_cut_by_their_number():
    assert [len(bucket) for bucket in divide([4] * 100)] == [
        BUCKET_GRADIENTS,
        BUCKET_GRADIENTS,
        BUCKET_GRADIENTS,
        100 - 3 * BUCKET_GRADIENTS,
    ]


def test_kinds_do_not_mix_and_each_has_its_own_open_bucket():
    kinds = ["float32", "float64"] * 6
    buckets = divide([8] * 12, kinds)
    assert buckets == [list(range(0, 12, 2)), list(range(1, 12, 2))]
