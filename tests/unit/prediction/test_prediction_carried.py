"""A forecast carried along by the CPU: in the round of a jump, under noise, and where the driver is worth nothing."""

import math

import numpy as np
import pytest

from hvd_hetero.prediction import EMA, NARX, Carried, Memoryless, Reverting


def series(rounds=400, *, noise=0.03, scatter=0.01, follows=1.0, seed=3, length=20):
    """A CPU that jumps every ``length`` rounds, as read with ``noise``; speeds follow it with ``scatter``."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.choice([0.3, 0.45, 0.7, 0.95], rounds // length + 1), length)[:rounds]
    speeds = 200.0 * levels**follows * np.exp(scatter * rng.normal(size=rounds))
    read = np.minimum(levels * np.exp(noise * rng.normal(size=rounds)), 1.0)
    return list(zip(speeds.tolist(), read.tolist(), levels.tolist(), strict=True))


def errors(predictor, rows, skip=50):
    """|log forecast - log speed| of each round after the first few."""
    found = []
    for k, (speed, cpu, _) in enumerate(rows):
        if k >= skip:
            found.append(abs(math.log(predictor.predict(cpu) / speed)))
        predictor.update(speed, cpu)
    return np.array(found)


def rms(predictor, rows):
    return float(np.sqrt(np.mean(errors(predictor, rows) ** 2)))


def test_the_round_of_a_jump_is_forecast_within_the_scatter_of_one_reading():
    rows = series(800)
    jumped = [k - 50 for k in range(50, len(rows)) if rows[k][2] != rows[k - 1][2]]
    ours, blind = errors(Carried(), rows), errors(Reverting(), rows)
    assert len(jumped) > 10
    assert np.median(ours[jumped]) < 0.04  # noise of a reading, less that of the mean before it
    assert np.median(blind[jumped]) > 0.3


def test_a_cpu_that_changes_within_a_round_is_taken_from_the_speeds_before_that_round():
    """The round before the jump runs half at either speed; then, and from then on, it is as if it had not been."""
    predictor = Carried(EMA(0.5))
    for speed, cpu in [(100.0, 0.8)] * 10 + [(75.0, 0.8)]:
        predictor.update(speed, cpu)
    assert predictor.predict(0.4) == pytest.approx(50.0)
    assert predictor.predict(0.8) == pytest.approx(87.5), "a slow round, as far as the driver tells"
    predictor.update(50.0, 0.4)
    assert predictor.predict(0.4) == pytest.approx(50.0, rel=1e-3)


def test_after_two_jumps_in_a_row_the_speed_between_them_is_kept():
    predictor = Carried(Memoryless())
    for speed, cpu in [(100.0, 0.8)] * 10 + [(40.0, 0.4)]:
        predictor.update(speed, cpu)
    followed = predictor.followed
    assert predictor.predict(0.3) == pytest.approx(40.0 * 0.75**followed, rel=1e-2)


def test_the_scatter_of_the_driver_stays_out_of_the_forecasts_between_jumps():
    rows = series()
    calm = [k - 50 for k in range(50, len(rows)) if all(rows[k][2] == rows[k - i][2] for i in range(1, 4))]
    ours = errors(Carried(), rows)[calm]
    trusting = errors(NARX(background=False), rows)[calm]
    assert np.sqrt(np.mean(ours**2)) < 0.02
    assert np.sqrt(np.mean(ours**2)) < 0.7 * np.sqrt(np.mean(trusting**2))


def test_jumps_of_a_driver_that_says_nothing_are_soon_believed_no_more():
    rows = series(1200, follows=0.0)
    ours, blind = (errors(predictor, rows, skip=600) for predictor in (Carried(), Reverting()))
    assert np.mean(ours**2) < 1.2**2 * np.mean(blind**2)


def test_noise_of_a_driver_is_not_followed():
    rng = np.random.default_rng(5)
    speeds, cpus = np.exp(0.02 * rng.normal(size=300)) * 90, 0.6 + 0.05 * rng.normal(size=300)
    rows = [(float(v), float(c), 0.0) for v, c in zip(speeds, cpus, strict=True)]
    assert rms(Carried(), rows) < 1.1 * rms(Reverting(), rows)


@pytest.mark.parametrize("follows", [0.0, 0.5, 1.0])
def test_how_much_of_a_jump_reaches_the_speed_is_learnt(follows):
    predictor = Carried()
    for speed, cpu, _ in series(800, follows=follows):
        predictor.update(speed, cpu)
    assert predictor.followed == pytest.approx(follows, abs=0.06)


def test_beta_is_the_ridge_regression_of_its_docstring():
    """Without noise, on ``Memoryless``: z and J are known by hand, but for the thousandth that L loses every round."""
    predictor = Carried(Memoryless())
    speeds, cpus = [100.0] * 8 + [60.0, 60.0, 110.0], [0.8] * 8 + [0.4, 0.4, 0.8]
    for speed, cpu in zip(speeds, cpus, strict=True):
        predictor.update(speed, cpu)
    tau, jump = math.log(2) ** 2, math.log(0.5)
    products = 0.9 * jump * math.log(0.6) - jump * math.log(110 / 60)
    assert predictor.followed == pytest.approx((0.81 * tau + products) / (0.81 * tau + 1.9 * jump**2), abs=1e-3)


def test_what_a_jump_is_said_to_have_done_is_at_most_twice_its_size():
    predictor = Carried(Memoryless())
    for speed, cpu in [(100.0, 0.8)] * 8 + [(1.0, 0.4)]:
        predictor.update(speed, cpu)
    assert predictor.followed == pytest.approx(2.9 / 1.9), "(0.9 τ + 2 J²) / (0.9 τ + J²), where J² is τ"


def test_a_reading_gone_astray_costs_two_rounds():
    rows = [(100.0, 0.8, 0.0)] * 60 + [(100.0, 0.4, 0.0)] + [(100.0, 0.8, 0.0)] * 20
    found = errors(Carried(), rows)
    assert found[10] > 0.5  # believed
    assert found[13:].max() < 0.05


@pytest.mark.parametrize(("before", "then"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_forecast_stays_near_the_speeds_that_were_seen_whatever_the_driver_says(before, then):
    predictor = Carried()
    for _ in range(20):
        predictor.update(100.0, before)
    assert 49.9 < predictor.predict(then) < 200.1


def test_a_driver_that_sinks_slowly_and_leaps_back_does_not_lead_the_forecast_away():
    rng, rows = np.random.default_rng(8), []
    for k in range(30_000):
        cpu = 1.0 - 0.01 * (k % 60)
        rows.append((float(100 * cpu * np.exp(0.01 * rng.normal())), cpu, 0.0))
    ours, blind = Carried(), Reverting()
    assert rms(ours, rows) < rms(blind, rows)
    assert abs(ours._carried) < 50


def test_a_rank_whose_cpu_is_not_known_is_forecast_by_speeds():
    rows = [(speed, math.nan, level) for speed, _, level in series()]
    assert errors(Carried(), rows).tolist() == pytest.approx(errors(Reverting(), rows).tolist())


def test_what_needs_the_driver_itself_is_refused():
    with pytest.raises(ValueError, match="of: must be a predictor that does without drivers"):
        Carried(NARX())


def test_a_state_with_what_is_not_finite_is_refused():
    predictor = Carried()
    predictor.update(100.0, 0.5)
    with pytest.raises(ValueError, match="three finite numbers"):
        predictor.load_state_dict(predictor.state_dict() | {"carried": [math.inf, 0.0, 0.0]})


def test_a_state_is_loaded_as_a_whole_or_not_at_all():
    predictor, other = Carried(), Carried()
    for _ in range(9):
        predictor.update(100.0, 0.5)
    state = predictor.state_dict()
    with pytest.raises(ValueError, match="last must be a positive speed"):
        other.load_state_dict(state | {"of": state["of"] | {"last": 0.0}})
    for wrong in ({"mean": [0.0, 3]}, {"mean": [0.5, 0]}, {"distances": [-1.0]}, {"distances": [0.1] * 99}):
        with pytest.raises(ValueError, match=r"mean must be in \(0, 1\] .* at most 20 numbers"):
            other.load_state_dict(state | {"jumps": state["jumps"] | wrong})
    assert math.isnan(other.predict(0.5))
    assert other.of.rounds == 0
