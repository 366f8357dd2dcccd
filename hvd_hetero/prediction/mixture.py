"""A mixture that follows whichever predictor is best now, with a bound.

Members ``k = 1..K`` forecast ``x_k``, the measurement is ``y``, all as logarithms of speeds (so errors are relative,
and a mixture of positive speeds is positive). The mixture forecasts ``q = Σ_k w_k x_k``; its loss is ``(q - y)²``.
With the slope of the loss at q, ``r_k = 2 (q - y)(q - x_k)`` is member k's advantage over the mixture, to first
order. Bernstein online aggregation (Wintenberger, "Optimal learning with Bernstein online aggregation", 2017), with a
fixed share (Herbster and Warmuth, 1998) so that a member that was bad for long can come back:

    w_k ∝ π_k η_k e_k                               (π_k before the first error)
    B_k <- max(B_k, |r_k|)     V_k <- V_k + r_k²    η'_k = min(1 / (2 B_k), sqrt(ln K / V_k))
    e_k <- exp(η'_k (log(e_k) / η_k + r_k - h_k r_k²))                with h_k = min(η_k, 1 / (2 B_k))
    e_k <- (1 - α) e_k + α W                        W = Σ_k π_k e_k

The prior π is uniform; but where the CPU is known from the start, the members that use it share 0.7: a change of the
CPU is the one thing that hurts the others much, and comes before anything could be learnt about it.

Bound. By convexity of the loss its excess over any fixed convex combination u of the members is at
most ``Σ_k u_k R_k``, ``R_k = Σ_t r_k``; and unrolling the update, at every time T and for every member,

    R_k <= (ln 1/π_k + ln W + T ln(1 / (1 - α))) / η_k + Σ_t h_k r_k².

W stays small: exp(x - x²) <= 1 + x for x >= -1/2 and the weights make ``Σ_k π_k η_k e_k r_k = 0``, so the learning step
does not raise it; the change of rate raises it by at most ``Σ_k π_k (η_k / η'_k - 1) / e`` (because x <= x^p +
(p - 1)/e for p >= 1); the share leaves it as it is. Only a round with a record, an |r_k| above all before it, may break
the first of these, and multiplies W by at most e^{1/4}. So ``ln W <= N/4 + ln(1 + Σ_t Σ_k π_k (η_k / η'_k - 1) / e)``
with N records. That grows like the logarithm of T only where N does (independent errors; a series whose errors keep
growing makes a record of every round), and then R_k is of the order ``sqrt(V_k ln K) + B_k ln K + αT/η_k``: small where
a member is nearly as good as the mixture, up to about αT < ln K; after that the share costs more than the learning.
`Mixture.bound` gives the right-hand side; tests hold both against random and adversarial series.

α = 0.001 (arbitrary: about one change of the best member in a thousand rounds).

The members by default: memoryless, EMA 0.5, `Reverting`, and NARX, which is EMA 0.2 where no driver is known. So the
mixture is a good default with drivers or without, and no member is there twice.

Alternatives tried: weights from exp(-squared error / variance) follow one member at a time, and lose what averaging
several gains; ML-Poly (Gaillard, Stoltz and van Erven, 2014) has a simpler bound and was a little worse on every
trace; forgetting by discount instead of a share, worse at every rate.

Known weakness: one round a thousand times too slow outweighs all others in V and B, so the weights hardly move again.
Weighing such rounds down (as `Reverting` does by `moderation`) was tried with limits of 7 to 30 mean errors, gradually
and by leaving them out: each helped some recorded series and hurt others, by 2.5 % without an outlier and by far
more with one.

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
from hvd_hetero.prediction.reverting import Reverting

_ALPHA = 0.001
_TRUST = 0.7  # in members that use drivers; at 0.5 the first change costs too much, at 0.95 useless drivers do


class Mixture(Predictor):
    """Predicts by the weighted geometric mean of its members."""

    name = "mixture"

    def __init__(self, members: Sequence[Predictor] | None = None, *, share: float = _ALPHA) -> None:
        super().__init__()
        if not 0.0 <= share < 1.0:
            raise ValueError(f"share: must be in [0, 1), 0 for the best member of all time, got {share!r}")
        self.members = (Memoryless(), EMA(0.5), Reverting(), NARX()) if members is None else tuple(members)
        if not self.members or any(not isinstance(m, Predictor) for m in self.members):
            raise ValueError(f"members: must be one predictor or more, got {members!r}")
        if len({id(m) for m in self.members}) < len(self.members):
            raise ValueError("members: must be different objects, since each holds its own history")
        self.share = float(share)
        self.uses_drivers = any(m.uses_drivers for m in self.members)
        zeros = (0.0,) * len(self.members)
        self._prior = (1.0 / len(self.members),) * len(self.members)  # π_k
        self._regret, self._spent = zeros, zeros  # R_k, Σ h_k r_k²
        self._largest, self._squares = zeros, zeros  # B_k, V_k
        self._log_e, self._rates = zeros, zeros  # log(e_k), η_k (0: no error yet)
        self._learnt = 0  # T, rounds with a rate

    @property
    def weights(self) -> tuple[float, ...]:
        """What each member counts for in the next forecast; they sum to 1."""
        if not any(self._rates):
            return self._prior
        top = max(self._log_e)
        raw = [p * eta * math.exp(e - top) for p, eta, e in zip(self._prior, self._rates, self._log_e, strict=True)]
        total = sum(raw)
        return tuple(x / total for x in raw)

    @property
    def regret(self) -> tuple[float, ...]:
        """``R_k``: to first order, by how much each member would have done better so far, in squared logarithms."""
        return self._regret

    @property
    def log_potential(self) -> float:
        """``ln W``."""
        top = max(self._log_e)
        return top + math.log(sum(p * math.exp(e - top) for p, e in zip(self._prior, self._log_e, strict=True)))

    @property
    def bound(self) -> tuple[float, ...]:
        """The bound on `regret` that holds now (infinite before the first error)."""
        price = self.log_potential - self._learnt * math.log1p(-self.share)
        columns = zip(self._prior, self._rates, self._spent, strict=True)
        return tuple((price - math.log(p)) / eta + spent if eta > 0.0 else math.inf for p, eta, spent in columns)

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        if self.rounds == 0:
            self._prior = _prior([m.uses_drivers and not math.isnan(cpu) for m in self.members])
        else:
            y, xs = math.log(speed), [math.log(m.predict(cpu, memory)) for m in self.members]
            q = sum(w * x for w, x in zip(self.weights, xs, strict=True))
            advantage = [2.0 * (q - y) * (q - x) for x in xs]
            if any(abs(r) > _NOTHING for r in advantage) or any(self._rates):
                self._score(advantage)
        for member in self.members:
            member.update(speed, cpu, memory)

    def _score(self, advantage: Sequence[float]) -> None:
        """One round of the recurrences."""
        ln_k = math.log(max(2, len(advantage)))  # a single member needs no rate, but one above 0
        self._largest = tuple(max(b, abs(r), _NOTHING) for b, r in zip(self._largest, advantage, strict=True))
        self._squares = tuple(v + r * r for v, r in zip(self._squares, advantage, strict=True))
        after = tuple(
            min(0.5 / b, math.sqrt(ln_k / v) if v > 0.0 else math.inf)
            for b, v in zip(self._largest, self._squares, strict=True)
        )
        rates = self._rates if any(self._rates) else after
        steps = tuple(min(eta, 0.5 / b) for eta, b in zip(rates, self._largest, strict=True))
        cost = tuple(h * r * r for h, r in zip(steps, advantage, strict=True))
        log_e = [
            new * (e / old + r - c)
            for new, e, old, r, c in zip(after, self._log_e, rates, advantage, cost, strict=True)
        ]
        top = max(log_e)
        mean = sum(p * math.exp(e - top) for p, e in zip(self._prior, log_e, strict=True))
        keep, give = 1.0 - self.share, self.share * mean
        self._log_e = tuple(top + math.log(max(keep * math.exp(e - top) + give, 1e-300)) for e in log_e)
        self._regret = tuple(total + r for total, r in zip(self._regret, advantage, strict=True))
        self._spent = tuple(total + c for total, c in zip(self._spent, cost, strict=True))
        self._rates, self._learnt = after, self._learnt + 1

    def _forecast(self, cpu: float, memory: float) -> float:
        pairs = zip(self.weights, self.members, strict=True)
        return math.exp(sum(w * math.log(m.predict(cpu, memory)) for w, m in pairs if w > 0.0))

    def _state(self) -> dict[str, Any]:
        own = {name: list(getattr(self, f"_{name}")) for name in _COLUMNS}
        return {"members": [member.state_dict() for member in self.members], "learnt": self._learnt, **own}

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = [member["predictor"] for member in state["members"]]
        mine = [member.name for member in self.members]
        if saved != mine:
            raise ValueError(
                f"state: members must be {mine}, got {saved}; build the mixture with the members it was saved with"
            )
        columns = {name: tuple(map(float, state[name])) for name in _COLUMNS}
        if any(len(column) != len(mine) or not all(map(math.isfinite, column)) for column in columns.values()):
            raise ValueError(f"state: {', '.join(_COLUMNS)} must each hold {len(mine)} finite numbers, got {columns}")
        for member, one in zip(self.members, state["members"], strict=True):
            member.load_state_dict(one)
        for name, column in columns.items():
            setattr(self, f"_{name}", column)
        self._learnt = int(state["learnt"])


def _prior(informed: Sequence[bool]) -> tuple[float, ...]:
    trusted = sum(informed)
    if trusted in (0, len(informed)):
        return (1.0 / len(informed),) * len(informed)
    return tuple(_TRUST / trusted if known else (1.0 - _TRUST) / (len(informed) - trusted) for known in informed)


_COLUMNS = ("prior", "regret", "spent", "largest", "squares", "log_e", "rates")
_NOTHING = 1e-100  # an advantage below this is none: its square is no number any more
