r"""Averages where speeds only seem to move, predictions where they do: a forecast to plan by.

A measured speed scatters, and so does a prediction made of it. A plan that follows pays for that twice: its split is
off by the error of the prediction, and batches that change all the time cost something themselves (buffers and kernels
for new sizes). An average over many rounds scatters less, and is wrong wherever speeds do move. So, with the measured
speed v, its prediction p for the next round, p' the prediction of the round before, and m rounds since the level was
last set:

    m <- min(m + 1, M)
    u <- u + (v - u) / m                  the average since then; from m = M on, an exponential one
    σ  = median |v / p' - 1| / 0.6745     the last N rounds (the upper one of an even number), 0 before there are three
    u <- p,  m <- 1                       where |p - u| > σ u: the level has changed

A level set like that is known to σ / sqrt(m), so a rank counts as late only beyond that: the `uncertainty`.

Whether averages or predictions are the better forecasts is measured too: with

    D_p <- λ D_p + min((v / p' - 1)², (3 σ)²),     and D_u alike with u' in the place of p',

the prediction is followed as it is, while D_u > g D_p: where speeds wander, or a driver tells their changes, an average
is late, and nothing is to be gained by calm. It is followed, too, where it leaves the level by more than σ. Its own
uncertainty is then σ / 2: what it misses is partly noise of the speed that comes, which no plan can follow. Without
that, shares of equal ranks wandered in steps of some milliseconds, whose times scatter by a tenth and more.

M = 64, N = 32, λ = 0.98, g = 1.05 and the half are arbitrary. On the tests' series (normal scatter of up to 10 %,
switches, a random walk) this takes a third of the new splits where speeds only scatter, and costs 0.4 % of the rate at
most where they move, against following every prediction. Where one rank of three scatters by 40 % it costs 1 to 2 %,
for a tenth of the new splits.

For predictors that average or mix. The forecast of "memoryless" is itself as noisy as σ, so its levels are set anew
every few rounds.

Cost: the predictor's, and O(N).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from hvd_hetero.prediction.base import Predictor, usable

_LONGEST, _ERRORS, _FORGET, _GRACE = 64, 32, 0.98, 1.05  # M, N, λ, g
_ENOUGH = 3  # errors before their median says anything
_BELIEVED = 0.5  # of σ, which a prediction is uncertain by
_NORMAL = 0.6745  # the median of |x| where x is standard normal
_LIMIT = 9.0  # (3 σ)² in units of σ²


class Steady(Predictor):
    """Predicts the average of the speeds since they last moved, or what ``of`` predicts where that is better."""

    name = "steady"

    def __init__(self, of: Predictor) -> None:
        super().__init__()
        self.of = of
        self.uses_drivers = of.uses_drivers
        self._level = self._age = 0.0  # u, m
        self._errors: deque[float] = deque(maxlen=_ERRORS)  # |v / p' - 1|
        self._noise = 0.0  # σ
        self._by_prediction = self._by_average = 0.0  # D_p, D_u
        self._said: float | None = None  # p, where drivers do not matter and nothing new was learnt

    def _predicted(self, cpu: float, memory: float) -> float:
        """p, asked once a round where drivers do not matter: it is needed up to three times."""
        if self.uses_drivers:
            return self.of.predict(cpu, memory)
        if self._said is None:
            self._said = self.of.predict(cpu, memory)
        return self._said

    def _observe(self, speed: float, cpu: float, memory: float) -> None:
        before = self._predicted(cpu, memory) if self.rounds else math.nan
        self.of.update(speed, cpu, memory)
        self._said = None
        now = self._predicted(cpu, memory)
        if not usable(before):
            self._level, self._age = now, 1.0
            return
        self._judge(abs(speed / before - 1.0), speed / self._level - 1.0)
        self._age = min(self._age + 1.0, _LONGEST)
        self._level += (speed - self._level) / self._age
        if abs(now - self._level) > self._noise * self._level:
            self._level, self._age = now, 1.0

    def _judge(self, error: float, missed: float) -> None:
        """Compare what was forecast with what came."""
        self._errors.append(error)
        self._noise = scatter_of(self._errors)
        limit = _LIMIT * self._noise * self._noise
        self._by_prediction = _FORGET * self._by_prediction + min(error * error, limit)
        self._by_average = _FORGET * self._by_average + min(missed * missed, limit)

    def _forecast(self, cpu: float, memory: float) -> float:
        p = self._predicted(cpu, memory)
        calm = self._by_average <= _GRACE * self._by_prediction and abs(p - self._level) <= self._noise * self._level
        self.uncertainty = self._noise / math.sqrt(self._age) if calm else _BELIEVED * self._noise
        return self._level if calm else p

    def _state(self) -> dict[str, Any]:
        return {
            "of": self.of.state_dict(),
            "level": [self._level, self._age],
            "errors": list(self._errors),
            "judged": [self._by_prediction, self._by_average],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        level, age = map(float, state["level"])
        judged = tuple(map(float, state["judged"]))
        errors = [float(error) for error in state["errors"]]
        if not all(0.0 <= x < math.inf for x in (level, age, *judged, *errors)) or len(errors) > _ERRORS:
            raise ValueError(
                f"state: level, judged and {_ERRORS} errors at most must be finite, 0 or more, got {state}"
            )
        self.of.load_state_dict(state["of"])
        self._level, self._age = level, age
        self._by_prediction, self._by_average = judged
        self._errors = deque(errors, maxlen=_ERRORS)
        self._noise = scatter_of(errors)
        self._said = None


def scatter_of(errors: Collection[float]) -> float:
    """σ: the median of |errors|, which few large ones do not move, as a standard deviation; 0 of less than three."""
    return sorted(errors)[len(errors) // 2] / _NORMAL if len(errors) >= _ENOUGH else 0.0
