"""Tomorrow is like today: ``v̂^{k+1} = v^k`` (lb-bsp section 3.2.1, the first of the potential methods; O(1)).

Follows a lasting change at once, and every passing disturbance too: with independent noise of variance ``s²`` around a
constant speed its mean squared error is ``2 s²``, twice what is unavoidable.
"""

from __future__ import annotations

from hvd_hetero.prediction.base import Predictor


class Memoryless(Predictor):
    """Predict the last measured speed."""

    name = "memoryless"

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        return  # the base keeps the last measurement

    def _forecast(self, cpu: float, memory: float) -> float:
        return self._last
