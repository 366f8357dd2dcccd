"""Ranks that part are told so: to the bit where processors are alike, else beyond what rounding explains."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_hetero.consistency import PIECE, Agreement, WatchedParameter, kernels, norm_and_checksum
from hvd_hetero.errors import PlanMismatchError
from hvd_hetero.rounds import RoundReport, RoundTable

NAMES = ["first", "second", "third"]


def table(parameter_norm, bits, kernels):
    rows = []
    for size, check, kind in zip(parameter_norm, bits, kernels, strict=True):
        known = dict.fromkeys(("samples", "micro_batches", "compute_s", "input_s", "wait_s", "samples_per_s"), 1.0)
        rows.append(
            RoundReport(
                **known, cpu=1, memory=1, fingerprint=1, settings=1, parameter_norm=size, bits=check, kernels=kind
            )
        )
    return RoundTable(sum(row.vector(rank, len(rows), np.float32) for rank, row in enumerate(rows)), len(rows))


class Ranks:
    """Three ranks' tables of three parameters, one after the other."""

    def __init__(self, *kernels, names=NAMES, width=4):
        self.agreement, self.round, self.kernels = Agreement(), 0, kernels
        self.agreement.watch([WatchedParameter(name, 5, width) for name in names])
        self.show([0.0] * 3, [0.0] * 3)

    def show(self, parameter_norm, bits):
        self.agreement.require(self.round, table(parameter_norm, bits, self.kernels))
        self.round += 1

    def alike(self, rounds):
        for _ in range(rounds):
            self.show([2.0] * 3, [5.0] * 3)


def test_once_like_ranks_agree_to_the_bit_a_later_difference_is_told_at_once():
    ranks = Ranks(7, 7, 7)
    ranks.alike(12)
    with pytest.raises(PlanMismatchError, match=r"round 13: ranks \[2\].* parameters.*rank 0 .*'second'.*last bits"):
        ranks.show([2.0] * 3, [5, 5, 6])


def test_the_size_of_a_difference_is_told():
    ranks = Ranks(7, 7, 7)
    ranks.alike(12)
    with pytest.raises(PlanMismatchError, match=r"ranks \[1\].* parameters.*rank 0 .*'second'.* 1\.0e-0[56]"):
        ranks.show([2.0, 2.00002, 2.0], [5, 6, 5])


def test_ranks_on_other_processors_may_round_differently_however_long_their_bits_were_the_same():
    ranks = Ranks(7, 7, 8)
    ranks.alike(1000)
    for _ in range(1000):
        ranks.show([2.0, 2.0, 2.0 + 4e-7], [5, 5, 6])


def test_a_last_bit_of_half_precision_is_no_difference_of_unlike_processors():
    ranks = Ranks(7, 7, 8, width=2)
    for _ in range(20):
        ranks.show([2.0, 2.0, 2.0 * (1 + 5e-4)], [5, 5, 6])
    with pytest.raises(PlanMismatchError, match=" parameters"):
        ranks.show([2.0, 2.0, 2.0 * (1 + 2e-3)], [5, 5, 6])


def test_like_processors_that_round_differently_from_the_beginning_are_not_held_to_their_bits():
    ranks = Ranks(7, 7, 7)
    for rounds in range(1000):
        ranks.show([2.0] * 3, [5, 5, 5 + rounds % 5])


@pytest.mark.parametrize("told_bits", [[5, 5, 5], [5, 5, 6]])
def test_what_rounding_explains_grows_with_the_rounds_since_the_bits_were_the_same(told_bits):
    """A walk of the differences as rounding makes it is no error, and a jump is one."""
    walk = np.cumsum(np.random.default_rng(3).normal(scale=1e-7, size=2000))
    ranks = Ranks(7, 7, 8)
    for step in walk:
        ranks.show([2.0, 2.0, 2.0 * (1 + step)], [5, 5, 6])
    close = Ranks(7, 7, 8)
    for _ in range(10):
        close.show([2.0] * 3, told_bits)
    with pytest.raises(PlanMismatchError, match=r" parameters.*rank 0"):
        close.show([2.0, 2.0, 2.0 * (1 + 3.3e-5)], [5, 5, 6])


def test_a_parameter_that_passes_through_zero_is_measured_by_what_it_was():
    ranks = Ranks(7, 7, 8, names=["bias"])
    for size in np.cos(np.linspace(0, 20, 500)):
        ranks.show([size, size, size + 2e-7], [5, 5, 6])


def test_a_rank_that_shows_nothing_agrees_with_all():
    ranks = Ranks(7, 7, 7)
    for _ in range(12):
        ranks.show([0.0, 2.0, 2.0], [7, 5, 5])
    with pytest.raises(PlanMismatchError, match=r"ranks \[2\].* parameters.*rank 1"):
        ranks.show([0.0, 2.0, 3.0], [7, 5, 6])


@pytest.mark.parametrize("kernels", [(7, 7, 7), (7, 7, 8)])
def test_parameters_that_are_not_finite_on_all_ranks_are_no_sign_of_ranks_that_part(kernels):
    ranks = Ranks(*kernels)
    for _ in range(20):
        ranks.show([math.nan] * 3, [5, 5, 6])
    with pytest.raises(PlanMismatchError, match=r"ranks \[2\].* parameters"):
        ranks.show([2.0, 2.0, math.nan], [5, 5, 6])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 3, 8, 1001, PIECE])
def test_the_checksum_sees_the_last_bit_of_any_number_and_what_changes_places(dtype, length):
    generator = np.random.default_rng(length)
    numbers = generator.normal(size=length).astype(dtype)
    size, bits = norm_and_checksum(numbers, numbers.view(np.uint8))
    assert 0 <= bits < 2**24
    assert size != 0.0
    for at in {0, length // 2, length - 1}:
        other = numbers.copy()
        other[at] = np.nextafter(other[at], dtype(9))
        assert norm_and_checksum(other, other.view(np.uint8))[1] != bits
    if length > 1:
        other = np.roll(numbers, 1)
        assert norm_and_checksum(other, other.view(np.uint8))[1] != bits


def test_kernels_are_told_apart_by_what_a_framework_says_of_them():
    assert kernels("2.9", 1) == kernels("2.9", 1) != kernels("2.9", 2)
