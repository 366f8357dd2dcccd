"""A forecast carried along by the CPU: where that jumps, so does the speed. Member of the mixture with drivers; not in
the papers.

With ``y = log v``, c the CPU available, read before the round, and J its jump (`prediction.jumps`), 0 in most rounds,

    ŷ = r̂ + L + β J        r̂: what another predictor says of the series exp(y - L), by speeds alone
    L <- (1 - δ) (L + β J)  what the CPU has done to the speed lately, with β as learnt from this round

So a change that the driver tells is in the forecast of its first round, and the driver's scatter is in none, except for
that of one reading per jump, which the speeds after it put right. (NARX takes each reading at its word: its forecasts
scatter as the driver does.) A CPU seldom changes just between two rounds: the last speed before a reading that jumps is
partly of either side. Hence, where J is not 0, r̂ is without that speed (unless it was in the round of a jump itself),
and the other predictor forgets it.

β is how much of a jump reaches the speed: 1 where a rank computes on all there is and the driver tells the truth, 0
where it uses fewer cores than are free. It is learnt from the jumps,

    β = max(0, λ^n τ + Σ λ^a J z) / (λ^n τ + Σ λ^a J²)     z = y - r̂ - L, at most 2 |J| either way

after n of them, a of which followed that of J and z; it starts from 1, with the weight of one halving of the CPU. δ
lets L return to 0, slowly enough for the other predictor to follow: a driver that sinks slowly and leaps back would
drive it away for ever. A forecast stays within a factor 2 of the slowest and fastest speed seen, whatever drivers say.

Arbitrary: δ = 1/1000, τ = (log 2)², λ = 0.9. A jump that was none, a reading gone astray, costs two bad forecasts, and
a few more if it was hardly one. A rank whose CPU is not known has the other predictor's forecast. Cost: that of the
other predictor and of its state, and of `Jumps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvd_hetero.prediction.base import Predictor
from hvd_hetero.prediction.mixture.jumps import Jumps
from hvd_hetero.prediction.mixture.reverting import Reverting

_KEEP = 1.0 - 0.001  # 1 - δ
_WEIGHT, _REMEMBER = math.log(2.0) ** 2, 0.9  # τ, λ
_MARGIN = math.log(2.0)
_EXTREME = 700.0  # of logarithms that are to have an exponential


class Carried(Predictor):
    """Predicts what ``of`` predicts by speeds alone (by default `Reverting`), carried along by jumps of the CPU."""

    name = "carried"
    uses_drivers = True

    def __init__(self, of: Predictor | None = None) -> None:
        super().__init__()
        self.of = Reverting() if of is None else of
        if not isinstance(self.of, Predictor) or self.of.uses_drivers:
            raise ValueError(f"of: must be a predictor that does without drivers, got {of!r}")
        self._jumps = Jumps()
        self._before: dict[str, Any] | None = None  # ``of`` without the latest speed
        self._earlier = math.nan  # and the logarithm of what it forecast then
        self._carried = 0.0  # L
        self._explained = self._squares = _WEIGHT  # the sums in β
        self._lowest, self._highest = math.inf, -math.inf

    @property
    def followed(self) -> float:
        """β."""
        return max(self._explained, 0.0) / self._squares

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        y, jump = math.log(speed), self._jumps.of(cpu)
        if jump:
            if self._before is not None:
                self.of.load_state_dict(self._before)
            missed = y - math.log(self.of.predict()) - self._carried
            self._explained = _REMEMBER * self._explained + jump * min(max(missed, -2 * abs(jump)), 2 * abs(jump))
            self._squares = _REMEMBER * self._squares + jump * jump
            self._carried += self.followed * jump
        self._jumps.learn(cpu)
        self._lowest, self._highest = min(self._lowest, y), max(self._highest, y)
        self._carried *= _KEEP
        self._before = None
        if self.rounds and not jump:
            self._before, self._earlier = self.of.state_dict(), math.log(self.of.predict())
        self.of.update(speed if self._carried == 0.0 else math.exp(min(max(y - self._carried, -_EXTREME), _EXTREME)))

    def _forecast(self, cpu: float, memory: float) -> float:
        jump = self._jumps.of(cpu)
        carried = self._carried + self.followed * jump
        if carried == 0.0:
            return self.of.predict()
        earlier = jump and self._before is not None
        y = (self._earlier if earlier else math.log(self.of.predict())) + carried
        return math.exp(min(max(y, self._lowest - _MARGIN), self._highest + _MARGIN))

    def _state(self) -> dict[str, Any]:
        return {
            "of": self.of.state_dict(),
            "before": self._before,
            "jumps": self._jumps.state(),
            "carried": [self._carried, self._explained, self._squares],
            "range": [self._lowest, self._highest] if self.rounds else None,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        carried, explained, squares = map(float, state["carried"])
        if not all(map(math.isfinite, (carried, explained, squares))) or squares <= 0.0:
            raise ValueError(f"state: carried must be three finite numbers, the last above 0, got {state['carried']}")
        jumps = Jumps()
        jumps.restore(state["jumps"])
        lowest, highest = map(float, state["range"] or (math.inf, -math.inf))
        earlier, kept = math.nan, self.of.state_dict()
        try:
            if state["before"] is not None:
                self.of.load_state_dict(state["before"])
                earlier = math.log(self.of.predict())
            self.of.load_state_dict(state["of"])
        except Exception:
            self.of.load_state_dict(kept)
            raise
        self._jumps, self._before, self._earlier = jumps, state["before"], earlier
        self._carried, self._explained, self._squares = carried, explained, squares
        self._lowest, self._highest = lowest, highest
