"""The weights of the pairs that a round draws (MATCHA, Wang et al. 2019).

In a round each matching is active with its probability, independently. Let d_i be the number of partners of rank i in
this round, and L_e the Laplacian of one edge. Over the drawn pairs e = (i, j),

    W = I - alpha A,    A = sum_e w_e L_e,    w_e = 2 / (d_i + d_j + 2),    0 < alpha <= 1

Degrees are integers that follow from the draw, so all ranks have the same weights. For equal degrees d, w is D-PSGD's
weight 1 / (d + 1), and two ranks without other partners take their mean.

Guarantee. Since (a - b)^2 <= (1 + t) a^2 + (1 + 1/t) b^2, with t = d_j / d_i and X the largest d_i + d_j in the round,

    sum_e w_e (x_i - x_j)^2 <= X / (X + 2) sum_e 2 (x_i^2 / d_i + x_j^2 / d_j) = 2 X / (X + 2) sum_i x_i^2

So in every round the eigenvalues of W are in -1 + 4 / (X + 2) ... 1, and no disagreement grows. (The weight of a rank
to itself may be negative, as of a star's centre.)

alpha. With J = 11'/n, disagreement shrinks on average by rho = || E[W'W] - J || a round, at worst. Choose

    alpha = argmin rho(alpha) = argmin max over unit v orthogonal to 1 of 1 - 2 alpha v'E[A] v + alpha^2 v'E[A^2] v

up to 1, with the moments of ``moments``. rho is a maximum of parabolas, hence convex; rho(0) = 1, and it falls from
there if the graph is connected. alpha is 1 but on dense bipartite graphs at large budgets (0.78 for 6 + 6 ranks at 1).

Method: the eigenvector v at some alpha gives a parabola that is below rho everywhere and touches it there. Take the
minimum of the highest of the parabolas so far, find the eigenvector there, and stop when rho exceeds that lower bound
by no more than rounding explains. A minimum of a maximum of parabolas is a vertex or a crossing.

Complexity: O(n^3) per parabola, five to ten of them.

Why not a smaller rho. A step is x <- W x - eta g. Where the loss has the curvature h, it multiplies a disagreement with
the eigenvalue l of W by l - eta h. A round with an eigenvalue of -1 leaves no room for any curvature, and weights that
make rho least under || W || <= 1 alone use all room there is. Measured (``benchmarks/topology.py``): rho, and rounds to
a loss of 0.2 with a learning rate of 0.6 on the digits,

                                 alpha, free    alpha <= 2 / l_n    a + 2b / (d_i + d_j)    here
    ring of 8, budget 0.5        0.784  never   0.802  142          0.802  142              0.839  121
    ring of 9, budget 0.9        0.652    261   0.652  315          0.652  304              0.743  129
    star of 9, budget 0.5        0.750  never   0.815  129          0.750  never            0.786  131
    complete, 8, budget 0.1      0.692    126   0.730  118          0.671  128              0.671  128
    complete, 64, budget 0.1     0.220          0.651               0.145                   0.143

l_n is the largest eigenvalue of the Laplacian of all edges. A free alpha is the paper's, and bounds the mean alone: the
round of all matchings may then double a disagreement. alpha <= 2 / l_n bounds that round, and with it all. The
third has about the least rho that was found under || W || <= 1 (a l_n / 2 + b <= 1, lone pairs 1/2). "Never" is not
within 500 rounds. With a learning rate of 0.3 all reach the loss, in 154 to 308 rounds; with 1.0 the third never does
on the star, and the first three never on the ring of 9.

Considered, besides these
- Leave rarely drawn matchings out of the bound: on complete graphs all are drawn alike.
- alpha_t = min(alpha, 1/k), k matchings drawn; alpha_t = min(alpha, 2 / l_t), l_t of the drawn edges, on whose last
  bits ranks may differ; w_e = min(alpha, 2 / (d_i + d_j)): all of them go to the edge of || W || <= 1, too.
- D-PSGD's weights on the drawn edges, 1 / (1 + max(d_i, d_j)): they train as soon, but rho has no closed form, and
  is larger where degrees differ.
- Draw a fixed number of matchings: not the paper's draw; on the ring of 8 at budget 0.5 rho is 0.854.

Differences from the paper
- MATCHA has one alpha for all pairs and rounds, from a semidefinite program, and no bound on single rounds.

Shapes: n nodes, c parabolas so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROUNDING = 1e-13  # for quantities of order 1
_MAX_PARABOLAS = 100


def best_alpha(mean: Array, square: Array) -> tuple[float, float]:
    """Return (alpha, rho) for E[A] and E[A^2], (n, n), n >= 2; the expected graph is connected."""
    start = np.eye(len(mean)) - 1.0 / len(mean)

    # The slowest falling and the fastest rising parabola: both are below rho for every alpha.
    cuts = [_parabola(np.linalg.eigh(mean)[1][:, 1], mean, square), _parabola(_top(square)[1], mean, square)]
    while True:
        alpha, lower = _lowest(np.array(cuts))
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


def _lowest(cuts: Array) -> tuple[float, float]:
    """Return where the highest of the (c, 2) parabolas is lowest up to 1, and its value there."""
    a, b = cuts.T
    first, second = np.triu_indices(len(cuts), 1)
    rise, bend = a[first] - a[second], b[first] - b[second]
    crossings = 2.0 * rise[bend != 0.0] / bend[bend != 0.0]
    at = np.minimum(np.concatenate([a / b, crossings]), 1.0)
    highest = (1.0 - 2.0 * np.outer(at, a) + np.outer(at**2, b)).max(axis=1)
    best = highest.argmin()
    return float(at[best]), float(highest[best])
