"""A mixture that follows whichever predictor is best now, with a bound.

Members ``k = 1..K`` forecast ``x_k``, the measurement is ``y``, all as logarithms of speeds (so that errors are
relative, and the mixture of positive speeds is positive). The mixture forecasts ``q = Σ_k w_k x_k``; its loss is ``(q
- y)²``. With the slope of the loss at q, ``r_k = 2 (q - y)(q - x_k)`` is member k's advantage over the mixture, to
first order, and

    R_k <- γ R_k + r_k        V_k <- γ² V_k + r_k²        B <- max(γ² B, max_k r_k²)
    η_k = 1 / (B + V_k)       w_k ∝ η_k max(R_k, 0)       (uniform while no R_k is positive)

This is polynomially weighted averaging with one learning rate per member (ML-Poly: Gaillard, Stoltz, van Erven, "A
second-order bound with excess losses", COLT 2014; Gaillard's thesis, 2015), made scale-free by B and forgetful by γ.

Bound. Let ``Φ = Σ_k η_k max(R_k, 0)²``. From max(a + b, 0)² <= max(a, 0)² + 2 max(a, 0) b + b², and because the weights
make ``Σ_k η_k max(R_k, 0) r_k = 0``, one round gives ``Φ' <= c (γ² Φ + Σ_k η_k r_k²)`` with ``c = max_k η'_k / η_k``.
So with ``C <- c (γ² C + Σ_k η_k r_k²)``, started at the first round that has an error, at every time and for every
member

    R_k <= sqrt((B + V_k) C),

and by convexity of the loss, for every fixed convex combination u of the members, the discounted excess loss over it,
``Σ_t γ^{T-t} [(q_t - y_t)² - (Σ_k u_k x_{k,t} - y_t)²]``, is at most ``Σ_k u_k R_k``. Without discount ``c <= 1``
and, once no r exceeds the largest before it, C grows like ``K (1 + ln T)``: the excess is of order ``sqrt(K ln T ·
V_k)``, and V_k is small where the member is nearly as good as the mixture. With discount and steady noise C stays
about K. `Mixture.bound` gives the right-hand side; a test holds it against random and adversarial series.

γ = 0.998 (arbitrary, between following and certainty): what happened 500 rounds ago counts a third, as long as NARX's
window.

Cost: the members' (each predicts once more inside ``update``), and O(K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.narx import NARX


class Mixture(Predictor):
    """Predicts by the weighted geometric mean of its members; by default memoryless, EMA (0.5 and 0.2) and NARX.

    NARX is what makes use of drivers; without any it is one more EMA, so the mixture is a good default either way.
    """

    name = "mixture"

    def __init__(self, members: Sequence[Predictor] | None = None, *, discount: float = 0.998) -> None:
        super().__init__()
        if not 0.0 < discount <= 1.0:
            raise ValueError(f"discount: must be in (0, 1], 1 for no forgetting, got {discount!r}")
        self.members = (Memoryless(), EMA(0.5), EMA(), NARX()) if members is None else tuple(members)
        if not self.members or any(not isinstance(m, Predictor) for m in self.members):
            raise ValueError(f"members: must be one predictor or more, got {members!r}")
        if len({id(m) for m in self.members}) < len(self.members):
            raise ValueError("members: must be different objects, since each holds its own history")
        self.discount = float(discount)
        k = len(self.members)
        self._regret, self._squares, self._largest, self._c = [0.0] * k, [0.0] * k, 0.0, 0.0

    @property
    def weights(self) -> tuple[float, ...]:
        """What each member counts for in the next forecast; they sum to 1."""
        raw = [max(r, 0.0) * eta for r, eta in zip(self._regret, self._rates(), strict=True)]
        total = sum(raw)
        if total > 0.0:
            return tuple(x / total for x in raw)
        return (1.0 / len(raw),) * len(raw)

    @property
    def regret(self) -> tuple[float, ...]:
        """``R_k``: to first order, by how much better each member would have done so far (discounted)."""
        return tuple(self._regret)

    @property
    def bound(self) -> tuple[float, ...]:
        """The bound on `regret` that holds now, ``sqrt((B + V_k) C)``."""
        return tuple(math.sqrt((self._largest + v) * self._c) for v in self._squares)

    def close(self) -> None:
        """Close every member."""
        for member in self.members:
            member.close()

    def _rates(self) -> list[float]:
        # 1e-200: after very many rounds without any error B fades towards 0, where 1 / B is no number.
        return [1.0 / (self._largest + v) if self._largest + v > 1e-200 else 0.0 for v in self._squares]

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        if self.rounds > 0:
            forecasts = [math.log(m.predict(cpu, memory)) for m in self.members]
            mixed = sum(w * x for w, x in zip(self.weights, forecasts, strict=True))
            self._score(mixed - math.log(speed), [mixed - x for x in forecasts])
        for member in self.members:
            member.update(speed, cpu, memory)

    def _score(self, error: float, ahead: Sequence[float]) -> None:
        """One round of the recurrences; ``error`` is q - y and ``ahead`` q - x_k."""
        g, before = self.discount, self._rates()
        advantage = [2.0 * error * a for a in ahead]
        energy = sum(eta * r * r for eta, r in zip(before, advantage, strict=True))
        self._regret = [g * total + r for total, r in zip(self._regret, advantage, strict=True)]
        self._squares = [g * g * v + r * r for v, r in zip(self._squares, advantage, strict=True)]
        self._largest = max(g * g * self._largest, *(r * r for r in advantage))
        after = self._rates()
        if not any(before):  # the first round with an error: C is what Φ is
            self._c = sum(eta * max(r, 0.0) ** 2 for eta, r in zip(after, self._regret, strict=True))
        else:
            growth = max(new / old for new, old in zip(after, before, strict=True))
            self._c = growth * (g * g * self._c + energy)

    def _forecast(self, cpu: float, memory: float) -> float:
        return math.exp(
            sum(
                w * math.log(m.predict(cpu, memory)) for w, m in zip(self.weights, self.members, strict=True) if w > 0.0
            )
        )

    def _state(self) -> dict[str, Any]:
        return {
            "members": [member.state_dict() for member in self.members],
            "regret": list(self._regret),
            "squares": list(self._squares),
            "largest": self._largest,
            "c": self._c,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = [member["predictor"] for member in state["members"]]
        mine = [member.name for member in self.members]
        if saved != mine:
            raise ValueError(
                f"state: members must be {mine} to load here, got {saved}; build the mixture with those members"
            )
        for member, one in zip(self.members, state["members"], strict=True):
            member.load_state_dict(one)
        self._regret, self._squares = list(map(float, state["regret"])), list(map(float, state["squares"]))
        self._largest, self._c = float(state["largest"]), float(state["c"])
