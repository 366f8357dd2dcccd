"""The mixtures of n ranks at once: the recurrences of `reverting` and `mixture` on arrays.

Shapes: n ranks, m of them measured, K members.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_hetero.prediction.bank import At, Bank, Floats
from hvd_hetero.prediction.mixture.mixture import _FORGET, _GROWTH, _LARGEST, _NOTHING, _POWER
from hvd_hetero.prediction.mixture.reverting import (
    _DEVIATION,
    _KEEP,
    _LEAST,
    _LEVEL_ROUNDS,
    _PRIOR,
    _TIMES,
)

__all__ = ["Mixtures", "Revertings"]


class Revertings(Bank):
    """The bank of ``Reverting`` without drivers."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._y, self._earlier, self._level = np.zeros((3, ranks))
        self._coefficients = np.repeat(np.array(_PRIOR)[:, None], ranks, axis=1)
        self._products = np.zeros((5, ranks))
        self._errors, self._weight = np.zeros((2, ranks))

    def _observe(self, speeds: Floats, at: At) -> None:
        y, first = np.log(speeds), self.rounds[at] == 0
        # A rank's first speed stands for all before it: then nothing has changed, and nothing is learnt.
        latest, earlier, level = (np.where(first, y, x[at]) for x in (self._y, self._earlier, self._level))
        f, g, z = earlier - latest, level - latest, y - latest
        size = np.maximum(np.maximum(np.abs(f), np.abs(g)), np.abs(z))
        limit = np.maximum(_TIMES * np.sqrt(self._errors[at] / np.maximum(self._weight[at], 1.0)), _LEAST)
        kappa = limit / np.maximum(size, limit)
        self._learn(kappa * f, kappa * g, kappa * z, ~first, at)
        self._y[at], self._earlier[at] = y, latest
        self._level[at] = level + kappa * (y - level) / np.minimum(self.rounds[at] + 1, _LEVEL_ROUNDS)

    def _learn(self, f: Floats, g: Floats, z: Floats, counts: npt.NDArray[np.bool_], at: At) -> None:
        a, b = self._coefficients[:, at]
        errors = _KEEP * self._errors[at] + (z - a * f - b * g) ** 2
        weight = _KEEP * self._weight[at] + counts
        products = _KEEP * self._products[:, at] + np.stack((f * f, f * g, g * g, f * z, g * z))
        self._errors[at], self._weight[at], self._products[:, at] = errors, weight, products
        pull = errors / np.maximum(weight, 1.0) / _DEVIATION**2
        ff, fg, gg, fz, gz = products
        ff, gg, fz, gz = ff + pull, gg + pull, fz + pull * _PRIOR[0], gz + pull * _PRIOR[1]
        determinant = ff * gg - fg * fg
        told = determinant > 1e-9 * ff * gg
        by = np.where(told, determinant, 1.0)
        self._coefficients[0, at] = np.where(told, (gg * fz - fg * gz) / by, _PRIOR[0])
        self._coefficients[1, at] = np.where(told, (ff * gz - fg * fz) / by, _PRIOR[1])

    def _forecast(self, at: At) -> Floats:
        latest, (a, b) = self._y[at], self._coefficients[:, at]
        return np.asarray(np.exp(latest + a * (self._earlier[at] - latest) + b * (self._level[at] - latest)))


class Mixtures(Bank):
    """The bank of ``Mixture``: ``members`` are banks of all its members, none of which reads drivers."""

    def __init__(self, members: Sequence[Bank], ranks: int) -> None:
        super().__init__(ranks)
        self._members = tuple(members)
        self._errors = np.zeros((len(members), ranks))

    def _observe(self, speeds: Floats, at: At) -> None:
        again = self.rounds[at] > 0
        said, errors = self._said(at), self._errors[:, at]
        with np.errstate(over="ignore"):
            squares = np.where(again, np.minimum((said - speeds) ** 2, _LARGEST), 0.0)
        known, largest = errors.max(axis=0), squares.max(axis=0)
        limited = (_NOTHING * np.minimum(speeds, said.min(axis=0)) ** 2 < known) & (known < largest)
        kappa = np.divide(known, largest, out=np.ones_like(known), where=limited)
        self._errors[:, at] = (1.0 - _FORGET) * errors + kappa * squares
        for member in self._members:
            member.take(speeds, at)

    def _forecast(self, at: At) -> Floats:
        errors = self._errors[:, at]
        least = errors.min(axis=0)
        power = np.minimum(_POWER, _GROWTH * (self.rounds[at] - 1))
        weights = np.divide(least, errors, out=np.ones_like(errors), where=errors > least) ** power
        return np.asarray(np.exp((weights * np.log(self._said(at))).sum(axis=0) / weights.sum(axis=0)))

    def _said(self, at: At) -> Floats:
        """(K, m): the members' forecasts."""
        return np.array([member.expected[at] for member in self._members])
