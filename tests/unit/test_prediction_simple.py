"""Memoryless, EMA and Reverting against their own definitions, written out independently."""

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, Memoryless, Reverting


def test_memoryless_predicts_the_last_speed():
    p = Memoryless()
    p.update(3.0)
    p.update(5.0)
    assert p.predict() == 5.0


def test_ema_equals_the_weighted_sum_of_all_speeds():
    speeds = np.random.default_rng(1).uniform(50, 150, 30)
    p = EMA(0.2)
    for v in speeds:
        p.update(v)
    ages = np.arange(30)[::-1]
    weights = 0.2 * 0.8**ages
    weights[0] /= 0.2  # the first speed starts the average
    assert p.predict() == pytest.approx(float(weights @ speeds))


def test_ema_with_alpha_one_is_memoryless():
    p = EMA(1.0)
    for v in (3.0, 9.0, 4.0):
        p.update(v)
        assert p.predict() == v


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_ema_refuses_an_alpha_outside_its_range(alpha):
    with pytest.raises(ValueError, match=r"alpha: the weight of the latest speed must be in \(0, 1\], got"):
        EMA(alpha)


def test_ema_refuses_a_state_whose_mean_is_no_speed():
    state = EMA().state_dict() | {"mean": -2.0}
    with pytest.raises(ValueError, match="state: mean must be a speed"):
        EMA().load_state_dict(state)


def test_mean_squared_errors_on_noise_are_those_of_the_docstrings():
    """2 s² for the last value and 2 / (2 - alpha) s² for the average, around a constant speed."""
    noise = np.random.default_rng(2).normal(0.0, 1.0, 20_000)
    for p, expected in ((Memoryless(), 2.0), (EMA(0.2), 2.0 / 1.8)):
        squares = []
        for v in 100.0 + noise:
            if p.rounds > 50:
                squares.append((p.predict() - v) ** 2)
            p.update(v)
        assert np.mean(squares) == pytest.approx(expected, rel=0.03)


def test_reverting_equals_ridge_regression_over_all_rounds():
    rng = np.random.default_rng(3)
    y = np.log(100) + np.cumsum(rng.normal(0, 0.01, 60)) + rng.normal(0, 0.05, 60)
    p = Reverting()
    for v in np.exp(y):
        p.update(v)
    level, rows, targets = y[0], [], []
    for k in range(1, 61):
        features = (y[max(0, k - 2)] - y[k - 1], level - y[k - 1])
        if k < 60:
            rows.append(features)
            targets.append(y[k] - y[k - 1])
            level += (y[k] - level) / min(k + 1, 100)
    a = np.array(rows)
    coefficients = np.linalg.solve(a.T @ a + np.eye(2) / 100.0, a.T @ np.array(targets))
    assert p.predict() == pytest.approx(float(np.exp(y[-1] + np.array(features) @ coefficients)), rel=1e-9)


def test_reverting_learns_that_a_spike_passes():
    p = Reverting()
    rng = np.random.default_rng(4)
    for _ in range(200):
        p.update(100.0 * np.exp(rng.normal(0, 0.1)))
    p.update(50.0)
    assert 85.0 < p.predict() < 110.0


def test_one_round_a_thousand_times_too_slow_does_not_end_what_reverting_learns():
    """From 30 rounds after it on, at most a fiftieth worse than its twin that never saw it."""
    rng = np.random.default_rng(5)
    squares = []
    hit, spared = Reverting(), Reverting()
    for k, v in enumerate(100.0 * np.exp(rng.normal(0, 0.05, 400))):
        if k >= 90:
            squares.append(((hit.predict() - v) ** 2, (spared.predict() - v) ** 2))
        hit.update(v / 1000.0 if k == 60 else v)
        spared.update(v)
    ours, theirs = np.sqrt(np.mean(squares, axis=0))
    assert ours <= 1.02 * theirs


def test_reverting_takes_in_a_lasting_change_of_scale():
    """A tenfold speed is forecast from the next rounds on, whatever counts as out of proportion."""
    p = Reverting()
    for v in 100.0 * np.exp(np.random.default_rng(6).normal(0, 0.03, 100)):
        p.update(v)
    for _ in range(12):
        p.update(1000.0)
    assert p.predict() == pytest.approx(1000.0, rel=0.05)


def test_reverting_refuses_a_state_with_infinite_numbers():
    p = Reverting()
    p.update(3.0)
    with pytest.raises(ValueError, match="must be finite"):
        Reverting().load_state_dict(p.state_dict() | {"coefficients": [float("inf"), 0.0]})
