"""Reversion: an autoregression on log speeds that learns how much of a change lasts. Member of the mixture; not in
the papers.

With ``y = log v`` and ``ℓ`` the running mean of y (weight max(1/n, 1/100) for the latest),

    ŷ^{k+1} = y^k + a (y^{k-1} - y^k) + b (ℓ^k - y^k)

a = b = 0 is memoryless; a > 0 gives back part of the last change, b > 0 part of the distance to the usual speed. (a,
b) by recursive least squares over all rounds, O(1), from a prior of 0 with covariance 100 times that of the noise:
±0.3 where speeds scatter by 3 % (arbitrary). A round out of all proportion counts less: target and both features are
multiplied by κ (`moderation`), and ℓ moves by κ of its step; clipping the error alone would not do, since the features
of the round after an outlier would still use up the covariance. A forecast stays within a
factor 2 of the slowest and fastest speed seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.moderation import Moderation

_LEVEL_ROUNDS, _PRIOR = 100, 100.0
_MARGIN = math.log(2.0)


class Reverting(Predictor):
    """Predicts the last speed, pulled back to the one before and to the running mean as far as that has paid."""

    name = "reverting"

    def __init__(self) -> None:
        super().__init__()
        self._y = (0.0, 0.0)  # log speeds, latest first
        self._level = 0.0
        self._lowest, self._highest = math.inf, -math.inf
        self._moderation = Moderation()
        self._a = self._b = 0.0
        self._aa, self._ab, self._bb = _PRIOR, 0.0, _PRIOR  # covariance of (a, b), in units of the noise's variance

    def _features(self) -> tuple[float, float]:
        return self._y[1] - self._y[0], self._level - self._y[0]

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        y = math.log(speed)
        if self.rounds == 0:
            self._y, self._level = (y, y), y
        else:
            f, g = self._features()
            kappa = self._moderation(max(abs(f), abs(g), abs(y - self._y[0])))
            f, g, change = kappa * f, kappa * g, kappa * (y - self._y[0])
            gain_a, gain_b = self._aa * f + self._ab * g, self._ab * f + self._bb * g
            width = 1.0 + f * gain_a + g * gain_b
            error = change - self._a * f - self._b * g
            self._a, self._b = self._a + gain_a * error / width, self._b + gain_b * error / width
            self._aa -= gain_a * gain_a / width
            self._ab -= gain_a * gain_b / width
            self._bb -= gain_b * gain_b / width
            self._y = (y, self._y[0])
            self._level += kappa * (y - self._level) / min(self.rounds + 1, _LEVEL_ROUNDS)
        self._lowest, self._highest = min(self._lowest, y), max(self._highest, y)

    def _forecast(self, cpu: float, memory: float) -> float:
        f, g = self._features()
        y = self._y[0] + self._a * f + self._b * g
        return math.exp(min(max(y, self._lowest - _MARGIN), self._highest + _MARGIN))

    def _state(self) -> dict[str, Any]:
        return {
            "y": list(self._y),
            "level": self._level,
            "range": [self._lowest, self._highest] if self.rounds else None,
            "coefficients": [self._a, self._b],
            "covariance": [self._aa, self._ab, self._bb],
            "moderation": self._moderation.state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        y0, y1 = map(float, state["y"])
        a, b = map(float, state["coefficients"])
        aa, ab, bb = map(float, state["covariance"])
        if not all(map(math.isfinite, (y0, y1, a, b, aa, ab, bb))):
            raise ValueError(f"state: y, coefficients and covariance must be finite, got {state!r}")
        self._moderation.restore(state["moderation"])
        self._y, self._level = (y0, y1), float(state["level"])
        self._a, self._b, self._aa, self._ab, self._bb = a, b, aa, ab, bb
        self._lowest, self._highest = map(float, state["range"] or (math.inf, -math.inf))
