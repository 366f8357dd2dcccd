"""Reversion: an autoregression on log speeds that learns how much of a change lasts.

A member of the mixture that comes from no paper.

With ``y = log v``, ``ℓ`` the running mean of y (weight max(1/n, 1/N) for the latest) and, with ``drivers``, ``c`` the
logarithm of the CPU available and ``γ`` its running mean,

    ŷ^{k+1} = y^k + θ · x^k        x^k = (y^{k-1} - y^k,  ℓ^k - y^k),  with drivers also (c^{k+1} - c^k,  c^{k+1} - γ^k)

θ = 0 is memoryless. The first coefficient gives back part of the last change, the second part of the distance to the
usual speed, the third follows what the CPU does now, the fourth moves the usual speed along with it. So the forecast
is linear in what NARX takes in (``narx.narx``), and its coefficients need no training: after every round θ is the
minimum of

    Σ_{s<=k} (1 - δ)^{k-s} (y^s - ŷ^s)²  +  (σ²/τ²) |θ - θ0|²              θ0 = (0.2, 0.5), (0.5, 0.5) with drivers

that is, the most probable under a normal prior of deviation τ where speeds scatter by σ, whose square is the mean of
the squared errors so far, discounted as they are: so the size of the scatter has no effect.

A round out of all proportion counts less: where a change of speed or distance from the usual one exceeds max(10 σ,
0.1), beyond what the CPU explains, all of the round is scaled down to that, and ℓ and γ move by as much less.

A CPU that is not known now keeps its last value; while it was never known, nothing is learnt about it. O(1) per round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from hvd_hetero.kept import Figure
from hvd_hetero.prediction.base import Predictor, log_driver

# 1 - δ: forgets what speeds did some hundreds of rounds ago. It is arbitrary, as are the numbers below; between half
# and twice them the error on recorded series differs by less than a per cent.
_KEPT_PER_ROUND = 1.0 - 0.005
# θ0, τ, N. The prior mean is a forecast of 0.3 y^k + 0.2 y^{k-1} + 0.5 ℓ: quiet until a movement has been seen. From 0
# it would be memoryless at first, and hardly better where speeds move.
_PRIOR, _DEVIATION, _LEVEL_ROUNDS = (0.2, 0.5), 0.3, 100
# With drivers, θ0 takes a change of the CPU for an equal change of the speed, and the CPU explains most of what moves
# the usual speed. Chosen in view of the recorded series, on which N = 100 and τ = 0.3 forecast 2 % worse at most. On
# worlds drawn from the Google trace they differed either way.
_DRIVEN = ((*_PRIOR, 0.5, 0.5), 0.2, 50)


# A round counts in full up to so many deviations σ, and in any case up to so large a change of log speed.
_DEVIATIONS_IN_FULL, _CHANGE_IN_FULL = 10.0, 0.1
# Of the largest pivot: what is left of a smaller one is rounding.
_PIVOT_FLOOR = 1e-9


class Reverting(Predictor):
    """Predict the last speed, pulled back to the one before and to the running mean as far as that has helped.

    With ``drivers``, follow the CPU that is available, too, as far as that has helped.
    """

    name = "reverting"
    version: ClassVar[int] = 6
    KEPT = (
        *(Figure(name, least=-math.inf) for name in ("_y", "_level", "_coefficients", "_squares", "_products")),
        Figure("_cpu", least=-math.inf, any_length=True),
        Figure("_errors"),
        Figure("_weight"),
    )

    def __init__(self, *, drivers: bool = False) -> None:
        super().__init__()
        self.uses_drivers = drivers
        self._prior: tuple[float, ...]
        self._prior, self._deviation, self._longest = _DRIVEN if drivers else (_PRIOR, _DEVIATION, _LEVEL_ROUNDS)
        n = len(self._prior)
        self._y = (0.0, 0.0)  # log speeds, latest first
        self._level = 0.0  # ℓ
        self._cpu: tuple[float, ...] = ()  # c and γ, once known
        self._coefficients: tuple[float, ...] = self._prior  # θ
        self._squares = (0.0,) * (n * (n + 1) // 2)  # discounted sums of x_i x_j, i <= j
        self._products = (0.0,) * n  # and of x_i (z - θ0 x), where z is the change
        self._errors, self._weight = 0.0, 0.0  # discounted sums of squared errors, and of 1

    def _features(self, cpu: float) -> tuple[float, ...]:
        """Return ``x`` for a round with this logarithm of the CPU (NaN: the last one)."""
        x = (self._y[1] - self._y[0], self._level - self._y[0])
        if not self.uses_drivers:
            return x
        if not self._cpu:
            return (*x, 0.0, 0.0)
        last, usual = self._cpu
        now = last if math.isnan(cpu) else cpu
        return (*x, now - last, now - usual)

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        y, c, kappa = math.log(speed), log_driver(cpu), 1.0
        if self.rounds == 0:
            self._y, self._level = (y, y), y
        else:
            x, z = self._features(c), y - self._y[0]
            explained, usual = (x[2], x[3] - x[2]) if self.uses_drivers else (0.0, 0.0)  # c^{k+1} - c^k, c^k - γ^k
            kappa = self._proportion(max(abs(x[0]), abs(x[1] + usual), abs(z - explained)))
            self._learn([kappa * feature for feature in x], kappa * z)
            self._y = (y, self._y[0])
            self._level += kappa * (y - self._level) / min(self.rounds + 1, self._longest)
        if self.uses_drivers and not math.isnan(c):
            usual = self._cpu[1] if self._cpu else c
            self._cpu = (c, usual + kappa * (c - usual) / min(self.rounds + 1, self._longest))

    def _proportion(self, size: float) -> float:
        """Return how much a round of this size counts."""
        # Otherwise squares of one round that was 1000 times too slow would outweigh ten thousand ordinary ones.
        # Clipping the error alone would not do, since the features of the round after an outlier would still weigh. A
        # lasting change of scale is taken in all the same: σ grows by up to a fifth a round.
        limit = max(_DEVIATIONS_IN_FULL * math.sqrt(self._errors / max(self._weight, 1.0)), _CHANGE_IN_FULL)
        return limit / size if size > limit else 1.0

    def _learn(self, x: Sequence[float], z: float) -> None:
        self._errors = _KEPT_PER_ROUND * self._errors + (z - _dot(self._coefficients, x)) ** 2
        self._weight = _KEPT_PER_ROUND * self._weight + 1.0
        news, beyond = [a * b for i, a in enumerate(x) for b in x[i:]], z - _dot(self._prior, x)
        self._squares = tuple([_KEPT_PER_ROUND * old + new for old, new in zip(self._squares, news, strict=True)])
        self._products = tuple([_KEPT_PER_ROUND * old + beyond * a for old, a in zip(self._products, x, strict=True)])
        pull = self._errors / self._weight / self._deviation**2
        change = _solution(self._squares, self._products, pull)
        self._coefficients = tuple([a + b for a, b in zip(self._prior, change, strict=True)])

    def _forecast(self, cpu: float, memory: float) -> float:
        return math.exp(self._y[0] + _dot(self._coefficients, self._features(log_driver(cpu))))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(float.__mul__, a, b))


def _solution(squares: Sequence[float], products: Sequence[float], pull: float) -> list[float]:
    """Return ``θ - θ0`` from the normal equations, by elimination.

    The equations are ``(S + p I)(θ - θ0) = b - S θ0`` with p = ``pull`` (σ²/τ²), so what the rounds do not show stays
    as it was. ``squares`` holds the rows of S, from the diagonal on.
    """
    found, rows, at = list(products), [], 0
    n = len(found)
    for i in range(n, 0, -1):
        rows.append([squares[at] + pull, *squares[at + 1 : at + i]])
        at += i
    least = _PIVOT_FLOOR * max([row[0] for row in rows])
    for i, row in enumerate(rows):
        if row[0] <= least:  # speeds that never moved, or features that move together
            return [0.0] * n
        for j in range(1, n - i):
            ratio, below = row[j] / row[0], rows[i + j]
            found[i + j] -= ratio * found[i]
            for k in range(j, n - i):
                below[k - j] -= ratio * row[k]
    for i in range(n - 1, -1, -1):
        row = rows[i]
        for j in range(1, n - i):
            found[i] -= row[j] * found[i + j]
        found[i] /= row[0]
    return found
