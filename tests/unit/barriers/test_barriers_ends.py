"""The prediction of future ends from recent intervals."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_hetero.barriers import predict_ends, zipline


def test_constant_intervals_continue():
    """R multiples of each worker's interval, from time 0."""
    assert predict_ends([1.0, 2.5], 3).tolist() == [[1.0, 2.0, 3.0], [2.5, 5.0, 7.5]]


def test_starts_after_the_last_end():
    """Every worker's ends follow its own last one, or one that is common to all."""
    assert predict_ends([1.0, 2.0], 2, last_end_s=[10.0, 11.0]).tolist() == [[11.0, 12.0], [13.0, 15.0]]
    assert predict_ends([1.0, 2.0], 1, last_end_s=10.0).tolist() == [[11.0], [12.0]]


def test_one_hiccup_changes_nothing():
    """The median of the recent intervals ignores one that was ten times as long."""
    assert predict_ends([[1.0, 1.0, 10.0, 1.0, 1.0]], 2).tolist() == [[1.0, 2.0]]


def test_missing_measurements_are_left_out():
    """NaN is a position without a measurement."""
    assert predict_ends([[np.nan, 2.0, np.nan], [1.0, 3.0, 2.0]], 1).tolist() == [[2.0], [2.0]]


def test_what_is_predicted_can_be_searched():
    """The matrix is one that a search takes, and the fast worker gets more iterations."""
    barrier = zipline(predict_ends([1.0, 3.0], 15))
    assert (barrier.index + 1).tolist() == [3, 1]
    assert barrier.wait == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], 0), "lookahead must be at least 1, got 0"),
        (([], 3), "not empty"),
        (([[[1.0]]], 3), "got shape"),
        (([[1.0, 2.0], [np.nan, np.nan]], 3), "only NaN for worker 1"),
        (([1.0, 0.0], 3), "positive and finite, got 0.0 at worker 1"),
        (([[1.0, -2.0]], 3), "got -2.0 at worker 0, position 1"),
        (([1.0, np.inf], 3), "got inf"),
        (([1.0, 2.0], 3, [0.0, 0.0, 0.0]), "one for each of the 2 workers"),
        (([1.0, 2.0], 3, np.nan), "one finite number"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    """Each error names the parameter, the rule and the value."""
    with pytest.raises(ValueError, match=message):
        predict_ends(*arguments)


@pytest.mark.parametrize("lookahead", [2.5, 2.0, float("nan"), "2"])
def test_a_lookahead_that_is_no_integer_is_refused(lookahead):
    """A number of ends is an integer: 2.5 is an error and not 3."""
    with pytest.raises(TypeError, match="lookahead must be an integer, got"):
        predict_ends([1.0, 2.0], lookahead)
