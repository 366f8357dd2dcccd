"""`minimax_lp`: LB-BSP's own method for Eq. 3 with Eq. 5, a linear program; the reference of `minimax`.

Variables x_1 .. x_n and t (shapes: n + 1 columns, n + 1 rows, 3 n entries)::

    minimise t    subject to    m_i x_i - t <= -(b_i + t^m_i),    sum_i x_i = X,    x^s_i <= x_i <= x^o_i

solved by HiGHS through `scipy.optimize.linprog` on sparse matrices, in units of `multiple_of`. For integers every share
is rounded down. The missing units, fewer than n, go one each to the workers with room that finish them earliest, ties
to the lower rank. Sum, bounds and multiples hold; the optimum may be lost. The relaxation's value is a lower bound of
every integer split, returned as `bound_s`.

Differences from the paper
    The paper says neither how it rounds nor which toolbox it used.

For reference and comparison only: a simplex in floats does not promise that two ranks get the same vertex. Policies
must agree, so they use `minimax`, or solve on one rank and broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from hvd_hetero.allocation.problem import Allocation, Problem, SolverFailure, problem
from hvd_hetero.checks import FloatArray, IntArray


def minimax_lp(
    slope: ArrayLike,
    intercept: ArrayLike,
    comm: ArrayLike,
    total: SupportsIndex,
    lower: ArrayLike,
    upper: ArrayLike,
    multiple_of: SupportsIndex = 1,
    *,
    time_limit_s: float | None = None,
) -> Allocation | SolverFailure:
    """Return the linear program's split, rounded, or HiGHS's message if it did not reach an optimum.

    Arguments and errors are as for `minimax`; HiGHS gives up after `time_limit_s` seconds.
    """
    # Imported here because it takes most of this package's start-up time, and no training step needs it.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    instance = problem(slope, intercept, comm, total, lower, upper, multiple_of)
    n = instance.lower.size
    per_unit = _per_unit_of_time(instance)
    finish = csr_array(
        (
            np.column_stack([_scaled(instance.slope_s * instance.step, per_unit), np.full(n, -1.0)]).ravel(),
            np.column_stack([np.arange(n), np.full(n, n)]).ravel(),
            np.arange(0, 2 * n + 1, 2),
        ),
        shape=(n, n + 1),
    )
    solve: Callable[..., Any] = linprog  # SciPy's type stubs do not know that it takes sparse matrices
    answer = solve(
        c=np.append(np.zeros(n), 1.0),
        A_ub=finish,
        b_ub=-_scaled(instance.intercept_s + instance.comm_s, per_unit),
        A_eq=csr_array(np.append(np.ones(n), 0.0)[np.newaxis]),
        b_eq=[instance.units],
        bounds=np.column_stack([np.append(instance.lower, -np.inf), np.append(instance.upper, np.inf)]),
        method="highs",
        options={} if time_limit_s is None else {"time_limit": time_limit_s},
    )
    if answer.status != 0:
        return SolverFailure(int(answer.status), str(answer.message))
    units = _rounded(instance, answer.x[:n])
    return Allocation(units * instance.step, instance.finish_s(units), float(np.ldexp(answer.fun, -per_unit)))


def _per_unit_of_time(p: Problem) -> int:
    """Return the e for which 2^e times the level without bounds is from 1 to 2; 0 where that is no part of a second."""
    # HiGHS tolerates an error of 1e-7 in every row, in any unit. In seconds, it could not separate rounds of a
    # microsecond, and their split would be arbitrary. The level without bounds is one that no split undercuts, so the
    # optimum is then 1 or more, and a power of two rounds nothing. Rounds of a second and more are not scaled, because
    # HiGHS takes coefficients below 1e-9 a sample for zero. Considered: the optimum of `minimax` as the unit, but this
    # program is there to check `minimax`.
    rising = p.slope_s > 0
    units = p.units - int(p.upper[~rising].sum())  # what costs nothing is done by others
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        speeds = 1.0 / (p.slope_s * p.step)[rising]
        level_s = float((units + (p.intercept_s + p.comm_s)[rising] @ speeds) / speeds.sum())
    return 1 - math.frexp(level_s)[1] if 0.0 < level_s < 1.0 else 0


def _scaled(seconds: FloatArray, exponent: int) -> FloatArray:
    """Return 2^exponent times `seconds`, limited to finite floats, because linprog refuses infinities."""
    most = np.finfo(np.float64).max
    with np.errstate(over="ignore"):
        return np.clip(np.ldexp(seconds, exponent), -most, most)


def _rounded(p: Problem, units: FloatArray) -> IntArray:
    """Return whole units near the real ones, by the rule at the top of this file."""
    whole = np.clip(np.floor(units).astype(np.int64), p.lower, p.upper)
    missing = p.units - int(whole.sum())
    with_room = np.flatnonzero(whole < p.upper)  # enough, because all workers rounded down are among them
    earliest = np.argsort(p.finish_s(whole + 1)[with_room], kind="stable")
    whole[with_room[earliest[:missing]]] += 1
    return whole
