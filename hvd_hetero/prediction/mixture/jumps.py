"""Jumps of a driver, told from its scatter.

With the readings c, m their mean since the last jump (of M at most) and σ the scatter of c about m (`scatter_of` the
last N distances),

    J = log c - log m  where |c - m| > max(4.5 σ, ε m), else 0      and m <- c where c jumps, else the mean moves on

Arbitrary: M = 5 (a longer mean is late where the driver drifts), N = 20, no jump before 5 distances, ε = 0.02. Cost:
O(N log N).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from hvd_hetero.prediction.steady import scatter_of

__all__ = ["Jumps"]

_MEAN, _ROUNDS, _ENOUGH, _TIMES, _LEAST = 5, 20, 5, 4.5, 0.02  # M, N, the distances before a jump, the 4.5 of 4.5 σ, ε
_SMALLEST_DRIVER = 0.01  # a driver of 0 has no logarithm; below 1 % differences mean nothing


class Jumps:
    """What a reading says against those before it."""

    __slots__ = ("_distances", "_mean", "_readings")

    def __init__(self) -> None:
        self._mean, self._readings = math.nan, 0  # m, and of how many readings
        self._distances: deque[float] = deque(maxlen=_ROUNDS)  # |c - m|

    def of(self, reading: float) -> float:
        """J of a round with this reading; 0 where it is not known."""
        if len(self._distances) < _ENOUGH or math.isnan(reading):
            return 0.0
        c = max(reading, _SMALLEST_DRIVER)
        far = abs(c - self._mean) > max(_TIMES * scatter_of(self._distances), _LEAST * self._mean)
        return math.log(c / self._mean) if far else 0.0

    def learn(self, reading: float) -> None:
        """The round with this reading is over."""
        if math.isnan(reading):
            return
        c, jumped = max(reading, _SMALLEST_DRIVER), self.of(reading) != 0.0
        if self._readings:
            self._distances.append(abs(c - self._mean))
        if jumped or not self._readings:
            self._mean, self._readings = c, 1
        else:
            self._readings = min(self._readings + 1, _MEAN)
            self._mean += (c - self._mean) / self._readings

    def state(self) -> dict[str, Any]:
        """Plain data."""
        known = [self._mean, self._readings] if self._readings else None
        return {"mean": known, "distances": list(self._distances)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back, or raise and leave everything as it is."""
        mean, readings = (math.nan, 0) if state["mean"] is None else state["mean"]
        distances = [float(d) for d in state["distances"]]
        sound = len(distances) <= _ROUNDS and all(0.0 <= d <= 1.0 for d in distances)
        if state["mean"] is not None:
            sound = sound and 0.0 < mean <= 1.0 and 1 <= readings <= _MEAN
        if not sound:
            raise ValueError(
                f"state: mean must be in (0, 1] of 1 to {_MEAN} readings, and distances at most {_ROUNDS} numbers in "
                f"[0, 1], got {dict(state)}"
            )
        self._mean, self._readings = float(mean), int(readings)
        self._distances = deque(distances, maxlen=_ROUNDS)
