"""What every predictor must do, whatever its method. A new predictor joins by being in the registry."""

import importlib.util
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.prediction import (
    ARIMA,
    EMA,
    LSTM,
    NARX,
    PREDICTORS,
    Memoryless,
    Mixture,
    Predictor,
    Reverting,
    SimpleRNN,
    predictor,
)
from hvd_hetero.testing.predictors import PredictorConformance, feed, walk

# Small windows and early training, so that every phase of a life is met within a hundred rounds.
MAKERS = {
    "memoryless": Memoryless,
    "ema": EMA,
    "reverting": Reverting,
    "arima": lambda: ARIMA(window=60, refit_every=30),
    "simple_rnn": lambda: SimpleRNN(window=40, retrain_every=20, steps=5),
    "lstm": lambda: LSTM(window=40, retrain_every=20, steps=5),
    "narx": lambda: NARX(warm_start=None, rounds_from_scratch=30, retrain_every=20, window=60, background=False),
    "mixture": lambda: Mixture(
        [Memoryless(), EMA(0.5), Reverting(drivers=True), NARX(retrain_every=20, window=60, background=False)]
    ),
}
NEEDS = {"arima": "statsmodels", "simple_rnn": "torch", "lstm": "torch"}


def _param(name):
    missing = name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None
    return pytest.param(name, marks=[pytest.mark.skipif(missing, reason=f"needs the extra with {NEEDS.get(name)}")])


every = pytest.mark.parametrize("name", [_param(name) for name in MAKERS])


def test_every_registered_predictor_is_in_the_suite():
    assert set(MAKERS) == set(PREDICTORS)


@every
@pytest.mark.parametrize("rule", [name for name in dir(PredictorConformance) if name.startswith("test_")])
def test_it_holds_the_rules_of_the_public_suite(name, rule):
    class Suite(PredictorConformance):
        def make(self):
            return MAKERS[name]()

    getattr(Suite(), rule)()


class Believes(Memoryless):
    """Takes what is no measurement for one."""

    def update(self, speed, cpu=None, memory=None):
        super().update(speed if speed > 0 else 1.0, cpu, memory)


class Counts(Memoryless):
    """Changes its forecast with each question."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def _forecast(self, cpu, memory):
        self.asked += 1
        return self._last * (1 + 0.001 * self.asked)


class Forgets(EMA):
    def _restore(self, state):
        self._mean = 0.0


class DrawsLots(Memoryless):
    _numbers = itertools.count()

    def _forecast(self, cpu, memory):
        return self._last * (1 + 0.001 * next(self._numbers))


class Overshoots(Memoryless):
    def predict(self, cpu=None, memory=None):
        return 3.0 * super().predict(cpu, memory)


class Trusts(Memoryless):
    def load_state_dict(self, state):
        self.rounds = state["rounds"]


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Believes, "test_what_is_no_speed_is_ignored"),
        (Counts, "test_predicting_changes_nothing"),
        (DrawsLots, "test_built_alike_and_fed_alike_it_predicts_alike"),
        (Forgets, "test_its_state_is_plain_data_and_a_successor_goes_on_as_it_would"),
        (Trusts, "test_a_foreign_state_is_refused"),
        (Overshoots, "test_a_forecast_stays_near_the_speeds_that_were_measured"),
        (Overshoots, "test_a_constant_speed_is_predicted_after_few_rounds"),
    ],
)
def test_a_predictor_that_breaks_a_rule_is_found(broken, rule):
    class Suite(PredictorConformance):
        def make(self):
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), rule)()


@every
@settings(max_examples=15)
@given(speeds=st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=45))
def test_any_speeds_give_finite_positive_forecasts(name, speeds):
    p = MAKERS[name]()
    for k, speed in enumerate(speeds):
        p.update(speed, (k % 10) / 10, 0.5)
        forecast = p.predict((k % 7) / 7, 0.5)
        assert math.isfinite(forecast)
        assert forecast > 0


def test_a_forecast_far_from_all_that_was_measured_is_brought_back():
    class Wild(Memoryless):
        def _forecast(self, cpu, memory):
            return 1e6 * cpu

    p = Wild()
    for speed in (40.0, 70.0):
        p.update(speed)
    assert (p.predict(1.0), p.predict(1e-6)) == (140.0, 20.0)
    assert p.predict(60e-6) == pytest.approx(60.0)


@pytest.mark.parametrize("name", ["memoryless", "ema", "reverting", "narx", "mixture"])
def test_the_largest_speeds_there_are_give_finite_forecasts(name):
    """The baselines are left out: numpy warns of their sums."""
    p = MAKERS[name]()
    for k in range(60):
        p.update(1.7e308 if k % 3 == 2 else 0.8e308, 0.2 if k % 3 else 0.9, 0.5)
        assert 0 < p.predict(1.0, 0.5) < math.inf


@every
def test_forecasts_scale_with_the_unit_of_speed(name):
    rounds = walk(80)
    small = feed(MAKERS[name](), rounds)
    large = feed(MAKERS[name](), [(1024.0 * v, c, m) for v, c, m in rounds])
    np.testing.assert_allclose(large[1:], [1024.0 * f for f in small[1:]], rtol=2e-2)


@every
def test_the_registry_builds_it_by_name_by_class_and_leaves_an_object_alone(name):
    p = predictor(name)
    assert type(p).__name__ == PREDICTORS[name]
    assert p.name == name
    assert type(predictor(f" {name.upper().replace('_', '-')} ")) is type(p)
    assert type(predictor(type(p))) is type(p)
    assert predictor(p) is p


def test_a_typo_is_an_error_that_offers_the_nearest_name():
    with pytest.raises(ValueError, match=r"'narks'.*'narx'.*arima, ema"):
        predictor("narks")
    with pytest.raises(ValueError, match=r"'qqqqqqq'.*arima, ema") as caught:
        predictor("qqqqqqq")
    assert "did you mean" not in str(caught.value)


def test_options_reach_the_constructor_but_not_a_finished_object():
    assert predictor("ema", alpha=0.7).alpha == 0.7
    with pytest.raises(TypeError, match=r"\['alpha'\]"):
        predictor(EMA(), alpha=0.7)
    with pytest.raises(TypeError, match=r"predictor.* 3"):
        predictor(3)


def test_a_forecast_that_is_no_speed_is_replaced_by_the_last_and_counted():
    class Broken(Memoryless):
        def _forecast(self, cpu, memory):
            return -1.0

    p = Broken()
    p.update(7.0)
    assert p.predict() == 7.0
    assert p.rejected == 1


def test_the_base_cannot_be_built():
    with pytest.raises(TypeError, match="abstract"):
        Predictor()
