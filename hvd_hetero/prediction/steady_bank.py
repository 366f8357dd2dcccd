"""The forecasts of n ranks made steady at once: the recurrences of `steady` on arrays.

Shapes: n ranks, m of them measured, N errors kept of each.
"""

from __future__ import annotations

import numpy as np

from hvd_hetero.prediction.bank import At, Bank, Floats, among
from hvd_hetero.prediction.steady import (
    _BELIEVED,
    _ENOUGH,
    _ERRORS,
    _FORGET,
    _GRACE,
    _LIMIT,
    _LONGEST,
    _NORMAL,
)

__all__ = ["Steadies"]


class Steadies(Bank):
    """The bank of ``Steady``, on top of the bank ``of`` what it steadies."""

    def __init__(self, of: Bank, ranks: int) -> None:
        super().__init__(ranks)
        self._of = of
        self._level, self._age = np.zeros((2, ranks))
        self._errors = np.full((ranks, _ERRORS), np.inf)  # in no order; infinity where there is none yet
        self._judged = np.zeros(ranks, dtype=np.int64)  # errors seen
        self._noise, self._by_prediction, self._by_average = np.zeros((3, ranks))

    def _observe(self, speeds: Floats, at: At) -> None:
        before, again = np.array(self._of.expected[at]), self.rounds[at] > 0
        self._of.take(speeds, at)
        now = self._of.expected[at]
        begins = among(at, ~again)
        self._level[begins], self._age[begins] = now[~again], 1.0
        at, speeds, before, now = among(at, again), speeds[again], before[again], now[again]
        self._judge(np.abs(speeds / before - 1.0), speeds / self._level[at] - 1.0, at)
        age = np.minimum(self._age[at] + 1.0, _LONGEST)
        level = self._level[at] + (speeds - self._level[at]) / age
        moved = np.abs(now - level) > self._noise[at] * level
        self._level[at], self._age[at] = np.where(moved, now, level), np.where(moved, 1.0, age)

    def _judge(self, error: Floats, missed: Floats, at: At) -> None:
        rows = np.arange(len(self._judged))[at]
        self._errors[rows, self._judged[at] % _ERRORS] = error
        self._judged[at] += 1
        known = np.minimum(self._judged[at], _ERRORS)
        median = np.sort(self._errors[at], axis=1)[np.arange(len(known)), known // 2]
        self._noise[at] = noise = np.where(known >= _ENOUGH, median, 0.0) / _NORMAL
        limit = _LIMIT * noise * noise
        for sums, off in ((self._by_prediction, error), (self._by_average, missed)):
            sums[at] = _FORGET * sums[at] + np.minimum(off * off, limit)

    def _forecast(self, at: At) -> Floats:
        p, level, noise = self._of.expected[at], self._level[at], self._noise[at]
        calm = (self._by_average[at] <= _GRACE * self._by_prediction[at]) & (np.abs(p - level) <= noise * level)
        self.uncertainty[at] = np.where(calm, noise / np.sqrt(self._age[at]), _BELIEVED * noise)
        return np.where(calm, level, p)
