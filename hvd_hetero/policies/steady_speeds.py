r"""Speeds to plan by: predictions where speeds move, averages where they only seem to.

A measured speed scatters, and so does a prediction made of it. A plan that follows pays for that twice: its split is
off by the error of the prediction, and batches that change all the time cost something themselves (buffers and kernels
for new sizes). An average over many rounds scatters less, and is wrong wherever speeds do move. So, for rank i with
the measured speed v_i, its prediction p_i for the next round, and m_i rounds since its level was last set:

    m_i <- min(m_i + 1, M)
    u_i <- u_i + (v_i - u_i) / m_i        the average since then; from m_i = M on, an exponential one
    σ_i  = median |v_i / p_i' - 1| / 0.6745      p' the prediction of the round before; the last N rounds (the upper
                                                 one of an even number), 0 before there are three
    u_i <- p_i,  m_i <- 1                 where |p_i - u_i| > σ_i u_i: the level has changed

A level set like that is known to σ_i / sqrt(m_i), so a rank counts as late only beyond that.

Whether averages or predictions are the better forecasts is measured too: with

    D_p <- λ D_p + Σ_i min((v_i / p_i' - 1)², (3 σ_i)²),     and D_u alike with u_i' in the place of p_i',

the predictions are followed as they are, while D_u > g D_p: where speeds wander, or a driver tells their changes, an
average is late, and nothing is to be gained by calm.

M = 64, N = 32, λ = 0.98, g = 1.05 are arbitrary. The tests hold this to a third of the new splits where speeds only
scatter, and to 0.4 % of the rate where they switch or wander, against following every prediction.

For predictors that average or mix. The forecast of "memoryless" is itself as noisy as σ, so its levels are set anew
every few rounds.

Every step is an addition, a product, a quotient, a square root, a comparison or an exactly rounded sum, so all ranks
find the same.

Cost: O(N n) for n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SteadySpeeds"]

_LONGEST, _ERRORS, _FORGET, _GRACE = 64, 32, 0.98, 1.05  # M, N, λ, g
_ENOUGH = 3  # errors before their median says anything
_NORMAL = 0.6745  # the median of |x| where x is standard normal
_LIMIT = 9.0  # (3 σ)² in units of σ²

Floats = npt.NDArray[np.float64]


class SteadySpeeds:
    """The levels of all ranks, and how far each is from being known."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Nothing is known of any rank."""
        nobody = np.zeros(0)
        self._level = self._rounds = self._predicted = nobody  # u, m, p'
        self._errors = np.zeros((0, 0))  # |v / p' - 1|, the latest last
        self._by_prediction = self._by_average = 0.0  # D_p, D_u
        self._followed: tuple[Floats, Floats] | None = None  # what was answered last, where averages are believed

    def after(self, measured: Floats, predicted: Floats) -> tuple[Floats, Floats]:
        """The speeds to plan by, and the share by which each is uncertain (0: take it as it is).

        Where a rank has measured nothing that counts, nothing is learnt; where one has no usable prediction, either,
        all predictions are taken as they are.
        """
        as_they_are = predicted, np.zeros(len(predicted))
        if not _usable(predicted):
            return as_they_are
        if not _usable(measured):
            return as_they_are if self._followed is None else self._followed
        if len(self._level) != len(predicted):
            self.restart()
            self._level, self._rounds, self._predicted = predicted.copy(), np.ones(len(predicted)), predicted
            self._errors = np.zeros((0, len(predicted)))
            return as_they_are
        noise = self._judge(measured)
        self._predicted = predicted
        self._rounds = np.minimum(self._rounds + 1.0, _LONGEST)
        self._level = self._level + (measured - self._level) / self._rounds
        moved = np.abs(predicted - self._level) > noise * self._level
        self._level = np.where(moved, predicted, self._level)
        self._rounds = np.where(moved, 1.0, self._rounds)
        calm = self._by_average <= _GRACE * self._by_prediction
        self._followed = (self._level, noise / np.sqrt(self._rounds)) if calm else None
        return self._followed or as_they_are

    def _judge(self, measured: Floats) -> Floats:
        """Compare what was forecast with what came. Returns σ, 0 before enough is known."""
        error = np.abs(measured / self._predicted - 1.0)
        missed = measured / self._level - 1.0
        self._errors = np.concatenate((self._errors[-(_ERRORS - 1) :], error[None]))
        kept = len(self._errors)
        noise = np.zeros(len(error))
        if kept >= _ENOUGH:
            noise = np.partition(self._errors, kept // 2, axis=0)[kept // 2] / _NORMAL
        limit = _LIMIT * noise * noise
        by_prediction = math.fsum(np.minimum(error * error, limit).tolist())
        by_average = math.fsum(np.minimum(missed * missed, limit).tolist())
        self._by_prediction = _FORGET * self._by_prediction + by_prediction
        self._by_average = _FORGET * self._by_average + by_average
        return noise

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "level": self._level.tolist(),
            "rounds": self._rounds.tolist(),
            "predicted": self._predicted.tolist(),
            "errors": self._errors.tolist(),
            "by_prediction": self._by_prediction,
            "by_average": self._by_average,
            "followed": None if self._followed is None else [column.tolist() for column in self._followed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._level, self._rounds, self._predicted = (
            np.array(state[name], dtype=np.float64) for name in ("level", "rounds", "predicted")
        )
        self._errors = np.array(state["errors"], dtype=np.float64).reshape(len(state["errors"]), len(self._level))
        self._by_prediction, self._by_average = float(state["by_prediction"]), float(state["by_average"])
        level_and_share = state["followed"]
        self._followed = (
            None if level_and_share is None else (np.array(level_and_share[0]), np.array(level_and_share[1]))
        )


def _usable(speeds: Floats) -> bool:
    return bool((np.isfinite(speeds) & (speeds > 0)).all())
