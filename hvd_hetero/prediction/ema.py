"""Exponential moving average: ``v̂^{k+1} = α v^k + (1 - α) v̂^k``, started at the first measurement; O(1).

lb-bsp section 5.4 sets ``α``, the weight of the latest observation, to 0.2. With independent noise of variance ``s²``
around a constant speed the mean squared error is ``s² · 2 / (2 - α)`` (1.11 s² at 0.2). After a lasting change the
error shrinks by ``1 - α`` per round, so that 90 % of the change is followed after 11 rounds.

Differences from the paper: none known (the start is not stated there; a start at 0 would need a bias correction).
"""

from __future__ import annotations

from hvd_hetero.kept import Figure
from hvd_hetero.prediction.base import Predictor


class EMA(Predictor):
    """Predict the exponential moving average of the measured speeds."""

    name = "ema"
    KEPT = (Figure("_mean"),)

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__()
        if not 0.0 < alpha <= 1.0:
            raise ValueError(
                f"alpha, the weight of the latest speed, must be in (0, 1], got {alpha!r}; the default is 0.2"
            )
        self.alpha = float(alpha)
        self._mean = 0.0

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        # Written as a step towards the speed, which cannot overflow between two finite positive numbers.
        self._mean = speed if self.rounds == 0 else self._mean + self.alpha * (speed - self._mean)

    def _forecast(self, cpu: float, memory: float) -> float:
        return self._mean
