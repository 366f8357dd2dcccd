"""The mixture: its bound on random and adversarial series, and that it follows whichever member is best."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.prediction import EMA, NARX, Memoryless, Mixture, Reverting
from hvd_hetero.prediction.base import Predictor


class Says(Predictor):
    """Forecasts what it was told."""

    name = "says"

    def __init__(self, forecasts):
        super().__init__()
        self.forecasts = forecasts

    def _observe(self, speed, cpu, memory):
        return

    def _forecast(self, cpu, memory):
        return self.forecasts[self.rounds]

    def _state(self):
        return {}

    def _restore(self, state):
        return


def play(speeds, *forecasts, share=0.001):
    """Run a mixture over the speeds; what it forecast, and itself."""
    mixture = Mixture([Says(list(f)) for f in forecasts], share=share)
    out = []
    for v in speeds:
        out.append(mixture.predict())
        mixture.update(v)
    return np.array(out), mixture


def series(kind, rounds, rng):
    """Speeds and the forecasts of three members."""
    y = rng.normal(0, 0.1, rounds).cumsum() * 0.1 + rng.normal(0, 0.05, rounds)
    x = [np.concatenate([[0.0], y[:-1]]), np.full(rounds, y.mean()), rng.normal(0, 0.3, rounds)]
    if kind == "jumps":
        y = y + 2.0 * (rng.random(rounds) < 0.02)
    if kind == "swap":  # each member is right for a third of the time
        x = [np.where(np.arange(rounds) * 3 // rounds == k, y, y + 0.4) for k in range(3)]
    if kind == "growing":  # a record in nearly every round
        y, x = y * np.linspace(1, 200, rounds), [xk * np.linspace(1, 200, rounds) for xk in x]
    return np.exp(y), [np.exp(xk) for xk in x]


@pytest.mark.parametrize("kind", ["noise", "jumps", "swap", "growing"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05])
def test_the_bound_holds_for_every_member_in_every_round(kind, share):
    speeds, forecasts = series(kind, 300, np.random.default_rng(5))
    mixture = Mixture([Says(list(f)) for f in forecasts], share=share)
    for v in speeds:
        mixture.update(v)
        for regret, bound in zip(mixture.regret, mixture.bound, strict=True):
            assert regret <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("kind", ["noise", "jumps", "swap", "growing"])
def test_the_potential_stays_as_small_as_the_docstring_says(kind):
    speeds, forecasts = series(kind, 300, np.random.default_rng(6))
    mixture = Mixture([Says(list(f)) for f in forecasts])
    records, drift = 0, 0.0
    for v in speeds:
        rates, largest = mixture._rates, mixture._largest
        mixture.update(v)
        if any(mixture._rates):
            records += any(new > old for new, old in zip(mixture._largest, largest, strict=True))
            if any(rates):
                drift += np.mean([old / new - 1 for old, new in zip(rates, mixture._rates, strict=True)]) / math.e
            assert mixture.log_potential <= records / 4 + math.log(1 + drift) + 1e-9


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=60),
    st.sampled_from([0.0, 0.001, 0.2]),
)
def test_regret_of_the_loss_itself_is_bounded_whatever_comes(rounds, share):
    """The excess of squared log error over each member, and over their average, is at most its bound."""
    y, *x = np.array(rounds).T
    forecasts, mixture = play(np.exp(y), *np.exp(x), share=share)
    q = np.log(forecasts[1:])
    bounds = np.array(mixture.bound)
    if np.isinf(bounds).any():
        assert np.allclose(np.max(np.abs((q - y[1:]) * (x[0][1:] - x[1][1:]))), 0.0)
        return
    losses = np.array([(xk[1:] - y[1:]) ** 2 for xk in x])
    excess = np.sum((q - y[1:]) ** 2) - losses.sum(axis=1)
    assert np.all(excess <= bounds + 1e-9)
    average = np.sum((np.mean(x, axis=0)[1:] - y[1:]) ** 2)
    assert np.sum((q - y[1:]) ** 2) - average <= bounds.mean() + 1e-9


def test_the_weight_goes_to_the_member_that_is_right():
    rng = np.random.default_rng(7)
    speeds = rng.uniform(50, 150, 300)
    _, mixture = play(speeds, speeds, rng.uniform(50, 150, 300), np.full(300, 20.0))
    assert mixture.weights[0] > 0.9
    assert sum(mixture.weights) == pytest.approx(1.0)


def test_the_weight_moves_when_another_member_becomes_the_best():
    rng = np.random.default_rng(8)
    y, noise, bias = rng.normal(0, 0.3, 1500), rng.normal(0, 0.1, 1500), np.full(1500, 0.5)
    early = np.arange(1500) < 1400
    first, second = np.exp(y + np.where(early, noise, bias)), np.exp(y + np.where(early, bias, noise))
    _, mixture = play(np.exp(y), first, second)
    assert mixture.weights[1] > 0.8


def test_the_share_keeps_a_bad_member_from_being_buried():
    """e_k never falls below share times the mean, however long a member was bad; without a share it does."""
    floors = []
    for share in (0.001, 0.0):
        mixture = Mixture([EMA(), Memoryless()], share=share)
        for _ in range(500):
            mixture._score([0.0, -1.0])
        floors.append(mixture._log_e[1] - mixture.log_potential)
    assert floors[0] >= math.log(0.001) - 1e-6 > floors[1]


def test_members_whose_errors_cancel_are_averaged():
    speeds = np.full(400, 100.0)
    wobble = np.where(np.random.default_rng(9).random(400) < 0.5, 1.1, 1 / 1.1)
    forecasts, mixture = play(speeds, speeds * wobble, speeds / wobble)
    assert mixture.weights == pytest.approx((0.5, 0.5), abs=0.1)
    assert np.abs(np.log(forecasts[200:] / 100.0)).max() < 0.03


def test_equal_members_keep_equal_weights_and_the_bound_is_still_infinite():
    mixture = Mixture([Memoryless(), EMA(1.0)])
    for v in (3.0, 4.0, 5.0):
        mixture.update(v)
    assert mixture.weights == (0.5, 0.5)
    assert mixture.bound == (math.inf, math.inf)
    assert mixture.regret == (0.0, 0.0)


def test_one_member_is_repeated_exactly():
    mixture, alone = Mixture([EMA()]), EMA()
    for v in np.random.default_rng(10).uniform(1, 9, 50):
        mixture.update(v)
        alone.update(v)
        assert mixture.predict() == pytest.approx(alone.predict())


def test_the_default_has_no_member_twice_and_works_without_drivers():
    mixture = Mixture()
    assert [m.name for m in mixture.members] == ["memoryless", "ema", "reverting", "narx"]
    for v in np.random.default_rng(11).uniform(90, 110, 100):
        mixture.update(v)
    assert 90 < mixture.predict() < 110


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(share=1.0), r"share: must be in \[0, 1\)"),
        (lambda: Mixture([]), "members: must be one predictor or more"),
        (lambda: Mixture(["ema"]), "members: must be one predictor or more"),
        (lambda: Mixture([EMA()] * 2), "members: must be different objects"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_other_members_or_with_bad_numbers_is_refused():
    mixture = Mixture([EMA(), Reverting()])
    for v in (3.0, 4.0, 6.0):
        mixture.update(v)
    state = mixture.state_dict()
    with pytest.raises(ValueError, match=r"members must be \['ema', 'memoryless'\], got \['ema', 'reverting'\]"):
        Mixture([EMA(), Memoryless()]).load_state_dict(state)
    with pytest.raises(ValueError, match="must each hold 2 finite numbers"):
        Mixture([EMA(), Reverting()]).load_state_dict(state | {"log_e": [0.0]})


def test_members_that_use_drivers_are_trusted_from_the_start_where_the_cpu_is_known():
    known, unknown = (Mixture([EMA(), NARX(background=False), Memoryless()]) for _ in range(2))
    known.update(100.0, 0.5, 0.5)
    unknown.update(100.0, None, 0.5)
    assert known.weights == pytest.approx((0.15, 0.7, 0.15))
    assert unknown.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_drivers_that_mean_nothing_cost_little_in_the_end():
    """With random numbers for the CPU, the last hundred rounds are about as good as without drivers."""
    rng = np.random.default_rng(13)
    mixture, plain = Mixture([Memoryless(), EMA(0.5), NARX(background=False)]), EMA(0.5)
    errors = []
    for v in 100.0 * np.exp(rng.normal(0, 0.05, 400)):
        cpu = float(rng.uniform(0.2, 1.0))
        errors.append((mixture.predict(cpu, 0.5) - v, plain.predict() - v))
        mixture.update(v, cpu, 0.5)
        plain.update(v)
    ours, theirs = np.sqrt(np.mean(np.array(errors[300:]) ** 2, axis=0))
    assert ours < 1.1 * theirs
