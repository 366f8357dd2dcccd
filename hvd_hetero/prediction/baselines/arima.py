"""ARIMA (2, 2, 1), a baseline (lb-bsp sections 3.2.1 and 5.4); statsmodels estimates, a recurrence forecasts.

With ``z^k = v^k - 2 v^{k-1} + v^{k-2}`` (the second difference) and innovations ``e^k``,

    z^k = φ1 z^{k-1} + φ2 z^{k-2} + e^k + θ e^{k-1}
    v̂^{k+1} = 2 v^k - v^{k-1} + φ1 z^k + φ2 z^{k-1} + θ e^k

(φ1, φ2, θ) are estimated by maximum likelihood on the last ``window`` (200) rounds, first at round ``refit_every`` +
5 and then every ``refit_every`` (50) rounds; in between the recurrence costs O(1). Until the first estimate, the
forecast is the last speed. An estimate takes some 50 to 500 milliseconds *inside* ``update``: this predictor is for
comparison, not for training.

A second difference has no memory of a level, so a forecast may fall below zero. The last speed then replaces it
(`Predictor.rejected` counts these cases).

Differences from the paper: the re-fit schedule and the window (not stated there).
"""

from __future__ import annotations

import logging
import math
import warnings

import numpy as np

from hvd_hetero.kept import Figure
from hvd_hetero.prediction.base import Predictor

log = logging.getLogger(__name__)


class ARIMA(Predictor):
    """Predict by an autoregressive integrated moving average of order (2, 2, 1); needs statsmodels."""

    name = "arima"
    KEPT = (
        Figure("_speeds", any_length=True),
        *(Figure(name, least=-math.inf) for name in ("_parameters", "_z", "_innovation")),
    )

    def __init__(self, *, window: int = 200, refit_every: int = 50) -> None:
        super().__init__()
        if window < 20:
            raise ValueError(f"window: must be at least 20 rounds to estimate three parameters, got {window!r}")
        if refit_every < 10:
            raise ValueError(f"refit_every: must be at least 10 rounds, an estimate being slow, got {refit_every!r}")
        try:
            import statsmodels.tsa.arima.model  # noqa: F401  (a missing package should show before training)
        except ImportError as error:
            raise ImportError("ARIMA needs statsmodels: pip install statsmodels") from error
        self._refit_every = refit_every
        self._window = window
        self._speeds: list[float] = []
        self._parameters = (0.0, 0.0, 0.0)  # φ1, φ2, θ; all 0: not estimated yet
        self._z = (0.0, 0.0)  # latest first
        self._innovation = 0.0

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        if len(self._speeds) >= 2:
            z = speed - 2.0 * self._speeds[-1] + self._speeds[-2]
            if any(self._parameters):
                self._innovation = z - self._next_z()
            self._z = (z, self._z[0])
        self._speeds = [*self._speeds, speed][-self._window - 2 :]
        if self.rounds + 1 >= 5 + self._refit_every and (self.rounds + 1 - 5) % self._refit_every == 0:
            self._estimate()

    def _forecast(self, cpu: float, memory: float) -> float:
        if not any(self._parameters):
            return self._last
        return 2.0 * self._speeds[-1] - self._speeds[-2] + self._next_z()

    def _next_z(self) -> float:
        phi1, phi2, theta = self._parameters
        return phi1 * self._z[0] + phi2 * self._z[1] + theta * self._innovation

    def _estimate(self) -> None:
        from statsmodels.tsa.arima import model

        speeds = np.array(self._speeds)
        z = np.diff(speeds, n=2)
        scale = float(np.std(z))
        if scale < 1e-9 * float(np.mean(speeds)):
            return  # a straight line extrapolates itself: nothing to estimate
        try:
            with warnings.catch_warnings():
                # Starting values and convergence; a bad estimate shows in the forecasts' error.
                warnings.simplefilter("ignore")
                fitted = model.ARIMA(z / scale, order=(2, 0, 1), trend="n").fit()
        except (np.linalg.LinAlgError, ValueError) as error:
            log.warning("ARIMA keeps its parameters, the estimate failed: %r", error)
            return
        phi1, phi2, theta = (float(p) for p in fitted.params[:3])
        self._parameters = (phi1, phi2, theta)
        self._innovation = float(fitted.resid[-1]) * scale
