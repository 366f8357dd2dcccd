"""Memoryless, EMA and Reverting against their own definitions, written out independently."""

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, Memoryless, Reverting


def test_ema_equals_the_weighted_sum_of_all_speeds():
    speeds = np.random.default_rng(1).uniform(50, 150, 30)
    p = EMA(0.2)
    for v in speeds:
        p.update(v)
    ages = np.arange(30)[::-1]
    weights = 0.2 * 0.8**ages
    weights[0] /= 0.2  # the first speed starts the average
    assert p.predict() == pytest.approx(float(weights @ speeds))


def test_reverting_equals_discounted_ridge_regression_over_all_rounds():
    """Solved again on all rounds with weights, where the predictor keeps five sums; as good for the errors before."""
    rng = np.random.default_rng(3)
    y = np.log(100) + np.cumsum(rng.normal(0, 0.005, 60)) + rng.normal(0, 0.01, 60)
    p, prior = Reverting(), np.array([0.2, 0.5])
    level, rows, targets, squares, found = y[0], [], [], [], prior
    for k in range(60):
        p.update(float(np.exp(y[k])))
        if k:
            rows.append((y[max(0, k - 2)] - y[k - 1], level - y[k - 1]))
            targets.append(y[k] - y[k - 1])
            squares.append((targets[-1] - np.array(rows[-1]) @ found) ** 2)
            level += (y[k] - level) / (k + 1)
            a, w = np.array(rows), 0.995 ** np.arange(k)[::-1]
            pull = w @ squares / w.sum() / 0.3**2
            normal = (a.T * w) @ a + pull * np.eye(2)
            found = np.linalg.solve(normal, (a.T * w) @ np.array(targets) + pull * prior)
    features = np.array([y[-2] - y[-1], level - y[-1]])
    assert p.predict() == pytest.approx(float(np.exp(y[-1] + features @ found)), rel=1e-9)


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.05])
def test_reverting_learns_alike_whatever_the_size_of_the_scatter(noise):
    """On noise around a constant speed its error is that of the mean within 5 %, after 100 rounds."""
    rng, squares, p = np.random.default_rng(7), [], Reverting()
    y = rng.normal(0, noise, 600)
    for k, v in enumerate(np.exp(y)):
        if k > 100:
            squares.append(np.log(p.predict() / v) ** 2)
        p.update(v)
    assert np.sqrt(np.mean(squares)) < 1.05 * np.sqrt(np.mean((y[101:]) ** 2))


def test_reverting_unlearns_what_speeds_did_long_ago():
    """3,000 rounds of noise and then a walk, on which it is at most 5 % worse than memoryless after 300 rounds."""
    rng = np.random.default_rng(8)
    y = np.concatenate([rng.normal(0, 0.03, 3000), rng.normal(0, 0.03, 900).cumsum()])
    ours, last, squares = Reverting(), Memoryless(), []
    for k, v in enumerate(100.0 * np.exp(y)):
        if k > 3300:
            squares.append((np.log(ours.predict() / v) ** 2, np.log(last.predict() / v) ** 2))
        ours.update(v)
        last.update(v)
    error, of_memoryless = np.sqrt(np.mean(squares, axis=0))
    assert error < 1.05 * of_memoryless


def test_reverting_without_any_movement_keeps_its_prior():
    p = Reverting()
    for _ in range(50):
        p.update(80.0)
    p.update(100.0)
    assert p.predict() == pytest.approx(
        np.exp(0.3 * np.log(100.0) + 0.2 * np.log(80.0) + 0.5 * p.state_dict()["level"])
    )


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


def following(rounds, follows, seed=3):
    """Speeds that follow this power of the CPU, which changes every 20 rounds and is read with an error."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.choice([0.3, 0.45, 0.7, 0.95], rounds // 20 + 1), 20)[:rounds]
    speeds = 200.0 * levels**follows * np.exp(0.01 * rng.normal(size=rounds))
    read = np.minimum(levels * np.exp(0.01 * rng.normal(size=rounds)), 1.0)
    return list(zip(speeds.tolist(), read.tolist(), strict=True))


def log_error(p, rows, skip=200):
    squares = []
    for k, (speed, cpu) in enumerate(rows):
        if k >= skip:
            squares.append(np.log(p.predict(cpu) / speed) ** 2)
        p.update(speed, cpu)
    return float(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize(("follows", "of_blind"), [(1.0, 0.2), (0.5, 0.3), (0.0, 1.02)])
def test_reverting_with_drivers_learns_how_much_of_the_cpu_reaches_the_speed(follows, of_blind):
    rows = following(800, follows)
    assert log_error(Reverting(drivers=True), rows) < of_blind * log_error(Reverting(), rows)


def test_reverting_with_drivers_forecasts_the_first_round_of_the_first_change():
    p = Reverting(drivers=True)
    for _ in range(60):
        p.update(100.0, 0.8)
    assert p.predict(0.4) == pytest.approx(50.0)


def test_reverting_with_drivers_goes_on_by_speeds_while_the_cpu_is_not_known():
    p, speeds = Reverting(drivers=True), 100.0 * np.exp(np.random.default_rng(9).normal(0, 0.03, 200))
    for v in speeds:
        p.update(float(v))
    assert p.predict(0.5) == p.predict()
    assert p.predict() == pytest.approx(100.0, rel=0.05)


def fed(p, cpu=None):
    p.update(3.0, cpu)
    return p.state_dict()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *((lambda alpha=alpha: EMA(alpha), "alpha") for alpha in (0.0, -0.1, 1.1, float("nan"))),
        (lambda: EMA().load_state_dict(fed(EMA()) | {"mean": -2.0}), "mean"),
        (lambda: Reverting().load_state_dict(fed(Reverting()) | {"coefficients": [float("inf"), 0.0]}), "coefficients"),
        (lambda: Reverting().load_state_dict(fed(Reverting(drivers=True), 0.5)), "coefficients"),
    ],
)
def test_options_and_states_that_cannot_be_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_options_are_the_objects_own_and_not_the_states():
    slow, quick = EMA(0.2), EMA(0.5)
    for v in (100.0, 120.0, 90.0):
        slow.update(v)
    quick.load_state_dict(slow.state_dict())
    assert quick.predict() == slow.predict()
    quick.update(200.0)
    assert quick.predict() == pytest.approx(0.5 * slow.predict() + 100.0)
