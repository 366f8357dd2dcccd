"""The instance of LB-BSP Eq. 3 with Eq. 5 that `minimax` and `minimax_lp` solve, and a solver's answer.

n workers, X samples, a common multiple k. Worker i finishes at t_i(x_i) = m_i x_i + b_i + t^m_i seconds::

    minimise max_i t_i(x_i)    subject to    sum_i x_i = X,  x^s_i <= x_i <= x^o_i,  x_i in {0, k, 2k, ...}

Shapes: all arrays (n,), in rank order. A unit is k samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero import checks
from hvd_hetero.checks import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A split of the samples, and each worker's predicted finishing time."""

    shares: IntArray
    """Samples of each worker."""
    finish_s: FloatArray
    """Predicted seconds of each worker, including communication."""
    bound_s: float
    """Seconds that no split within sum and bounds undercuts; `minimax` reaches them, rounding may not."""

    @property
    def latest_s(self) -> float:
        """Seconds of the latest worker, which Eq. 3 minimises."""
        return float(self.finish_s.max())


@dataclass(frozen=True, slots=True)
class SolverFailure:
    """A solver's end without a split. It is a value, so that training keeps the last plan and reports why."""

    status: int
    """SciPy's status of `linprog`: 1 limit reached, 2 infeasible, 3 unbounded, 4 numerical trouble."""
    message: str
    """SciPy's explanation."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One feasible instance, with bounds in units."""

    slope_s: FloatArray
    """m, seconds per sample."""
    intercept_s: FloatArray
    """b, seconds of a batch besides its samples."""
    comm_s: FloatArray
    """t^m, seconds of communication."""
    units: int
    """Units to divide, X / k."""
    lower: IntArray
    """Least units of each worker: x^s / k rounded up."""
    upper: IntArray
    """Most units of each worker: x^o / k rounded down, and no more than the others' lower bounds leave."""
    step: int
    """Samples of a unit, k."""

    def finish_s(self, units: IntArray) -> FloatArray:
        """Return each worker's seconds with these units."""
        with np.errstate(over="ignore"):
            seconds = self.slope_s * (units * self.step) + (self.intercept_s + self.comm_s)
        if not seconds.max() < np.inf:
            rank = int(seconds.argmax())
            raise ValueError(
                f"slope times samples plus intercept plus comm must be a finite number of seconds, got "
                f"{self.slope_s[rank]:g} x {units[rank] * self.step} + {self.intercept_s[rank]:g} + "
                f"{self.comm_s[rank]:g} for rank {rank}; profile this worker again, or leave it out"
            )
        return seconds


def problem(
    slope: ArrayLike,
    intercept: ArrayLike,
    comm: ArrayLike,
    total: SupportsIndex,
    lower: ArrayLike,
    upper: ArrayLike,
    multiple_of: SupportsIndex,
) -> Problem:
    """Check the arguments of `minimax` and convert them to units; a single number stands for all workers."""
    profile = "profile this worker again, or leave it out"
    m = checks.finite("slope", slope, least=0, remedy=profile)
    b = checks.finite("intercept", intercept, m.size, least=-np.inf, remedy=profile)
    c = checks.finite("comm", comm, m.size, least=0, remedy="use 0 where communication has not been measured")
    step = checks.integer("multiple_of", multiple_of, least=1)
    # Sums over workers of up to `total` units each must fit in int64, and samples in a float.
    below = min(2**53, 2**62 // m.size)
    units = checks.total_in_units(checks.integer("total", total, least=0, below=below), step)
    low_samples, high_samples = checks.integers("lower", lower, m.size), checks.integers("upper", upper, m.size)
    low, high = -(-low_samples // step), high_samples // step
    if (low > high).any():
        rank = int(np.argmax(low > high))
        raise ValueError(
            f"lower and upper must leave rank {rank} a multiple of multiple_of={step}, got lower[{rank}]="
            f"{low_samples[rank]} and upper[{rank}]={high_samples[rank]} for X={units * step}; widen the bounds of "
            f"this rank, or leave it out"
        )
    least, most = sum(low.tolist()), sum(high.tolist())
    if not least <= units <= most:
        rank, bound, name, of = (
            (int(low.argmax()), least, "lower", low_samples)
            if units < least
            else (int(high.argmin()), most, "upper", high_samples)
        )
        raise ValueError(
            f"total (X) must be at {'least' if units < least else 'most'} the sum of {name}, {bound * step} over "
            f"{m.size} workers, got X={units * step}; rank {rank} bounds it the most by {name}[{rank}]={of[rank]}: "
            "change X or the bounds, split the round into micro-batches, or use another number of workers"
        )
    return Problem(m, b, c, units, low, np.minimum(high, low + (units - least)), step)
