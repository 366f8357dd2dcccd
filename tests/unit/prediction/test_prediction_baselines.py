"""ARIMA against statsmodels' own forecast, and the recurrent baselines on series with a pattern."""

import builtins

import numpy as np
import pytest

from hvd_hetero.prediction import ARIMA, EMA, LSTM, SimpleRNN


@pytest.fixture
def without(monkeypatch):
    """Make one package impossible to import."""

    def hide(name):
        real = builtins.__import__

        def refuse(wanted, *args, **options):
            if wanted.partition(".")[0] == name:
                raise ImportError(f"no {name}")
            return real(wanted, *args, **options)

        monkeypatch.setattr(builtins, "__import__", refuse)

    return hide


@pytest.mark.parametrize(("kind", "needs"), [(ARIMA, "statsmodels"), (SimpleRNN, "torch"), (LSTM, "torch")])
def test_an_absent_library_is_an_error_that_says_what_to_install(kind, needs, without):
    without(needs)
    with pytest.raises(ImportError, match=rf"{kind.__name__}.*pip install {needs}"):
        kind()


class TestARIMA:
    pytest.importorskip("statsmodels")

    def test_its_forecasts_equal_statsmodels_with_the_same_parameters(self):
        """The recurrence from the estimate on, against a Kalman filter over the whole series."""
        from statsmodels.tsa.arima import model

        rng = np.random.default_rng(0)
        e, z = rng.normal(0, 1, 142), [0.0, 0.0]
        for k in range(2, 142):
            z.append(0.3 * z[-1] - 0.2 * z[-2] + e[k] + 0.4 * e[k - 1])
        v = 1e5 + np.cumsum(np.cumsum(z[2:]))
        p = ARIMA(window=200, refit_every=100)
        ours = []
        for k, x in enumerate(v):
            if k > 105:
                ours.append(p.predict())
            p.update(x)
        scale = np.std(np.diff(v[:105], n=2))
        filtered = model.ARIMA(np.diff(v, n=2) / scale, order=(2, 0, 1), trend="n").filter(
            [*p.state_dict()["parameters"], 1.0]
        )
        theirs = 2 * v[105:-1] - v[104:-2] + filtered.predict(start=104, end=137) * scale
        assert len(ours) == 34
        np.testing.assert_allclose(ours, theirs, atol=1e-6)  # innovations have size 1

    def test_the_last_speed_until_the_first_estimate(self):
        p = ARIMA(refit_every=50)
        for v in np.random.default_rng(1).uniform(90, 110, 54):
            p.update(v)
            assert p.predict() == v
        p.update(100.0)
        assert p.predict() != 100.0

    def test_a_straight_line_needs_no_estimate(self):
        p = ARIMA(refit_every=10)
        for k in range(40):
            p.update(100.0 + k)
        assert not any(p.state_dict()["parameters"])

    def test_an_estimate_that_fails_is_logged_and_changes_nothing(self, monkeypatch, caplog):
        from statsmodels.tsa.arima import model

        def fail(*_, **__):
            raise np.linalg.LinAlgError("no estimate")

        monkeypatch.setattr(model, "ARIMA", fail)
        p = ARIMA(refit_every=10)
        for v in np.random.default_rng(2).uniform(90, 110, 20):
            p.update(v)
        assert not any(p.state_dict()["parameters"])
        assert "ARIMA keeps its parameters" in caplog.text

    @pytest.mark.parametrize(("options", "named"), [({"window": 5}, "window"), ({"refit_every": 1}, "refit_every")])
    def test_bad_options_are_errors_that_name_them(self, options, named):
        with pytest.raises(ValueError, match=named):
            ARIMA(**options)

    def test_a_state_with_two_parameters_is_refused(self):
        with pytest.raises(ValueError, match=r"ARIMA.*parameters"):
            ARIMA().load_state_dict(ARIMA().state_dict() | {"parameters": [0.1, 0.2]})


@pytest.mark.parametrize("kind", [SimpleRNN, LSTM])
class TestRecurrent:
    pytest.importorskip("torch")

    def test_it_learns_an_alternation_that_an_average_cannot(self, kind):
        p, ema = kind(retrain_every=50, steps=150), EMA()
        for k in range(101):
            v = 100.0 + 20.0 * (-1) ** k
            p.update(v)
            ema.update(v)
        assert abs(p.predict() - 80.0) < 8.0 < abs(ema.predict() - 80.0)

    def test_it_leaves_the_global_generator_alone(self, kind):
        import torch

        torch.manual_seed(1)
        expected = torch.rand(1)
        torch.manual_seed(1)
        kind(seed=5)
        assert torch.rand(1) == expected

    @pytest.mark.parametrize("option", ["hidden", "window", "retrain_every", "steps"])
    def test_bad_options_are_errors_that_name_them(self, kind, option):
        with pytest.raises(ValueError, match=option):
            kind(**{option: 0})

    def test_a_state_of_another_size_is_refused(self, kind):
        with pytest.raises(ValueError, match="weights"):
            kind(hidden=3).load_state_dict(kind(hidden=4).state_dict())
