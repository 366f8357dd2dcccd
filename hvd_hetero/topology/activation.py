"""Activation probabilities of matchings, for the most connected expected graph that a budget allows.

    maximise lambda_2(L(p)),  L(p) = sum_j p_j L_j,    subject to    sum_j p_j = budget * M,    0 <= p_j <= 1

where L_j is the Laplacian of matching j and lambda_2 the algebraic connectivity (MATCHA, Wang et al. 2019). lambda_2 is
concave and never falls when a p_j grows, so spending the budget in full loses nothing. It has kinks where eigenvalues
meet, as they do at most optima. So the minimum of the eigenvalues l_i orthogonal to the vector 1 is made soft,

    -log(sum_i exp(-s l_i)) / s,    gradient    sum_i w_i v_i' L_j v_i,    w_i = exp(-s l_i) / sum_k exp(-s l_k)

which is concave, smooth, and below lambda_2 by log(n) / s at most; SciPy's SLSQP maximises it for growing s.

MATCHA leaves the method open. Of several optimal p this finds a central one, so similar matchings are used equally
often; cutting planes end at a corner.

Shapes: M matchings, n nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def most_connected(laplacians: Array, budget: float) -> Array:
    """Return the most connected probabilities, (M,), for (M, n, n) Laplacians whose sum is connected, n >= 2."""
    from scipy.optimize import minimize  # takes most of this package's start-up time

    count, nodes, _ = laplacians.shape
    p = np.full(count, budget)
    if budget == 1.0:
        return p
    spent: Any = {"type": "eq", "fun": lambda p: p.sum() - budget * count, "jac": np.ones_like}
    # How far the soft minimum may lie below the true one, as a part of the connectivity so far. It begins smooth, so
    # that kinks stop no step, and ends sharp. At 1e-4 the connectivity comes within 4e-5 of the proven bound, on the
    # graphs of benchmarks/results/topology.md.
    for error in (1e-1, 1e-2, 1e-3, 1e-4):
        before = float(np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1])
        sharpness = np.log(nodes) / (error * before)

        def loss(p: Any, before: float = before, sharpness: float = sharpness) -> Any:
            values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, 1))
            values, vectors = values[1:], vectors[:, 1:]
            weights = np.exp(-sharpness * (values - values[0]))
            soft = values[0] - np.log(weights.sum()) / sharpness
            pull = np.tensordot(laplacians, vectors * (weights / weights.sum()) @ vectors.T, 2)
            return -soft / before, -pull / before

        found = minimize(
            loss, p, jac=True, method="SLSQP", bounds=[(0, 1)] * count, constraints=spent, options={"ftol": 1e-9}
        )
        p = np.clip(found.x, 0.0, 1.0)
    return p
