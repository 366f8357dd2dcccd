"""Activation probabilities of matchings, for the most connected expected graph that a budget allows.

    maximise lambda_2(L(p)),  L(p) = sum_j p_j L_j,    subject to    sum_j p_j = budget * M,    0 <= p_j <= 1

where L_j is the Laplacian of matching j and lambda_2 the algebraic connectivity (MATCHA, Wang et al. 2019). lambda_2 is
concave and never falls when a p_j grows, so spending the budget in full loses nothing. Orthogonally to the vector 1,
lambda_2 is the largest t with L(p) - t I >= 0: a semidefinite program, solved here by an interior point.

With 0 < lambda_2 = l_1 <= l_2 <= ... and v_1, v_2, ... the eigenpairs of L(p) orthogonal to 1, maximise for
growing s

    F(p) = max_t { s t + sum_i log(l_i - t) } + sum_j log p_j + sum_j log(1 - p_j)

The inner maximum is at sum_i 1 / (l_i - t) = s, so t rises to lambda_2 with s. Let S = sum_i (l_i - t) v_i v_i' and
Z_j = S^-1/2 L_j S^-1/2. Then the gradient and the negative Hessian are

    g_j = tr Z_j + 1/p_j - 1/(1 - p_j)
    H_ij = <Z_i, Z_j> - <Z_i, S^-1> <Z_j, S^-1> / |S^-1|^2 + [i = j] (1/p_j^2 + 1/(1 - p_j)^2)

and a Newton step moves within sum_j dp_j = 0. -F is self-concordant, so the damped step stays inside 0 < p < 1.

The certificate depends on none of this: for every X >= 0 with X 1 = 0 and tr X = 1, and for all feasible q,

    lambda_2(L(q)) <= <X, L(q)> = sum_j q_j <X, L_j>

and the largest such sum is a fractional knapsack: q_j = 1 from the largest <X, L_j> down, until the budget is spent.
X = S^-1 / s closes the gap as s grows.

Complexity: O(M n^3 + M^2 n^2) per Newton step, a few tens of steps.

Differences from the paper
- MATCHA leaves the method open. Rejected after trials: Kelley's cutting planes (a linear program per eigenvector, 70 to
  120 of them on random graphs of 12 to 24 nodes, 25 to 40 times the time of this; the oracle of the tests), and t as a
  variable of Newton's method, which loses the digits of l_1 - t. Considered: projected supergradients, which have no
  certificate.
- Of several optimal p this finds a central one, so similar matchings are used equally often.

Shapes: M matchings, n nodes, k = n - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import null_space

Array = NDArray[np.float64]

# A connectivity within a millionth of the best serves any use. With eigenvalues of multiplicity ten and more, double
# precision cannot certify much below a tenth of that.
TOLERANCE = 1e-6
_SHARPEN = 20.0  # growth of s; measured: 10 to 50 take 42 steps on average, 3 and 200 about 50
_MAX_STEPS = 500  # the most that was seen is about 90


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """Probabilities of the matchings, with a certificate."""

    probabilities: Array
    """Probability that a round uses each matching, (M,)."""
    connectivity: float
    """lambda_2 of the expected graph."""
    bound: float
    """Upper bound of lambda_2 for any other probabilities."""


def most_connected(laplacians: Array, budget: float) -> Activation:
    """Return the most connected probabilities for (M, n, n) Laplacians whose sum is connected, n >= 2."""
    matchings, nodes, _ = laplacians.shape
    units = budget * matchings
    if budget == 1.0:
        connectivity = float(np.linalg.eigvalsh(laplacians.sum(axis=0))[1])
        return Activation(np.ones(matchings), connectivity, connectivity)

    within = null_space(np.ones((1, matchings)))  # (M, M-1), the directions that keep the sum
    p = np.full(matchings, budget)
    sharpness = 0.0
    for _ in range(_MAX_STEPS):
        values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, 1))
        values, vectors = values[1:], vectors[:, 1:]
        barriers = nodes - 1 + 2 * matchings  # at the optimum for s, the gap is at most barriers / s
        sharpest = 2.0 * barriers / (TOLERANCE * values[0])
        sharpness = sharpness or barriers / values[0]
        inverse = _inverse(values - values[0], sharpness)
        half = vectors * np.sqrt(inverse)
        z = half.T @ laplacians @ half  # (M, k, k)
        traces = np.trace(z, axis1=1, axis2=2)
        bound = _knapsack(traces / inverse.sum(), units)
        if bound - values[0] <= TOLERANCE * bound:
            return Activation(p, float(values[0]), bound)

        flat = z.reshape(matchings, -1)
        along = np.diag(inverse).ravel() / np.linalg.norm(inverse)
        flat = flat - np.outer(flat @ along, along)
        gradient = traces + 1.0 / p - 1.0 / (1.0 - p)
        hessian = flat @ flat.T + np.diag(1.0 / p**2 + 1.0 / (1.0 - p) ** 2)
        step = within @ np.linalg.solve(within.T @ hessian @ within, within.T @ gradient)
        decrement = np.sqrt(max(0.0, float(step @ gradient)))
        p = p + (step if decrement < 0.25 else step / (1.0 + decrement))
        if decrement < 0.25:
            sharpness = min(sharpness * _SHARPEN, sharpest)
    raise AssertionError(f"no certified optimum: bound {bound}, reached {values[0]} after {_MAX_STEPS} steps")


def _inverse(gaps: Array, sharpness: float) -> Array:
    """Return 1 / (gaps + d) with d > 0 such that the sum is ``sharpness``; the first gap is 0.

    Newton's method starts at d = 1 / sharpness, below the root of a convex falling function, and never passes the root.
    """
    d = 1.0 / sharpness
    while True:
        inverse = 1.0 / (gaps + d)
        higher = d + (inverse.sum() - sharpness) / float(inverse @ inverse)
        if higher <= d * (1.0 + 1e-14):
            return inverse
        d = higher


def _knapsack(worth: Array, units: float) -> float:
    """Return the maximum of worth . q over 0 <= q <= 1 with sum q = units."""
    descending = np.sort(worth)[::-1]
    share = np.clip(units - np.arange(len(worth)), 0.0, 1.0)
    return float(descending @ share)
