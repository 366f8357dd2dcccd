"""What samples cost by their lengths, learned by one rank from the seconds of its rounds.

A round (or micro-batch) of k micro-batches and b samples of lengths L_s in all, micro-batch j of b_j samples padded to
its longest, M_j::

    t = v (a_0 k + a_1 b + a_2 sum_s L_s + a_3 sum_s L_s^2 + a_4 sum_j b_j M_j + a_5 sum_j b_j M_j^2) = v a·x,    a >= 0

The last two terms are layers that compute on padding, too: a_5 is attention. The form a belongs to the model; the level
v is how slow the rank is now, and may change at any time. So the scale of a is free, and fixed by a·m = 1, with m the
mean of x: v is the seconds of a mean round.

**Level.** v_n is the median of t / a·x over the nine rounds around round n.

**Form**, from the last N rounds, by one step of iteratively reweighted least squares for each round::

    minimise  sum_n w_n ((1 - v_n a·x_n / t_n) / f_n)^2 + ρ |z - e_2|^2,    z_j = a_j m_j >= 0
    w_n = min(1, h / r_n),    r_n = |log(t_n / v_n a·x_n)|,    h = median of r,    f_n = max(1, v_n a·x_n / t_n)

Relative errors count. w and f bound the effect of rounds that are slow for once, or too fast to be true. e_2 says
"lengths as they are", or is a form that was learned before.

Cost: N rows of 6 numbers, nine times sorted, and a least-squares problem of 6 × 6 with z >= 0, for each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.rounds import LENGTHS, NO_SAMPLES, CostRule, SampleFigures

Floats = npt.NDArray[np.float64]

# Rounds of a level, and N, the rounds of a form (both arbitrary). Below two levels the form stays as it is. The level
# takes costs that change more slowly than its rounds, such as lengths sorted over an epoch; the form does not see them.
_LEVEL_ROUNDS, _FORM_ROUNDS = 9, 192
# ρ = σ² / s², for times that scatter by σ = 0.07 and a prior belief of s = 0.5 in each z_j. In a direction in which
# lengths vary, a few rounds outweigh it; where all lengths are equal, it decides.
_PRIOR_WEIGHT = 0.02


class CostFit(Kept):
    """The form of one rank's times, and its level, which is not kept: it belongs to the hour."""

    KEPT = (Figure("_form"), Figure("_mean"))

    def __init__(self) -> None:
        self._seen = np.zeros((0, 7))  # x and t of the last rounds
        self._mean = np.zeros(6)  # m
        self._form: Floats = np.eye(6)[2]  # a
        self._prior = self._form  # e_2, or what was loaded
        self._level = math.nan  # v

    def learn(self, features: npt.ArrayLike, micro_batches: float, seconds: float) -> None:
        """Learn from a round of these ``features`` (``rounds.SampleFigures``); what cannot be true teaches nothing."""
        row = np.array([[micro_batches, *np.asarray(features), seconds]], dtype=np.float64)
        if not (0.0 < seconds < math.inf and row.min() >= 0.0 and row[0, :2].all() and row.max() / seconds < math.inf):
            return
        self._seen = np.concatenate([self._seen, row])[-_FORM_ROUNDS:]
        x, t = self._seen[:, :6], self._seen[:, 6]
        self._mean = x.mean(axis=0)
        prior = self._in_gauge(self._prior)
        fits = t.size >= 2 * _LEVEL_ROUNDS
        form = self._in_gauge(self._form) if fits else prior
        ratio = t / _mean_rounds(x, form)
        width = min(_LEVEL_ROUNDS, t.size)
        # A median keeps edges: a rank that is twice as slow for some rounds has twice the level in exactly these, and
        # the form does not change. An average, or a predictor, mixes both sides of a change and bends the form there.
        middle = np.sort(np.lib.stride_tricks.sliding_window_view(ratio, width), axis=1)[:, width // 2]
        if fits:
            # From all kept rows. A recursion that forgets would keep the levels and weights of a form that was wrong.
            predicted = middle[np.clip(np.arange(t.size) - width // 2, 0, middle.size - 1)] / ratio
            form = self._refitted(form, prior, x / _mean_rounds(x, form)[:, None], predicted)
        last = t[-width:] / _mean_rounds(x[-width:], form)
        self._form, self._level = form, float(np.sort(last)[width // 2])

    def _in_gauge(self, form: Floats) -> Floats:
        """Return the form with a·m = 1; the number of samples alone counts, if the form has nothing to go by."""
        mean = float(form @ self._mean)
        return form / mean if mean > 0.0 else np.eye(6)[1] / self._mean[1]

    def _refitted(self, form: Floats, prior: Floats, each: Floats, predicted: Floats) -> Floats:
        """Return the form after a step, from rows x / a·x and the relative times that it predicts."""
        missed = np.abs(np.log(predicted))
        # h; half a percent is better than any real step is described.
        enough = max(float(np.sort(missed)[missed.size // 2]), 0.005)
        weight = np.sqrt(enough / np.maximum(missed, enough)) / np.maximum(predicted, 1.0)
        scale = np.where(self._mean > 0.0, self._mean, 1.0)
        rows = np.concatenate([each * (predicted * weight)[:, None] / scale, math.sqrt(_PRIOR_WEIGHT) * np.eye(6)])
        try:
            shares, _ = nnls(rows, np.concatenate([weight, math.sqrt(_PRIOR_WEIGHT) * prior * scale]))
        except RuntimeError:  # too many iterations: the next round tries again
            return form
        return self._in_gauge(shares / scale)

    @property
    def coefficients(self) -> Floats:
        """a_1 to a_5, scaled so that a sample of the mean length costs 1; the lengths before anything is learned."""
        if not self._mean[1]:
            return self._form[1:]
        length = float(self._mean[2] / self._mean[1])
        one = np.array([1.0, length, length**2, length, length**2])
        found = self._form[1:]
        if not found.any():  # a round's time tells nothing of its samples
            found = np.eye(5)[1 if length > 0.0 else 0]
        return np.asarray(found / (found @ one))

    def seconds(self, features: npt.ArrayLike, micro_batches: float) -> float:
        """Return the seconds that such a round takes at the present level; NaN: nothing was learned yet."""
        return self._level * float(self._form @ np.array([micro_batches, *np.asarray(features)]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin from that form instead of the lengths; forget what was learned here."""
        super().load_state_dict(state)
        self._seen, self._level, self._prior = np.zeros((0, 7)), math.nan, self._form


def _mean_rounds(rows: Floats, form: Floats) -> Floats:
    """Return a·x of each row, in mean rounds, never 0."""
    return np.asarray(np.maximum(rows @ form, 1e-12))


class CostMeter(Kept):
    """What samples cost by their lengths, as one rank learns it, in units of a mean sample's cost."""

    KEPT = (Figure("_seen"), Figure("learned"))
    PARTS = ("_fit",)

    def __init__(self) -> None:
        self._fit = CostFit()
        self._seen = NO_SAMPLES
        self._rule = LENGTHS
        self._agreed: CostRule | None = None
        self._unit, self._tables = 1.0, 0
        self.learned = False
        """Whether anything was measured."""
        self.by_number = 0.0
        """Forecast round time when divided by count, over that when divided by cost."""

    @property
    def rule(self) -> CostRule:
        """What a sample costs, for a mean sample that costs 1."""
        return self._rule

    def work_of(self, figures: SampleFigures) -> float:
        """Return what samples cost by the rule that divides them, in units of a mean sample with its padding."""
        # Not by the rank's own rule, which may be wrong for what other ranks hold. Where all use one rule, its error
        # for this rank's samples is part of its speed. A unit without padding would make micro-batches larger than
        # planned.
        return self._unit * (self._agreed or self._rule).of(figures)

    def set_agreed_rule(self, rule: CostRule, work: float, samples: float) -> None:
        """Set the rule that samples are divided by; scale it so that all ranks' work is, on average, their samples."""
        self._agreed = rule
        if work > 0.0:
            self._tables += 1
            # Averaged over the last 20 tables or so (arbitrary).
            self._unit *= (samples / work) ** (1.0 / min(self._tables, 20))

    def add_round(self, figures: SampleFigures) -> None:
        """Note the samples of a round on all ranks, whose mean is the unit: no rank may take its own part for it."""
        self._seen = SampleFigures(*map(add, self._seen, figures))
        self._scale()

    def learn(self, figures: SampleFigures, micro_batches: float, seconds: float) -> None:
        """Learn from a round of this rank."""
        self._fit.learn(figures, micro_batches, seconds)
        self.learned = True
        self._scale()

    def _scale(self) -> None:
        rule = CostRule(*self._fit.coefficients.tolist()) if self.learned else LENGTHS
        unpadded = self._seen._replace(padded=self._seen.length, padded_square=self._seen.square)
        whole = rule.of(unpadded)
        self._rule = rule.scaled(unpadded.number / whole) if whole > 0.0 else CostRule(1.0, 0.0, 0.0, 0.0, 0.0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the learned costs, and compute the rule that follows from them."""
        super().load_state_dict(state)
        self._scale()
