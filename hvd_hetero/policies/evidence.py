r"""How far the ranks' own figures can be trusted, judged by the tables of the rounds; for LB-BSP.

Rank i forecasts the speed v_i, and then does m_i (both in micro-batches of the typical size). σ_i is 1.48 medians of
|m_i / v_i - 1|, found by steps of a tenth. Most of that is the scatter of single rounds, and about a third is the
error of the forecast itself. So of a rank's time the share

    1 - 2/3 σ_i (1 + φ_i) / 2,       φ_i = β_i / (β_i + r)

is beyond doubt, by two standard errors. Where time is all fixed costs (φ = 1) that counts in full, because a wrong
split then confirms itself. Where time follows the batch it counts by half: the next rounds correct the split.

A rank's time is known for the micro-batches that it has measured, and up to a third, or one step of shares, beyond the
least and the most.

All operations are correctly rounded, so all ranks find the same. Cost: some 20 operations on arrays of n.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.measurement.fixed_cost import NORMAL_MEDIAN, SCATTER_FLOOR, SCATTER_STEP
from hvd_hetero.rounds import RoundPlan, RoundTable

Floats = npt.NDArray[np.float64]

_SCATTER_LIMIT = 1.0  # of σ: beyond, a forecast says nothing
_DOUBT_PER_SCATTER = 2.0 / 3.0  # two standard errors of a forecast, each a third of what rounds scatter
# However much rounds scatter, a split is left for one that takes less than half as long. Arbitrary.
_TRUSTED_PART_FLOOR = 0.5
_TRUSTED_BEYOND_SIZES = 4.0 / 3.0  # times the sizes measured: beyond them a line is not known to hold


class Evidence(Kept):
    """Measurements and forecasts of n ranks, from the tables.

    Speeds are reported for micro-batches of ``typical_size``, and shares are multiples of ``step``.
    """

    KEPT = (
        Figure("_scatter", least=SCATTER_FLOOR, most=_SCATTER_LIMIT),
        Figure("_forecast", positive=True, unknown=math.nan),
        Figure("_least", positive=True, unknown=math.inf),
        Figure("_most"),
    )

    def __init__(self, workers: int, typical_size: float, step: int = 1) -> None:
        self._typical_size, self._step = typical_size, step
        # More than most ranks scatter (arbitrary), so the first moves are doubted.
        self._scatter = np.full(workers, 0.1)
        self._forecast = np.full(workers, np.nan)
        self._least, self._most = np.full(workers, math.inf), np.zeros(workers)

    def learn(self, table: RoundTable) -> None:
        """Compare a round with its forecasts, and take up the forecasts of the next one."""
        names = ("timed_samples", "micro_batches", "fixed_samples", "samples_per_s")
        samples, counts, fixed, forecast = (table.column(name) for name in names)
        measures = (samples > 0.0) & (counts > 0.0) & (table.busy_s > 0.0)
        size, busy_s = samples / np.maximum(counts, 1.0), np.where(measures, table.busy_s, math.nan)
        measured = (samples + counts * fixed) / (1.0 + fixed / self._typical_size) / busy_s
        missed = np.abs(measured / self._forecast - 1.0)  # NaN where one of them is not known
        step = np.where(
            missed > NORMAL_MEDIAN * self._scatter, SCATTER_STEP, np.where(np.isnan(missed), 1.0, 1.0 / SCATTER_STEP)
        )
        self._scatter = np.clip(self._scatter * step, SCATTER_FLOOR, _SCATTER_LIMIT)
        self._forecast = np.where(forecast > 0.0, forecast, math.nan)
        self._least = np.where(measures, np.minimum(self._least, size), self._least)
        self._most = np.where(measures, np.maximum(self._most, size), self._most)

    def trusted_part(self, fixed: Floats) -> Floats:
        """Return the share of each rank's time that is beyond doubt."""
        amplified = 0.5 + 0.5 * fixed / (fixed + self._typical_size)
        trusted_part: Floats = np.maximum(1.0 - _DOUBT_PER_SCATTER * amplified * self._scatter, _TRUSTED_PART_FLOOR)
        return trusted_part

    def allowed_part(self, plan: RoundPlan, wanted: RoundPlan) -> float:
        """Return how much of the way to the wanted shares the measurements go, from 0 to 1."""
        counts, held = np.maximum(wanted.batch_counts, 1), plan.shares
        most = np.maximum(np.floor(self._most * _TRUSTED_BEYOND_SIZES) * counts, self._most * counts + self._step)
        least = np.minimum(np.ceil(self._least / _TRUSTED_BEYOND_SIZES) * counts, self._least * counts - self._step)
        # A rank's present share bounds these, too: else the number of its micro-batches could never change.
        beyond = np.maximum(wanted.shares - np.maximum(most, held), 0.0)
        beyond += np.maximum(np.minimum(least, held) - wanted.shares, 0.0)
        return float((1.0 - beyond / np.maximum(np.abs(wanted.shares - held), 1)).min())
