"""The mixtures of n ranks at once: the recurrences of `reverting`, `expert_weights` and `mixture` on arrays.

Shapes: n ranks, m of them measured, K members.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_hetero.prediction.bank import At, Bank, Floats, among
from hvd_hetero.prediction.mixture.expert_weights import _FLOOR, _FORGET, _LIMIT, _NOTHING, _RATE
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
    """The bank of ``Mixture``: ``members`` are banks of all its members, which have equal shares a priori."""

    def __init__(self, members: Sequence[Bank], share: float, ranks: int) -> None:
        super().__init__(ranks)
        self._members, self._share, self._prior = tuple(members), share, 1.0 / len(members)
        self._said = np.zeros((len(members), ranks))  # logarithms of the members' forecasts
        self._scales, self._log_e = np.zeros((2, len(members), ranks))

    def _weights(self, at: At) -> Floats:
        """(K, m); before its first error a rank has the prior."""
        scales, log_e = self._scales[:, at], self._log_e[:, at]
        raw = np.exp(log_e - log_e.max(axis=0)) / np.where(scales > 0.0, scales, 1.0)
        return np.asarray(raw / raw.sum(axis=0))

    def _observe(self, speeds: Floats, at: At) -> None:
        again = self.rounds[at] > 0
        self._learn(np.log(speeds[again]), among(at, again))
        for member, said in zip(self._members, self._said, strict=True):
            member.take(speeds, at)
            said[at] = np.log(member.expected[at])

    def _forecast(self, at: At) -> Floats:
        return np.asarray(np.exp((self._weights(at) * self._said[:, at]).sum(axis=0)))

    def _learn(self, outcome: Floats, at: At) -> None:
        """One round of the recurrences of `expert_weights`, for its weights alone."""
        x = self._said[:, at]
        q = (self._weights(at) * x).sum(axis=0)
        advantage = 2.0 * (q - outcome) * (q - x)
        largest, known = np.abs(advantage).max(axis=0), self._scales[:, at].max(axis=0)
        matters = (known > 0.0) | (largest >= _NOTHING)
        if np.count_nonzero(matters) < len(matters):
            at, advantage, largest, known = among(at, matters), advantage[:, matters], largest[matters], known[matters]
        most = np.where(known > 0.0, _LIMIT * known, np.inf)
        counted = np.where(largest > most, most / np.maximum(largest, _NOTHING), 1.0)
        r, scales = counted * advantage, self._scales[:, at]
        after = np.maximum(
            np.maximum((1.0 - _FORGET) * scales, np.abs(r)), np.maximum(_FLOOR * counted * largest, _NOTHING)
        )
        scales = np.where(scales > 0.0, scales, after)
        eta = _RATE / scales
        log_e = self._log_e[:, at] + eta * (r - np.minimum(eta, 0.5 / after) * r * r)
        log_e *= np.minimum(1.0, scales / after)
        top = log_e.max(axis=0)
        e = np.exp(log_e - top)
        given = self._share * self._prior * e.sum(axis=0)
        self._scales[:, at] = after
        self._log_e[:, at] = top + np.log(np.maximum((1.0 - self._share) * e + given, 1e-300))
