"""The mixing weight: how far a rank moves towards its partners (MATCHA, Wang et al. 2019).

In a round each matching j is active, B_j = 1, with probability p_j, independently; the ranks then mix by

    W = I - alpha sum_j B_j L_j

With Lbar = E[sum_j B_j L_j] = sum_j p_j L_j and Q = E[(sum_j B_j L_j)^2] = Lbar^2 + sum_j p_j (1 - p_j) L_j^2, choose

    alpha = argmin rho(alpha),    rho(alpha) = || E[W'W] - J || = max over unit v orthogonal to 1 of
                                  1 - 2 alpha v'Lbar v + alpha^2 v'Q v

(E[W'W] - J is positive semidefinite, so its norm is its largest eigenvalue.) rho is a maximum of parabolas, hence
convex; rho(0) = 1, and it falls from there exactly where Lbar is connected, so the minimum is below 1.

That is an expectation. In the round that uses all matchings, W = I - alpha L with L = sum_j L_j, whose largest
eigenvalue is l_n. Beyond alpha = 2 / l_n such a round makes some disagreement larger: on a ring of 8 at budget 1/2 the
minimum is at alpha = 0.607, where it doubles its square (|| W || = 1.43), and a simulated training ends far off. So
alpha is at most 2 / l_n, which bounds every round, since all L_j are positive semidefinite: || W || <= 1. rho is
convex, so where the free minimum is beyond the bound, the best alpha is the bound; on that ring rho is 0.802 instead
of 0.784. It costs most where a round of all matchings hardly ever comes, as at budget 0.1 on a random graph of 16 nodes
and degree 11: 0.721 instead of 0.618.

Method: the eigenvector v at some alpha gives a parabola that is below rho everywhere and touches it there. Take the
minimum of the highest of the parabolas so far, find the eigenvector there, and stop when rho exceeds that lower bound
by no more than rounding explains. A minimum of a maximum of parabolas is a vertex or a crossing.

At budget 1 (p = 1, Q = Lbar^2) this gives alpha = 2 / (l_2 + l_n), rho = ((l_n - l_2) / (l_n + l_2))^2.

Complexity: O(n^3) per parabola, five to ten of them.

Differences from the paper
- MATCHA states the same minimum as a semidefinite program in alpha and a bound on alpha^2. One dimension does not need
  that.
- MATCHA bounds the expectation alone, and its alpha may be beyond 2 / l_n.

Shapes: M matchings, n nodes, c parabolas so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROUNDING = 1e-13  # for quantities of order 1
_MAX_PARABOLAS = 100


def best_alpha(laplacians: Array, probabilities: Array) -> tuple[float, float]:
    """Return (alpha, rho) for (M, n, n) Laplacians with (M,) probabilities whose mean is connected, n >= 2."""
    most = 2.0 / float(np.linalg.eigvalsh(laplacians.sum(axis=0))[-1])
    mean = np.tensordot(probabilities, laplacians, 1)
    square = mean @ mean + np.tensordot(probabilities * (1.0 - probabilities), laplacians @ laplacians, 1)
    start = np.eye(len(mean)) - 1.0 / len(mean)

    # The slowest falling and the fastest rising parabola: both are below rho for every alpha.
    cuts = [_parabola(np.linalg.eigh(mean)[1][:, 1], mean, square), _parabola(_top(square)[1], mean, square)]
    while True:
        alpha, lower = _lowest(np.array(cuts), most)
        rho, vector = _top(start - 2.0 * alpha * mean + alpha**2 * square)
        if rho - lower <= _ROUNDING or len(cuts) == _MAX_PARABOLAS:
            return alpha, max(rho, 0.0)
        cuts.append(_parabola(vector, mean, square))


def _parabola(v: Array, mean: Array, square: Array) -> tuple[float, float]:
    """Return (a, b) of 1 - 2 a alpha + b alpha^2."""
    return float(v @ mean @ v), float(v @ square @ v)


def _top(matrix: Array) -> tuple[float, Array]:
    values, vectors = np.linalg.eigh(matrix)
    return float(values[-1]), vectors[:, -1]


def _lowest(cuts: Array, most: float) -> tuple[float, float]:
    """Return where the highest of the (c, 2) parabolas is lowest up to ``most``, and its value there."""
    a, b = cuts.T
    first, second = np.triu_indices(len(cuts), 1)
    rise, bend = a[first] - a[second], b[first] - b[second]
    crossings = 2.0 * rise[bend != 0.0] / bend[bend != 0.0]
    at = np.minimum(np.concatenate([a / b, crossings]), most)
    highest = (1.0 - 2.0 * np.outer(at, a) + np.outer(at**2, b)).max(axis=1)
    best = highest.argmin()
    return float(at[best]), float(highest[best])
