"""First and second moments of the weighted Laplacian of a round that MATCHA draws.

A round draws matching m with probability p_m, independently. Let d_i be the number of drawn edges at node i, and
x_e = d_i + d_j for a drawn edge e = (i, j). This computes E[A] and E[A^2] of

    A = sum over drawn e of f(x_e) L_e,    f(x) = 2 / (x + 2)

One edge. Given that e is drawn, x_e is a sum of independent numbers: each matching adds how many ends of e it covers.
Convolution gives its law, and with it E[f(x_e)] and E[f(x_e)^2].

Two edges. L_e L_f = 0 unless they meet: e = (i, j), f = (i, l). Then x_e and x_f are dependent, but powers of them
factor. With c_i = 1 where m covers node i, else 0,

    E[z^x_e u^x_f] = product over m of (1 - p_m + p_m z^(c_i + c_j) u^(c_i + c_l))

where the factors of the matchings of e and f keep only their second term, because both are drawn. And f is a sum of
powers, f(x) = sum_q h_q z_q^x, so E[f(x_e) f(x_f)] is a sum over pairs of powers. Twelve of them suffice: the z_q are
spaced evenly in log log z, as the integral of exp(-s x) over log s suggests, and the h_q are the least squares of the
relative error. That error is below 1e-8 up to degree 8, and 2e-6 up to degree 63.

The logarithm of a factor is bilinear in c_j and c_l, so one matrix product sums the logarithms for all pairs of
neighbours of a node.

Complexity: O(Q M sum_i d_i^2), d_i here the degrees of the graph. A second for the complete graph of 64 nodes,
milliseconds for a ring or a torus.

Considered: Gauss's rule for 2 / x = integral of 2 z^(x-1) over z from 0 to 1 (at degree 63, 20 of its powers are as
good as 12 here, and take three times as long); the joint law of x_e and x_f by convolution, O(M^3) per pair of edges;
enumeration of the draws, O(2^M); a sample of draws, whose largest eigenvalue is biased upwards.

Shapes: n nodes, m edges, M matchings, Q = 78 pairs of powers, k neighbours of a node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.topology.graphs import Edge, laplacian

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_POWERS = 12


def pair_weight(partners: int) -> float:
    """Return f, the weight of a drawn pair whose two ranks have so many partners in the round, together; at least 2."""
    return 2.0 / (partners + 2)


def moments(nodes: int, matchings: Sequence[Sequence[Edge]], probabilities: Array) -> tuple[Array, Array]:
    """Return (E[A], E[A^2]), (n, n) each, for ``matchings`` drawn with ``probabilities``, none of them 0."""
    edges = [edge for matching in matchings for edge in matching]
    ends = np.array(edges)  # (m, 2)
    own = np.repeat(np.arange(len(matchings)), [len(matching) for matching in matchings])
    covered = np.zeros((len(matchings), nodes), dtype=np.int64)
    covered[own[:, None], ends] = 1
    law = _law(ends, own, covered, probabilities)  # (m, 2M + 1)
    values = np.array([pair_weight(x) for x in range(law.shape[1])])
    alone = law @ values**2

    pairs = _Pairs(covered, probabilities)
    square = np.zeros((nodes, nodes))
    for i in range(nodes):
        at = np.flatnonzero((ends == i).any(axis=1))
        others = ends[at].sum(axis=1) - i
        products = pairs.products(i, others, own[at])  # (k, k)
        np.fill_diagonal(products, alone[at])
        # L_e L_f = (e_i - e_j)(e_i - e_l)' for different edges, and twice that for one edge, which comes at both ends.
        square[i, i] += products.sum()
        square[i, others] -= products.sum(axis=0)
        square[others, i] -= products.sum(axis=1)
        square[np.ix_(others, others)] += products
    return laplacian(nodes, edges, law @ values), square


def _law(ends: Integers, own: Integers, covered: Integers, p: Array) -> Array:
    """Return P(e is drawn and x_e = x), (m, 2M + 1)."""
    law = np.zeros((len(ends), 2 * len(p) + 1))
    law[:, 0] = 1.0
    for number, chance in enumerate(p):
        step = covered[number, ends].sum(axis=1)
        left = np.where(own == number, 0.0, 1.0 - chance)[:, None] * law
        for size in (0, 1, 2):
            left[step == size, size:] += chance * law[step == size, : law.shape[1] - size]
        law = left
    return law


class _Pairs:
    """E[f(x_e) f(x_f)] for edges e and f that meet."""

    def __init__(self, covered: Integers, p: Array) -> None:
        self._covered = covered
        x = np.arange(2, 2 * covered.sum(axis=0).max() + 1)
        value = np.array([pair_weight(number) for number in x])
        z = np.exp(-np.geomspace(0.5 / (x[-1] + 2), 2.5, _POWERS))
        h = np.linalg.lstsq(z ** x[:, None] / value[:, None], np.ones(len(x)))[0]
        first, second = np.triu_indices(_POWERS)  # the other pairs are transposes of these
        self._rule = np.where(first == second, 0.5, 1.0) * h[first] * h[second]
        z, u = z[first, None], z[second, None]
        # Logarithms by (c_i, c_j, c_l), (2, 2, 2, Q, M): of the second terms, and of the factors.
        drawn = np.array([[[np.log(p * z ** (a + b) * u ** (a + c)) for c in (0, 1)] for b in (0, 1)] for a in (0, 1)])
        self._factors = np.log1p(np.exp(drawn) - p)
        self._if_drawn = drawn - self._factors

    def products(self, i: int, others: Integers, own: Integers) -> Array:
        """Return the moments for all pairs of the edges from i to ``others``, in matchings ``own``, (k, k).

        The diagonal means nothing.
        """
        cover = self._covered[:, others].astype(float)  # (M, k), for products of floats
        logs = np.where(self._covered[:, i] == 1, self._factors[1], self._factors[0])  # (2, 2, Q, M)
        base, by_j, by_l = logs[0, 0], logs[1, 0] - logs[0, 0], logs[0, 1] - logs[0, 0]
        both = logs[1, 1] - logs[0, 0] - by_j - by_l
        of_e, of_f = self._if_drawn[1, 1], self._if_drawn[1, :, 1]  # (2, Q, M): does e's cover l, does f's cover j

        left = both[:, None, :] * cover.T + by_l[:, None, :]  # (Q, k, M)
        left[:, range(len(own)), own] += (of_e[1] - of_e[0])[:, own]
        total = left @ cover
        total += (by_j @ cover + base.sum(axis=1, keepdims=True) + of_e[0][:, own])[:, :, None]
        total += of_f[0][:, None, own] + (of_f[1] - of_f[0])[:, None, own] * cover[own].T
        half = np.tensordot(self._rule, np.exp(total, out=total), 1)
        return half + half.T
