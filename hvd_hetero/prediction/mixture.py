"""A mixture that follows the predictor that is best now: the default where no driver is known.

Members ``k = 1..K`` forecast ``v̂_k`` and have the prior weights ``π_k``. Then the round measures ``v``.

    w_k ∝ π_k (min_j C_j / C_k)^p                    p = min(12, n/4) after n errors; a ratio with C_k = 0 is 1
    v̂ = Π_k v̂_k^{w_k}
    C_k <- (1 - δ) C_k + κ (v̂_k - v)²                κ = min(1, max_j C_j / max_j (v̂_j - v)²)

So C_k sums the squared errors of the last 1/δ = 100 rounds or so. Errors refer to speeds, as the RMSE counts them. Of n
independent normal errors of unknown size, C^{-n/2} is the likelihood; p grows half as fast, as errors depend on one
another. κ: no round counts more than all before it.

Members: memoryless, EMA 0.5 and `Reverting`, which reads the CPU with ``drivers``. Constants and alternatives:
``benchmarks/results/mixture.md``. Cost: the members' (with drivers each predicts once more inside ``update``), and
O(K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, ClassVar

from hvd_hetero.kept import Figure
from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.ema import EMA
from hvd_hetero.prediction.memoryless import Memoryless
from hvd_hetero.prediction.reverting import Reverting

# p: at 12, a member whose RMSE is a tenth above the best one's gets a tenth of its weight.
_POWER_LIMIT, _POWER_PER_ROUND = 12.0, 0.25
_FORGOTTEN_PER_ROUND = 0.01  # δ


class Mixture(Predictor):
    """Predict by the weighted geometric mean of the members.

    On independent noise it scatters more than EMA 0.2's at first, and less from about 50 rounds on
    (``benchmarks/prediction_synthetic.py``).
    ``drivers`` lets `Reverting` read the CPU; ``members`` replaces them all.
    """

    name = "mixture"
    version: ClassVar[int] = 7
    KEPT = (Figure("_prior", positive=True), Figure("_errors"))

    def __init__(self, members: Sequence[Predictor] | None = None, *, drivers: bool = False) -> None:
        super().__init__()
        if members is not None and drivers:
            raise ValueError("drivers is for the default members, got members, too; leave one of them out")
        if members is None:
            members = (Memoryless(), EMA(0.5), Reverting(drivers=drivers))
        self.members = tuple(members)
        if not self.members or any(not isinstance(m, Predictor) for m in self.members):
            raise ValueError(f"members must be one predictor or more, got {members!r}; leave it out for the default")
        if len({id(m) for m in self.members}) < len(self.members):
            raise ValueError("members must be different objects, since each holds its own history; make one for each")
        self.uses_drivers = any(m.uses_drivers for m in self.members)
        self._prior = _prior(self.members, 0.0)  # π_k
        self._errors = [0.0] * len(self.members)  # C_k
        self._latest_forecasts: list[float] | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each member in the next forecast; they sum to 1."""
        least = min(self._errors)
        ratios = [least / c if c > least else 1.0 for c in self._errors]  # both may be 0
        power = min(_POWER_LIMIT, _POWER_PER_ROUND * (self.rounds - 1))
        shares = [p * ratio**power for p, ratio in zip(self._prior, ratios, strict=True)]
        total = sum(shares)
        return tuple([share / total for share in shares])

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        if self.rounds:
            self._learn(self._forecasts(cpu, memory), speed)
        elif not math.isnan(cpu):
            # A change of the CPU hurts the members that do not read it much, and comes before anything could be learnt
            # about it. With a uniform prior (and p up to 8 from the start, as in all of this), forecasts of recorded
            # series were 1.1 % worse, 4 % on one of them. At 0.95 worlds were forecast 0.4 % worse. At 0.999 they were
            # 0.3 % better; but if the CPU has no effect, noise was forecast 2 % worse, and walks 3 %.
            self._prior = _prior(self.members, 0.99)
        for member in self.members:
            member.update(speed, cpu, memory)
        self._latest_forecasts = None

    def _learn(self, forecasts: Sequence[float], speed: float) -> None:
        # Bounded, so that no sum of them is infinite.
        squares = [min((forecast - speed) * (forecast - speed), 1e300) for forecast in forecasts]
        known, largest = max(self._errors), max(squares)
        least = min(speed, *forecasts)  # as v alone may be a thousand times too large
        # Not while all errors before were rounding.
        kappa = known / largest if 1e-12 * least * least < known < largest else 1.0
        self._errors = [
            (1.0 - _FORGOTTEN_PER_ROUND) * c + kappa * d for c, d in zip(self._errors, squares, strict=True)
        ]

    def _forecast(self, cpu: float, memory: float) -> float:
        return math.exp(sum(map(mul, self.weights, map(math.log, self._forecasts(cpu, memory)))))

    def _forecasts(self, cpu: float, memory: float) -> list[float]:
        """Return the members' forecasts; computed twice a round only if drivers matter."""
        if self._latest_forecasts is None or self.uses_drivers:
            self._latest_forecasts = [m.predict(cpu, memory) for m in self.members]
        return self._latest_forecasts

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"members": [member.state_dict() for member in self.members]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = [member["predictor"] for member in state["members"]]
        mine = [member.name for member in self.members]
        if saved != mine:
            raise ValueError(
                f"state: members must be {mine}, got {saved}; build the mixture with the members it was saved with"
            )
        kept = [member.state_dict() for member in self.members]
        try:
            for member, one in zip(self.members, state["members"], strict=True):
                member.load_state_dict(one)
            super()._restore(state)
        except Exception:
            for member, one in zip(self.members, kept, strict=True):
                member.load_state_dict(one)
            raise
        self._latest_forecasts = None


def _prior(members: Sequence[Predictor], trust: float) -> tuple[float, ...]:
    """Return uniform weights, but for a share that goes to members that use drivers, if there are such and others."""
    users = sum(m.uses_drivers for m in members)
    others = len(members) - users
    if trust == 0.0 or 0 in (users, others):
        return (1.0 / len(members),) * len(members)
    return tuple(trust / users if m.uses_drivers else (1.0 - trust) / others for m in members)
