"""Weights of experts, so that their mixture is about as good as whichever is best now, with a bound.

Experts ``k = 1..K`` forecast ``x_k``, the mixture ``q = Σ_k w_k x_k``, the outcome is ``y``, the loss ``(q - y)²``.
With its slope at q, ``r_k = 2 (q - y)(q - x_k)`` is expert k's advantage over the mixture to first order; exactly,

    (q - y)² - (x_k - y)² = r_k - (q - x_k)².

Bernstein online aggregation (Wintenberger, "Optimal learning with Bernstein online aggregation", 2017) with a fixed
share (Herbster and Warmuth, 1998), rates that follow the scale of the present, and rounds that count with a limit:

    w_k ∝ π_k η_k e_k         η_k = c / B_k                         (π_k before the first error)
    κ = min(1, γ max_j B_j / max_j |r_j|)          r̄_k = κ r_k      (κ = 1 in the first round)
    B'_k = max((1 - δ) B_k, |r̄_k|, ρ max_j |r̄_j|)                   η'_k = c / B'_k
    e_k <- (e_k exp(η_k (r̄_k - h_k r̄_k²)))^min(1, η'_k / η_k)       h_k = min(η_k, 1 / (2 B'_k))
    e_k <- (1 - α) e_k + α W                                        W = Σ_k π_k e_k

So a scale is forgotten in some 1/δ rounds, the rates rise again when errors have become small, and an expert that
was bad for long comes back from α at the rate of today. A round out of all proportion counts as γ times the largest
lately; a scale that has changed for good is taken in by half as much again per round.

Bound. R_k = Σ_t κ r_k. At every time T and for every expert,

    R_k <= (ln 1/π_k + ln W) / η_k + Σ_t [ h_k r̄_k² + ln(1 / (1 - α)) / η'_k + (1/η_k - 1/η'_k)⁺ (ln e_k)⁺ ]

by unrolling ``ln(e_k) / η_k``: the learning step adds ``r̄_k - h_k r̄_k²`` to it, a fall of the rate leaves it as it is,
a rise (e_k stays) takes the last term from it, the share at most the one before. Since e_k >= α W after each round,
the same holds on *every interval*, with Σ over the interval and ``-ln(α W) / η_k`` of its beginning more: that is
what "best now" means. The excess of the loss, weighted by κ, is less than R_k by Σ κ (q - x_k)², which pays for the sum
of ``h_k r̄_k²`` in all rounds where (q - y)² <= B_k / 4c; R_k itself bounds the excess over convex combinations, too.

W stays small: exp(x - x²) <= 1 + x for x >= -1/2, and ``Σ_k π_k η_k e_k r̄_k = 0``, so the learning step does not raise
it; a fall of the rate raises it by at most ``Σ_k π_k (η_k / η'_k - 1) / e`` (as x <= x^p + (p - 1)/e for p >= 1).
Only a surprise, a round with |r̄_k| > B_k / 2c for some k or the first (whose weights are π_k), may break the first of
these, and multiplies W by at most e^{1/4}. So ``ln W <= N/4 + ln(1 + Σ_t Σ_k π_k (η_k / η'_k - 1)⁺ / e)`` with N
surprises.

Chosen: c = 1/5. The proof allows 1/2, but then the curvature pays for the second-order term only while (q - y)² <=
B_k / 2, and not in the largest rounds; and few large rounds (a burst of fifteen that hold most of the error of a
series) then decide the weights by luck. 1/10 learns too slowly. γ = 3/2 (at 2 the bursts decide again, at 1.2 steps are
not believed), δ = 1/200, α = 1/500 (one change of the best in 500 rounds), ρ = 1/100 (an expert that happened to equal
the mixture would have all the weight for ever). Between half and twice these (for γ: 1.2 and 2) errors differ by a
per cent, on series with one burst by up to three.

Alternatives tried: rates sqrt(ln K / Σ r²), which c / B undercuts but in very long series, where they are too low for
a change after it; one rate for all (mirror descent with a share), by which members that are much worse keep too much
weight; many rates at once, shared like the experts (as Squint has them), slower and no better; weights by discounted
squared errors, which follow every change and are led by chance; a second, quick mixture as an expert of the first; a
share in proportion to the loss; no limit on a round, after which one that was 1000 times too slow costs 3 to 10 % for
hundreds of rounds; ML-Poly (Gaillard, Stoltz and van Erven, 2014); weights C_k^-8 by squared errors C_k, discounted by
1/200 a round, which let one large round decide, and exp(-C_k / E) with the largest such error E, by which experts are
equal again after a large round: better where large changes last, worse where they are bursts
(`benchmarks/prediction_worlds.py` has the figures). The second costs 4 % on heavy tails, too.

Cost: O(K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import add, mul
from typing import Any

_RATE, _LIMIT, _FORGET, _FLOOR = 0.2, 1.5, 0.005, 0.01  # c, γ, δ, ρ
SHARE = 0.002  # α
_NOTHING = 1e-12  # an advantage below this is none: of forecasts that are off by a millionth


class ExpertWeights:
    """The weights, and what is known of their regret."""

    __slots__ = ("_log_e", "_prior", "_regret", "_scales", "_spent", "_weights", "counted", "share")

    def __init__(self, prior: Sequence[float], share: float = SHARE) -> None:
        zeros = (0.0,) * len(prior)
        self.share = share
        self.counted = 1.0
        """``κ`` of the last round"""
        self._prior = tuple(prior)  # π_k
        self._scales = zeros  # B_k; all 0 before the first error
        self._log_e, self._regret, self._spent = zeros, zeros, zeros  # ln e_k, R_k, and the sum over t in its bound
        self._weights: tuple[float, ...] | None = self._prior  # w_k, where they have been asked for

    @property
    def weights(self) -> tuple[float, ...]:
        """``w_k``; they sum to 1."""
        if self._weights is None:
            top = max(self._log_e)
            columns = zip(self._prior, self._scales, self._log_e, strict=True)
            raw = [p / b * math.exp(e - top) for p, b, e in columns]
            total = sum(raw)
            self._weights = tuple([x / total for x in raw])
        return self._weights

    @property
    def regret(self) -> tuple[float, ...]:
        """``R_k``."""
        return self._regret

    @property
    def log_potential(self) -> float:
        """``ln W``."""
        top = max(self._log_e)
        return top + math.log(sum([p * math.exp(e - top) for p, e in zip(self._prior, self._log_e, strict=True)]))

    @property
    def bound(self) -> tuple[float, ...]:
        """The bound on `regret` that holds now (infinite before the first error)."""
        if not any(self._scales):
            return (math.inf,) * len(self._prior)
        price = self.log_potential
        columns = zip(self._prior, self._scales, self._spent, strict=True)
        return tuple((price - math.log(p)) * b / _RATE + spent for p, b, spent in columns)

    def learn(self, forecasts: Sequence[float], outcome: float) -> None:
        """One round of the recurrences."""
        q = sum(map(mul, self.weights, forecasts))
        slope = 2.0 * (q - outcome)
        advantage = [slope * (q - x) for x in forecasts]
        largest, known = max(map(abs, advantage)), max(self._scales)
        if known == 0.0 and largest < _NOTHING:
            return
        self.counted = 1.0 if known == 0.0 or largest <= _LIMIT * known else _LIMIT * known / largest
        counted = [self.counted * r for r in advantage]
        least = max(_FLOOR * self.counted * largest, _NOTHING)
        price = -math.log1p(-self.share) / _RATE
        rows = [_step(r, b, e, least) for r, b, e in zip(counted, self._scales, self._log_e, strict=True)]
        scales, log_e, spent = zip(*rows, strict=True)
        self._weights, self._scales = None, scales
        self._spent = tuple([old + new + price * b for old, new, b in zip(self._spent, spent, scales, strict=True)])
        self._regret = tuple(map(add, self._regret, counted))
        top = max(log_e)
        e = [math.exp(one - top) for one in log_e]
        given = self.share * sum(map(mul, self._prior, e))
        self._log_e = tuple([top + math.log(max((1.0 - self.share) * one + given, 1e-300)) for one in e])

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {name: list(getattr(self, f"_{name}")) for name in _COLUMNS}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        columns = {name: tuple(map(float, state[name])) for name in _COLUMNS}
        k = len(self._prior)
        if any(len(column) != k or not all(map(math.isfinite, column)) for column in columns.values()):
            raise ValueError(f"state: {', '.join(_COLUMNS)} must each hold {k} finite numbers, got {columns}")
        if min(columns["prior"]) <= 0.0 or min(columns["scales"]) < 0.0:
            raise ValueError(f"state: the prior must be above 0 and scales not below, got {columns}")
        for name, column in columns.items():
            setattr(self, f"_{name}", column)
        self._weights = None if any(self._scales) else self._prior


def _step(r: float, scale: float, log_e: float, least: float) -> tuple[float, float, float]:
    """``B'_k``, ``ln e_k`` before the share, and what the bound pays for learning and for a rise of the rate."""
    after = max((1.0 - _FORGET) * scale, abs(r), least)
    scale = scale or after
    eta, h = _RATE / scale, min(_RATE / scale, 0.5 / after)
    log_e += eta * (r - h * r * r)
    spent = h * r * r + max(scale - after, 0.0) * max(log_e, 0.0) / _RATE
    return after, log_e * min(1.0, scale / after), spent


_COLUMNS = ("prior", "scales", "log_e", "regret", "spent")
