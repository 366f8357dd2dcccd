"""The fixed costs of n ranks at once: the estimate of `fixed_cost` on arrays, for ranks that go by no drivers.

``FixedCost`` is the definition, and what a rank of a real training has. ``at`` names the ranks that a step is of.

Shapes: n ranks, m of them in a step, a grid of G shares φ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvd_hetero.measurement.fixed_cost import (
    _BEYOND,
    _CAUTION,
    _FIRST_NOISE,
    _FORGETS,
    _INFORMED,
    _JUMP,
    _LEAST_JUMP,
    _LEAST_NOISE,
    _LONGEST,
    _MODEL,
    _NORMAL,
    _ODDS,
    _SHARES,
    _STEP,
    _TAILS,
    _TELLS,
    _UNLIKELY,
)

__all__ = ["FixedCosts"]

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]


class FixedCosts:
    """β of n ranks, with one ``reference``."""

    def __init__(self, reference: float, ranks: int) -> None:
        self.reference = reference
        self.samples = np.zeros(ranks)
        """β; 0 where it is not known"""
        self._size, self._factor = np.full(ranks, reference), np.ones(ranks)  # c
        self._against = np.zeros((ranks, len(_SHARES)))  # L
        self._noise = np.full(ranks, _FIRST_NOISE)  # σ
        # A stretch's size, level, latest and rounds; 0 rounds: there is none.
        self._now, self._before = np.zeros((2, 4, ranks))

    def learn(self, size: Floats, seconds: Floats, at: Ranks, *, teaches: bool) -> Floats:
        """The paces of ranks whose micro-batches had these sizes and took so long each."""
        before = self.samples[at]
        self._observe(size, np.log(seconds), at)
        after = self.samples[at]
        self._factor[at] *= (self._size[at] + before) / (self._size[at] + after)
        if teaches:
            self._size[at] = size
        return self._factor[at] * (size + after) / seconds

    def speeds(self, paces: Floats) -> Floats:
        """Each rank's speed in micro-batches of the reference size, at paces made of what ``learn`` returned."""
        return paces / self._factor * self.reference / (self.reference + self.samples)

    def _observe(self, size: Floats, level: Floats, at: Ranks) -> None:
        now_size, mean, latest, rounds = self._now[:, at]
        deviation = self._noise[at] * np.sqrt(1.0 + 1.0 / np.clip(rounds, 1.0, _LONGEST))
        missed = np.abs(level - mean)
        resized = (rounds == 0.0) | (size != now_size)
        begins = resized | (missed > np.maximum(_JUMP * deviation, _LEAST_JUMP))
        if np.count_nonzero(begins):
            self._begin(size[begins], level[begins], resized[begins], at[begins])

        goes_on, rounds = ~begins, rounds + 1.0
        step = np.where(missed > _NORMAL * deviation, _STEP, 1.0 / _STEP)
        noise = np.maximum(self._noise[at] * step, _LEAST_NOISE)
        mean, latest = mean + (level - mean) / np.minimum(rounds, _LONGEST), latest + 0.5 * (level - latest)
        on = at[goes_on]
        self._noise[on] = noise[goes_on]
        self._now[1:, on] = mean[goes_on], latest[goes_on], rounds[goes_on]

        compared = self._before[3, at] > 0.0
        compared &= goes_on
        if np.count_nonzero(judged := resized | compared):
            self._judge(at[judged])
        if np.count_nonzero(over := compared & (rounds == _LONGEST)):
            self._keep_evidence(at[over])
            self._before[:, at[over]] = 0.0

    def _begin(self, size: Floats, level: Floats, resized: npt.NDArray[np.bool_], at: Ranks) -> None:
        """A new stretch; the one before is compared with it where the size has changed, and not where ranks have."""
        self._keep_evidence(at)
        self._before[:, at] = np.where(resized, self._now[:, at], 0.0)
        self._now[:, at] = size, level, level, np.ones(len(at))

    def _judge(self, at: Ranks) -> None:
        """β by all that is known."""
        told, evidence, kept = self._evidence(at)
        against = self._against[at]
        against[told] = kept[:, None] * against[told] + evidence
        against += _UNLIKELY
        likely = np.exp(-0.5 * (against - against.min(axis=1, keepdims=True)))
        likely /= likely.sum(axis=1, keepdims=True)
        mean = likely @ _SHARES
        variance = (likely * (_SHARES - mean[:, None]) ** 2).sum(axis=1)
        share = np.where(likely[:, 0] < 0.5, np.maximum(mean - variance / _CAUTION, 0.0), 0.0)
        self.samples[at] = self.reference * share / (1.0 - share)

    def _keep_evidence(self, at: Ranks) -> None:
        told, evidence, kept = self._evidence(at)
        self._against[at[told]] = kept[:, None] * self._against[at[told]] + evidence

    def _evidence(self, at: Ranks) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
        """Which ranks' last two stretches tell something; what they say against each φ, and how much else stays."""
        size, level, _, rounds = self._now[:, at]
        earlier_size, earlier_level, earlier_latest, earlier_rounds = self._before[:, at]
        told = (rounds > 0.0) & (earlier_rounds > 0.0)
        noise2, counted = self._noise[at] ** 2, np.clip((rounds, earlier_rounds), 1.0, _LONGEST)
        variance = noise2 * (1.0 / counted[0] + 1.0 / counted[1]) + _MODEL**2
        variance += 4.0 * np.maximum((earlier_latest - earlier_level) ** 2 - 0.5 * noise2, 0.0)
        changed = level - earlier_level
        most = np.log(np.where(told, size, 1.0) / np.where(told, earlier_size, 1.0))
        beyond = np.maximum(changed - np.maximum(most, 0.0), np.minimum(most, 0.0) - changed)
        told &= (most * most >= _TELLS * variance) & (beyond <= _BEYOND * np.sqrt(variance))
        changed, most, variance = changed[told], most[told], variance[told]
        betas = self.reference * _ODDS
        error = changed[:, None] - np.log((size[told, None] + betas) / (earlier_size[told, None] + betas))
        kept = 1.0 - _FORGETS * np.minimum(1.0, most * most / (_INFORMED * variance))
        return told, (_TAILS + 1.0) * np.log1p(error * error / (_TAILS * variance[:, None])), kept
