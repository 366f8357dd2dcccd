r"""What a micro-batch costs besides its samples, found in a recorded run of one rank.

Round k takes x_k samples in κ_k micro-batches t_k seconds:

    t_k = f_k (m x_k + b κ_k),        m, b >= 0,  f_k > 0 the rank's own ups and downs

With s_k = x_k / κ_k, y_k = log(t_k / κ_k) and β = b / m, two rounds in a row that differ in the size s tell β, because
m cancels and f mostly stays:

    e_k(β) = (y_{k+1} - y_k) - log((s_{k+1} + β) / (s_k + β)) = log(f_{k+1} / f_k)

The estimate minimises twice the negative logarithm of a Student likelihood, in which one strange pair does not outweigh
two good ones, over the fixed share φ of a micro-batch of the median size r, β = r φ / (1 - φ):

    L(φ) = sum over pairs of (ν + 1) log(1 + e_k(β)² / (ν τ²)),        φ in {0, 0.001, …, 0.99}

τ is 1.48 medians of |y_{k+1} - y_k| over pairs of one size, or of |e_k| at the φ where that is least, if it is more;
and at least 0.005, for what a line does not say of a real step. ``least`` and ``most`` bound the φ with
L(φ) <= min L + 4: with Gaussian noise 95 % of such ranges hold the truth.

Pairs count whose sizes differ by a tenth at least: a plan that follows a slow drift changes sizes as well, just as the
pace changes. Fewer than three of them tell nothing, since one may be an accident. Then β is not identified: the
estimate is 0, and the range is all of φ in [0, 0.99]. So it is where all micro-batches have one size, for then t_k is
(m s + b) κ_k.

``measurement.fixed_cost`` tells the same while training goes on. It must act, and so takes 0 until the odds are ten to
one; a replay may say what it does not know.

ν = 4, 0.1, 0.005 and 3 are arbitrary.

Shapes: K rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FixedSamples", "fixed_samples"]

Floats = NDArray[np.float64]

_SHARES = np.linspace(0.0, 0.99, 991)  # φ
_TAILS = 4.0  # ν
_LEAST_CHANGE = 0.1  # of log s
_LEAST_NOISE = 0.005
_LEAST_PAIRS = 3
_WITHIN = 4.0  # of min L
_MOST_ERRORS = 2**20  # at once


@dataclass(frozen=True, slots=True)
class FixedSamples:
    """β, in samples that take as long as the fixed cost of a micro-batch."""

    least: float
    likely: float
    most: float


def fixed_samples(sizes: Floats, seconds: Floats, paired: NDArray[np.bool_]) -> FixedSamples:
    """Find β from the mean size of each round's micro-batches and the mean seconds of each; (K,), all positive.

    ``paired[k]`` says that rounds k and k + 1 may be compared, (K - 1,).
    """
    betas = float(np.median(sizes)) * _SHARES / (1.0 - _SHARES)
    change_s, change = np.diff(np.log(seconds)), np.abs(np.diff(np.log(sizes)))
    told = paired & (change >= _LEAST_CHANGE)
    if told.sum() < _LEAST_PAIRS:
        return FixedSamples(0.0, 0.0, float(betas[-1]))
    before, after = sizes[:-1][told], sizes[1:][told]

    def of_each(figure: Callable[[Floats], Floats]) -> Floats:
        """Return a figure of e(β), for every β; some at a time, so that memory holds the errors of long runs."""
        blocks = np.array_split(betas[:, None], 1 + len(betas) * len(before) // _MOST_ERRORS)
        return np.concatenate([figure(change_s[told] - np.log((after + b) / (before + b))) for b in blocks])

    alike = np.abs(change_s[paired & (change == 0.0)])
    scatter = float(of_each(lambda errors: np.median(np.abs(errors), axis=1)).min())
    noise = max(1.4826 * max(scatter, float(np.median(alike)) if len(alike) else 0.0), _LEAST_NOISE)
    against = of_each(lambda errors: (_TAILS + 1.0) * np.log1p((errors / noise) ** 2 / _TAILS).sum(axis=1))
    within = np.flatnonzero(against <= against.min() + _WITHIN)
    first, last = max(within[0] - 1, 0), min(within[-1] + 1, len(betas) - 1)  # the grid's own error
    return FixedSamples(float(betas[first]), float(betas[against.argmin()]), float(betas[last]))
