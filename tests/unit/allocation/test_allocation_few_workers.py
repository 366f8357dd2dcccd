"""The split of few workers in Python's integers is that of arrays, ties and bounds included."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_hetero.allocation import minimax, water_filling
from hvd_hetero.allocation.few_workers import FEW


def instance(rng: np.random.Generator, n: int, kind: str):
    """Times as they are measured, times of few binary digits (which tie), or slopes of very unlike size and zero."""
    step = int(rng.choice([1, 1, 3, 8]))
    slope = {
        "measured": rng.lognormal(-6, 0.5, n),
        "ties": rng.integers(1, 4, n) / 64.0,
        "unlike": 10.0 ** rng.integers(-9, 3, n) * (rng.random(n) > 0.2),
    }[kind]
    intercept = rng.integers(-3, 6, n) / 32.0 if kind == "ties" else rng.normal(0.02, 0.01, n)
    lower = step * rng.integers(0, 4, n)
    upper = lower + step * rng.integers(0, 60, n)
    total = int(rng.integers(lower.sum() // step, upper.sum() // step + 1)) * step
    return slope, intercept, 0.25, total, lower, upper, step


@pytest.mark.parametrize("kind", ["measured", "ties", "unlike"])
def test_it_is_the_split_that_arrays_find(kind, monkeypatch):
    rng = np.random.default_rng(3)
    instances = [instance(rng, int(rng.integers(1, FEW + 1)), kind) for _ in range(300)]
    few = [minimax(*each) for each in instances]
    monkeypatch.setattr(water_filling, "FEW", 0)
    for each, found in zip(instances, few, strict=True):
        of_arrays = minimax(*each)
        assert found.shares.dtype == np.int64
        assert found.shares.tolist() == of_arrays.shares.tolist()
        assert found.bound_s == of_arrays.bound_s


def test_a_worker_without_a_choice_makes_no_difference_where_arrays_take_over():
    rng = np.random.default_rng(4)
    for _ in range(50):
        slope, total = rng.lognormal(-6, 0.5, FEW), int(rng.integers(FEW, 3000))
        few = minimax(slope, 0.01, 0.0, total, 1, total)
        more = minimax([*slope, 0.5], 0.01, 0.0, total, [1] * FEW + [0], [total] * FEW + [0])
        assert more.shares.tolist() == [*few.shares.tolist(), 0]


def test_times_of_any_size_are_exact():
    """On no grid of 60 bits would the second worker's times differ."""
    assert minimax([1e-300, 3e-320], 0.0, 0.0, 5, 0, 5).shares.tolist() == [0, 5]
    assert minimax([1.0, 1.0], [0.0, 5e-324], 0.0, 3, 0, 3).shares.tolist() == [2, 1]
    assert minimax([1.0, 1.0], [5e-324, 0.0], 0.0, 3, 0, 3).shares.tolist() == [1, 2]
