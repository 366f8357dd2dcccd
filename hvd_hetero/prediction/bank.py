r"""Banks: the predictors of n ranks at once, each quantity of their state an array of n.

A simulation has all ranks in one process, where n objects cost n times some 25 microseconds a round, and arrays the
hundredth of that. A rank of a real training is alone and has the predictor itself, which is the definition: a bank does
its recurrences, and what it forecasts is the same but for the last bits (a test compares them over long series).

Drivers reach no bank: members that use them have none. ``at`` names the ranks that measured a speed in a round, as an
index of the arrays of n; a rank without a measurement keeps its state.

Shapes: n ranks, m of them measured.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from hvd_hetero.prediction.base import MARGIN
from hvd_hetero.prediction.ema import EMA

__all__ = ["At", "Bank", "EMAs", "Floats", "Memorylesses", "among"]

Floats = npt.NDArray[np.float64]
At = slice | npt.NDArray[np.intp]

_ALL = slice(None)


def among(at: At, chosen: npt.NDArray[np.bool_]) -> At:
    """Return the ranks of ``at`` that are chosen, one flag for each."""
    if np.count_nonzero(chosen) == len(chosen):
        return at
    where = np.flatnonzero(chosen)
    return where if isinstance(at, slice) else at[where]


class Bank(ABC):
    """The forecasts of n ranks. Subclasses observe and forecast; this class guards both doors, as `Predictor` does."""

    def __init__(self, ranks: int) -> None:
        self.rounds = np.zeros(ranks, dtype=np.int64)
        """Valid measurements of each rank."""
        self.expected = np.full(ranks, np.nan)
        """What ``predict`` of each rank would say; NaN before its first measurement."""
        self._slowest, self._fastest = np.full(ranks, np.inf), np.zeros(ranks)

    def update(self, speeds: Floats) -> None:
        """Learn the speeds of a round, one for each rank; what is no speed is no measurement."""
        usable = np.isfinite(speeds) & (speeds > 0.0)
        at = among(_ALL, usable)
        self.take(speeds[at], at)

    def take(self, speeds: Floats, at: At) -> None:
        """Learn the speeds of some ranks, all of them valid."""
        with np.errstate(over="ignore"):  # infinities are dealt with where they come to light, as in the predictors
            self._observe(speeds, at)
            self.rounds[at] += 1
            self._slowest[at] = np.minimum(self._slowest[at], speeds)
            self._fastest[at] = np.maximum(self._fastest[at], speeds)
            forecast = self._forecast(at)
            most = np.minimum(MARGIN * self._fastest[at], sys.float_info.max)
        usable = np.isfinite(forecast) & (forecast > 0.0)
        within = np.minimum(np.maximum(forecast, self._slowest[at] / MARGIN), most)
        self.expected[at] = within if np.count_nonzero(usable) == len(usable) else np.where(usable, within, speeds)

    @abstractmethod
    def _observe(self, speeds: Floats, at: At) -> None:
        """Take in valid measurements (``self.rounds`` and ``self.expected`` are those before)."""

    @abstractmethod
    def _forecast(self, at: At) -> Floats:
        """Return the next speeds of these ranks."""


class Memorylesses(Bank):
    """The bank of ``Memoryless``."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._latest = np.zeros(ranks)

    def _observe(self, speeds: Floats, at: At) -> None:
        self._latest[at] = speeds

    def _forecast(self, at: At) -> Floats:
        return self._latest[at]


class EMAs(Bank):
    """The bank of ``EMA``, all with the weight that ``of`` has."""

    def __init__(self, of: EMA, ranks: int) -> None:
        super().__init__(ranks)
        self._alpha = of.alpha
        self._mean = np.zeros(ranks)

    def _observe(self, speeds: Floats, at: At) -> None:
        mean = np.where(self.rounds[at] == 0, speeds, self._mean[at])
        self._mean[at] = mean + self._alpha * (speeds - mean)

    def _forecast(self, at: At) -> Floats:
        return self._mean[at]
