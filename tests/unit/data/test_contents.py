"""One number for the samples of a round tells apart what ranks must not mix up, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.same_data import contents_of, marks_of
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.rounds import RoundPlan

TOLERANCE = 1e-4  # of the table
RNG = np.random.default_rng(0)
COLUMNS = {
    "pictures": RNG.normal(size=(512, 32, 32, 3)).astype("float32"),
    "bytes": RNG.integers(0, 256, (512, 28, 28), dtype=np.uint8),
    "targets": RNG.normal(size=(512, 1)),
    "two classes": RNG.integers(0, 2, 512),
    "indices": 10**9 + np.arange(512),
    "booleans": RNG.integers(0, 2, 512).astype(bool),
    "strings": np.array([b"sample %d" % i for i in range(512)], dtype=object),
    "complex": RNG.normal(size=(512, 3)) + 1j,
}


def number_of(column, order):
    return contents_of(marks_of(column, np.asarray(order))[:, None])


@pytest.mark.parametrize("name", COLUMNS)
def test_other_samples_and_another_order_make_another_number(name):
    column = COLUMNS[name]
    numbers = [number_of(column, RNG.permutation(512)) for _ in range(20)]
    numbers.append(number_of(column, np.arange(0, 512, 2)))
    apart = np.abs(np.subtract.outer(numbers, numbers)) > TOLERANCE * np.array(numbers)
    assert apart.sum() >= 0.97 * 21 * 20, "in a round of 512; by chance a few are near"
    assert number_of(column, np.arange(512)) == number_of(column.copy(), np.arange(512))


def test_processors_that_round_otherwise_make_nearly_the_same_number():
    x = COLUMNS["pictures"]
    other = x * (1 + 1e-5 * RNG.uniform(-1, 1, x.shape)).astype("float32")
    assert number_of(x, np.arange(512)) == pytest.approx(number_of(other, np.arange(512)), rel=TOLERANCE / 10)


def test_numbers_that_are_none_and_columns_of_nothing_count_nothing():
    x = np.array([[np.nan, 1.0], [np.inf, 2.0], [-np.inf, 3.0]])
    assert np.isfinite(number_of(x, np.arange(3)))
    assert np.isfinite(contents_of(np.zeros((3, 2))))
    assert number_of(np.zeros((3, 0)), np.arange(3)) == number_of(np.zeros((3, 5)), np.arange(3))


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_tells_of_the_samples_of_all_ranks_and_only_if_it_has_marks(stream):
    def rounds(rank, samples, compares=True):
        order = SharedStream(lambda epoch: samples) if stream else SharedPermutation(len(samples))
        if compares:
            order.marks = lambda part: np.array([[float(samples[i] if not stream else i)] for i in part])
        return [order.take(RoundPlan.of([3, 2]), rank).contents for _ in range(2)]

    x = RNG.normal(10, 1, 10).tolist()
    assert rounds(0, x) == rounds(1, x)
    assert all(a != b for a, b in zip(rounds(0, x), rounds(1, x[:3] + x[:2:-1]), strict=True))
    assert rounds(0, x, compares=False) == [0.0, 0.0]
