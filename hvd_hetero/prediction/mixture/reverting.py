"""Reversion: an autoregression on log speeds that learns how much of a change lasts. Member of the mixture; not in
the papers.

With ``y = log v`` and ``ℓ`` the running mean of y (weight max(1/n, 1/100) for the latest),

    ŷ^{k+1} = y^k + a f^k + b g^k         f^k = y^{k-1} - y^k,  g^k = ℓ^k - y^k

a = b = 0 is memoryless; a > 0 gives back part of the last change, b > 0 part of the distance to the usual speed. After
every round (a, b) is the minimum of

    Σ_{s<=k} (1 - δ)^{k-s} (y^s - ŷ^s)²  +  (σ²/τ²) |(a, b) - (0.2, 0.5)|²

that is, the most probable under a normal prior of deviation τ = 0.3 where speeds scatter by σ, whose square is the
mean of the squared errors so far, discounted alike: so the size of the scatter decides nothing. δ = 1/200 forgets what
speeds did some hundreds of rounds ago. The prior mean is a forecast of 0.3 y^k + 0.2 y^{k-1} + 0.5 ℓ: quiet until a
movement has been seen (from (0, 0) it would be memoryless at first, and hardly better where speeds move). All
arbitrary; between half and twice them the error on recorded series differs by less than a per cent.

A round out of all proportion counts less: where the change or a feature exceeds max(10 σ, 0.1), all three are scaled
down to that, and ℓ moves by as much less. Otherwise squares of one round that was 1000 times too slow would outweigh
ten thousand ordinary ones. Clipping the error alone would not do, since the features of the round after an outlier
would still weigh. A lasting change of scale is taken in all the same: σ grows by up to a fifth a round.

A forecast stays within a factor 2 of the slowest and fastest speed seen. O(1) per round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hvd_hetero.prediction.base import Predictor

_LEVEL_ROUNDS = 100
_KEEP = 1.0 - 0.005  # 1 - δ
_PRIOR, _DEVIATION = (0.2, 0.5), 0.3
_MARGIN = math.log(2.0)
_TIMES, _LEAST = 10.0, 0.1  # beyond so many σ, and so much at least, a round counts less


class Reverting(Predictor):
    """Predicts the last speed, pulled back to the one before and to the running mean as far as that has paid."""

    name = "reverting"
    version: ClassVar[int] = 3

    def __init__(self) -> None:
        super().__init__()
        self._y = (0.0, 0.0)  # log speeds, latest first
        self._level = 0.0
        self._lowest, self._highest = math.inf, -math.inf
        self._coefficients = _PRIOR
        self._products: tuple[float, ...] = (
            0.0,
        ) * 5  # discounted sums of f f, f g, g g, f z and g z, where z is the change
        self._errors, self._weight = 0.0, 0.0  # discounted sums of squared errors, and of 1

    def _features(self) -> tuple[float, float]:
        return self._y[1] - self._y[0], self._level - self._y[0]

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        y = math.log(speed)
        if self.rounds == 0:
            self._y, self._level = (y, y), y
        else:
            f, g = self._features()
            kappa = self._proportion(max(abs(f), abs(g), abs(y - self._y[0])))
            self._learn(kappa * f, kappa * g, kappa * (y - self._y[0]))
            self._y = (y, self._y[0])
            self._level += kappa * (y - self._level) / min(self.rounds + 1, _LEVEL_ROUNDS)
        self._lowest, self._highest = min(self._lowest, y), max(self._highest, y)

    def _proportion(self, size: float) -> float:
        """How much a round of this size counts."""
        limit = max(_TIMES * math.sqrt(self._errors / max(self._weight, 1.0)), _LEAST)
        return limit / size if size > limit else 1.0

    def _learn(self, f: float, g: float, z: float) -> None:
        a, b = self._coefficients
        self._errors = _KEEP * self._errors + (z - a * f - b * g) ** 2
        self._weight = _KEEP * self._weight + 1.0
        news = (f * f, f * g, g * g, f * z, g * z)
        self._products = tuple(_KEEP * old + new for old, new in zip(self._products, news, strict=True))
        self._coefficients = _most_probable(self._products, self._errors / self._weight / _DEVIATION**2)

    def _forecast(self, cpu: float, memory: float) -> float:
        f, g = self._features()
        y = self._y[0] + self._coefficients[0] * f + self._coefficients[1] * g
        return math.exp(min(max(y, self._lowest - _MARGIN), self._highest + _MARGIN))

    def _state(self) -> dict[str, Any]:
        return {
            "y": list(self._y),
            "level": self._level,
            "range": [self._lowest, self._highest] if self.rounds else None,
            "coefficients": list(self._coefficients),
            "products": list(self._products),
            "errors": [self._errors, self._weight],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        y0, y1 = map(float, state["y"])
        a, b = map(float, state["coefficients"])
        products, (errors, weight) = tuple(map(float, state["products"])), map(float, state["errors"])
        if len(products) != 5 or not all(map(math.isfinite, (y0, y1, a, b, errors, weight, *products))):
            raise ValueError(f"state: y, coefficients, five products and errors must be finite, got {state!r}")
        self._y, self._level, self._coefficients = (y0, y1), float(state["level"]), (a, b)
        self._products, self._errors, self._weight = products, errors, weight
        self._lowest, self._highest = map(float, state["range"] or (math.inf, -math.inf))


def _most_probable(products: Sequence[float], pull: float) -> tuple[float, float]:
    """``(a, b)`` from the normal equations with ``pull`` (σ²/τ²) towards the prior mean."""
    ff, fg, gg, fz, gz = products
    ff, gg, fz, gz = ff + pull, gg + pull, fz + pull * _PRIOR[0], gz + pull * _PRIOR[1]
    determinant = ff * gg - fg * fg
    if determinant <= 1e-9 * ff * gg:  # speeds that never moved, or features that are one: nothing to tell them apart
        return _PRIOR
    return (gg * fz - fg * gz) / determinant, (ff * gz - fg * fz) / determinant
