"""What samples cost by their lengths, learned by one rank from the seconds of its rounds.

A round (or micro-batch) of k micro-batches and b samples of lengths L_s in all, micro-batch j padded to its longest::

    t = v (a_0 k + a_1 b + a_2 sum_s L_s + a_3 sum_s L_s^2 + a_4 sum_j b_j max_j L) = v a·x,    a >= 0

The form a belongs to the model; the level v is how slow the rank is now, and may change at any time. So the scale of a
is free, and fixed by a·m = 1, with m the mean of x: v is the seconds of a mean round.

**Level.** v_n is the median of t / a·x over the nine rounds around round n. A median keeps edges: a rank that is twice
as slow for some rounds has twice the v in exactly these rounds, and the form does not hear of it.

**Form.** The rows y_n = v_n x_n / t_n have the target 1, so relative errors count. With z = a m, the shares of the
terms in a mean round::

    minimise  sum_n λ^(N - n) w_n (1 - a·y_n)^2 + ρ |z - e_2|^2,    z >= 0

w_n = min(1, h / |1 - a·y_n|) / max(1, a·y_n)^2 bounds what a round can do: Huber's weight for slow rounds, and for
rounds that are too fast to be true, whose rows are large. e_2 says "lengths as they are". ρ = σ² / s² for times that
scatter by σ = 0.07 and a prior belief of s = 0.5 in each share: in a direction that lengths vary in, a few rounds
outweigh it, and where all lengths are alike it decides. Arbitrary: nine, λ (half is forgotten in 230 rounds), h.

Cost: 5 numbers a row, a Cholesky factor and a least-squares problem of 5 × 5 with z >= 0 for each round.

Rejected: a form fitted to log t (not linear); the level as an average or a predictor's (it mixes both sides of a
change, and bends the form there). Not seen: a cost whose effect is slower than nine rounds, such as lengths sorted
over an epoch; it goes into the level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from hvd_hetero import checks

__all__ = ["CostFit"]

Floats = npt.NDArray[np.float64]

_AROUND = 9
_KEPT = 0.997  # λ
_HUBER = 0.15  # h
_PRIOR = 0.02  # ρ
_VERSION = 1


class CostFit:
    """The form of one rank's times, and its level."""

    def __init__(self) -> None:
        self._recent = np.zeros((_AROUND, 5))  # x / t; a ring
        self._rounds = 0  # that are in the ring, or were
        self._normal, self._right = np.zeros((5, 5)), np.zeros(5)  # the sums of λ^(N - n) w y y^T and λ^(N - n) w y
        self._seen, self._mean = 0.0, np.zeros(5)  # m, and the sum of λ^(N - n) behind it
        self._form = np.zeros(5)  # a

    def learn(self, features: npt.ArrayLike, micro_batches: float, seconds: float) -> None:
        """Learn from a round of these ``features`` (``rounds.SampleFigures``); what cannot be true teaches nothing."""
        x = np.array([micro_batches, *np.asarray(features)], dtype=np.float64)
        if not (0.0 < seconds < math.inf and x.min() >= 0.0 and x[:2].all() and x.max() < math.inf):
            return
        self._recent[self._rounds % _AROUND] = x / seconds
        self._rounds += 1
        self._seen = _KEPT * self._seen + 1.0
        self._mean += (x - self._mean) / self._seen
        if self._rounds >= _AROUND and (level := self._level()) > 0.0:
            row = level * self._recent[(self._rounds - 1 - _AROUND // 2) % _AROUND]
            predicted = float(self._form @ row)
            weight = min(1.0, _HUBER / max(abs(1.0 - predicted), _HUBER)) / max(1.0, predicted) ** 2
            self._normal = _KEPT * self._normal + weight * np.outer(row, row)
            self._right = _KEPT * self._right + weight * row
        self._solve()

    def _level(self) -> float:
        """Return v, the median over the rounds in the ring; 0 if the form does not tell."""
        inverse = sorted((self._recent[: self._rounds] @ self._form).tolist())
        middle = inverse[len(inverse) // 2] if inverse else 0.0
        return 1.0 / middle if middle > 0.0 else 0.0

    def _solve(self) -> None:
        scale = np.where(self._mean > 0.0, self._mean, 1.0)
        prior = np.eye(5)[2 if self._mean[2] > 0.0 else 1]
        lower = np.linalg.cholesky(self._normal / np.outer(scale, scale) + _PRIOR * np.eye(5))
        shares, _ = nnls(lower.T, np.linalg.solve(lower, self._right / scale + _PRIOR * prior))
        whole = float(shares.sum())
        self._form = (shares / whole if whole > 0.0 else prior) / scale

    @property
    def coefficients(self) -> Floats:
        """a_1 to a_4, scaled so that a sample of the mean length costs 1; 0, 1, 0, 0 before anything is learned."""
        if not self._seen:
            return np.array([0.0, 1.0, 0.0, 0.0])
        length = float(self._mean[2] / self._mean[1])
        found = self._form[1:]
        if not found.any():  # lengths as they are, since a round's time tells nothing of its samples
            found = np.array([0.0, 1.0, 0.0, 0.0] if length > 0.0 else [1.0, 0.0, 0.0, 0.0])
        return np.asarray(found / (found @ np.array([1.0, length, length**2, length])))

    def seconds(self, features: npt.ArrayLike, micro_batches: float) -> float:
        """Return the seconds that such a round takes at the present level; NaN: nothing was learned yet."""
        x = np.array([micro_batches, *np.asarray(features)], dtype=np.float64)
        return self._level() * float(self._form @ x) if self._rounds else math.nan

    def state(self) -> dict[str, Any]:
        """Return the form and what it was learned from, as plain data; the level belongs to the hour."""
        return {
            "version": _VERSION,
            "normal": self._normal.tolist(),
            "right": self._right.tolist(),
            "mean": self._mean.tolist(),
            "seen": self._seen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` has returned; forget what was learned here."""
        checks.require_version(state, "a cost fit", _VERSION)
        normal, right, mean = (np.array(state[name], dtype=np.float64) for name in ("normal", "right", "mean"))
        shapes = normal.shape == (5, 5) and right.shape == mean.shape == (5,)
        if not (shapes and all(np.isfinite(of).all() for of in (normal, right, mean)) and state["seen"] >= 0.0):
            raise ValueError(
                f"the state of a cost fit must be finite sums of 5 features, got {dict(state)}; begin again"
            )
        self.__init__()  # type: ignore[misc]
        self._normal, self._right, self._mean, self._seen = normal, right, mean, float(state["seen"])
        self._solve()
