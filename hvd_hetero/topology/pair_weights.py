"""The weights of the pairs that a round draws (MATCHA, Wang et al. 2019).

In a round each matching j is active with probability p_j, independently. Let d_i be the number of partners of rank i in
this round, and w_ij the weight of a drawn pair e = (i, j). Then W = I - sum_e w_e L_e, with L_e the Laplacian of one
edge. Wanted are weights under which

    no round makes any disagreement larger:     || W || <= 1 for every draw,
    and disagreement falls fast on average:     rho = || E[W'W] - J || is small.

Rule.    w_ij = 1/2                           if d_i = d_j = 1
         w_ij = alpha + 2 beta / (d_i + d_j)  else,  with  alpha, beta >= 0,  alpha l_n / 2 + beta <= 1

where l_n is the largest eigenvalue of the Laplacian of all edges. Degrees are integers that follow from the draw, so
all ranks have the same weights.

Guarantee. || W || <= 1 exactly if 0 <= sum_e w_e L_e <= 2 I. Lone pairs are blocks of their own, with eigenvalues 0 and
1. On the rest, sum_e L_e <= l_n I, because the drawn edges are some of all, and sum_e 2 / (d_i + d_j) L_e <= 2 I: since
(a - b)^2 <= (1 + t) a^2 + (1 + 1/t) b^2, with t = d_j / d_i,

    sum_e 2 / (d_i + d_j) (x_i - x_j)^2 <= sum_e 2 (x_i^2 / d_i + x_j^2 / d_j) = 2 sum_i x_i^2

The bounds add up: alpha l_n + 2 beta <= 2. (Weights of a rank to itself may be negative, as in a star.)

Optimum. A lone pair's (I - w L_e)^2 = I - 2 w (1 - w) L_e is least, as a matrix, at w = 1/2. For the rest let A_0 and
A_1 be the sums of L_e and of 2 / (d_i + d_j) L_e over all other drawn edges, and x = (alpha, beta). Then

    E[W'W] = I - E[L_lone] / 2 - 2 sum_c x_c E[A_c] + sum_cd x_c x_d E[A_c A_d]

with the moments of ``moments``, and rho is convex in x: the largest of v' E[W'W] v over unit v orthogonal to 1. Tangent
planes of rho bound it from below; a linear program finds the lowest point above them, where the next plane is taken
(Kelley's method). It ends when that bound is within a millionth of 1 - rho.

Complexity: O(n^3) per plane, mostly two to thirty of them.

Measured (rho; all draws counted, ``benchmarks/topology.py``):

    graph, budget           alpha, free    alpha <= 2 / l_n    here
    ring of 8, 0.5          0.784          0.802               0.802
    torus 3 x 5, 0.5        0.639          0.685               0.648
    random, 16, 0.1         0.618          0.721               0.588
    complete, 64, 0.1       0.220          0.651               0.145
    two cliques of 6, 0.9   0.875          0.877               0.877

A free alpha is the paper's, and bounds the mean alone. On the ring of 8 it is 0.607, with which the round of both
matchings doubles the square of a disagreement, and a simulated training ends far off; no weights with || W || <= 1
reach less than 0.802 there. alpha <= 2 / l_n is never better than the rule with beta = 0, which differs in lone pairs.

Considered, each with its own best parameter
- Leave rarely drawn matchings out of the bound: on complete graphs all are drawn alike.
- alpha_t = min(alpha, 1/k), k matchings drawn: 0.164 on the complete 64, but 0.736 on a ring of 9 at 0.9 (here 0.652).
- alpha_t = min(alpha, 2 / l_t), l_t of the drawn edges: a little better on some graphs (torus 0.638), worse on complete
  ones (8 nodes, 0.5: 0.200, here 0.142); and eigenvalues in every round, on whose last bits ranks may differ.
- w_ij = min(alpha, 2 / (d_i + d_j)): torus 0.645, but 0.178 on the complete 8, 0.907 on the two cliques; not convex.
- beta alone, alpha = 0: within a percent, but for small tori (3 x 3, 0.5: 0.439, here 0.406) and the two cliques
  (0.907).
- D-PSGD's weights on the drawn edges: nothing to choose, best on complete graphs (8 nodes, 0.5: 0.1417, here 0.1421),
  far off on sparse ones (ring of 9, 0.9: 0.748).
- Draw a fixed number of matchings: 0.124 on the complete 64, but 0.854 on the ring of 8; and it is not MATCHA's draw.

Differences from the paper
- MATCHA has one alpha, from a semidefinite program, and no bound on single rounds.

Shapes: n nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from hvd_hetero.topology.moments import Moments

Array = NDArray[np.float64]

LONE = 0.5
"""Weight of a pair whose two ranks have no other partner in the round: both take the mean."""

_TOLERANCE = 1e-6  # of 1 - rho
_MAX_STEPS = 200  # the most that was seen is 27


def pair_weight(alpha: float, beta: float, met: int) -> float:
    """Return the weight of a drawn pair whose ranks have ``met`` = d_i + d_j partners in the round, together."""
    return LONE if met == 2 else alpha + beta * 2.0 / met


def best_weights(drawn: Moments, largest: float) -> tuple[float, float, float]:
    """Return (alpha, beta, rho); ``largest`` is the largest eigenvalue of the Laplacian of all pairs."""
    scale = np.array([2.0 / largest, 1.0])  # x = (alpha, beta) / scale: x >= 0, x_1 + x_2 <= 1
    start = np.eye(len(drawn.lone)) - 1.0 / len(drawn.lone) - drawn.lone / 2.0
    mean = drawn.mean * scale[:, None, None]
    square = drawn.square * np.outer(scale, scale)[:, :, None, None]

    def top(x: Array) -> tuple[float, Array]:
        squares = np.tensordot(np.outer(x, x), square, 2)
        values, vectors = np.linalg.eigh(start - 2.0 * np.tensordot(x, mean, 1) + squares)
        return float(values[-1]), vectors[:, -1]

    unit = 1.0 - top(np.array([0.5, 0.0]))[0]  # keeps the linear program well scaled if budgets are tiny
    x = chosen = np.array([1.0, 0.0])
    best = np.inf
    planes: list[Array] = []
    for _ in range(_MAX_STEPS):
        rho, v = top(x)
        if rho < best:
            best, chosen = rho, x
        slope = 2.0 * (np.einsum("i,cdij,j,d->c", v, square, v, x) - np.einsum("i,cij,j->c", v, mean, v))
        planes.append(np.array([*slope, -unit, slope @ x + 1.0 - rho]) / unit)
        table = np.array(planes)
        found = linprog(  # the lowest point above all planes: x and (rho - 1) / unit
            [0.0, 0.0, 1.0],
            A_ub=np.vstack([table[:, :3], [1.0, 1.0, 0.0]]),
            b_ub=[*table[:, 3], 1.0],
            bounds=[(0.0, 1.0), (0.0, 1.0), (None, None)],
        )
        if found.x is None or found.fun is None:
            break  # rounding has made the planes contradict each other; any x is safe, and its rho exact
        if best - 1.0 - unit * found.fun <= _TOLERANCE * (1.0 - best):
            break
        x = found.x[:2].clip(0.0) / max(1.0, found.x[:2].sum())
    alpha, beta = chosen * scale
    return float(alpha), float(beta), max(best, 0.0)
