"""First and second moments of what a round draws: the Laplacians of its pairs, weighted by their degrees.

A round draws matching m with probability p_m, independently. Let d_i be the number of drawn edges at node i, and
x_e = d_i + d_j for a drawn edge e = (i, j). Only a lone pair has x_e = 2. For

    A_c = sum of f_c(x_e) L_e over drawn e with x_e > 2,    f_0(x) = 1,    f_1(x) = 2 / x

this computes E[L_lone] (the lone pairs), E[A_c] and E[A_c A_d].

One edge. Given that e is drawn, x_e is a sum of independent numbers: each matching adds how many ends of e it covers.
Convolution gives its law, and with it the first moments and E[f_c(x_e) f_d(x_e)].

Two edges. L_e L_f = 0 unless they meet: e = (i, j), f = (i, l). Then x_e and x_f are dependent, but powers of them
factor. With c_i = 1 where m covers node i, else 0,

    E[z^x_e u^x_f] = product over m of (1 - p_m + p_m z^(c_i + c_j) u^(c_i + c_l))

where the factors of the matchings of e and f keep only their second term, because both are drawn. A sum of 12 powers,
2 / x = sum_q h_q z_q^x, fits for x up to twice the highest degree of the graph, and 1 = 1^x. So E[f_c(x_e) f_d(x_f)] is
a sum over pairs of powers. (The z_q are spaced evenly in log log z, as the integral of exp(-s x) over log s suggests;
the h_q are the least squares of the relative error. That error is below 1e-8 up to degree 8, 2e-6 up to degree 63, and
2e-5 up to 255.) The logarithm of a factor is bilinear in c_j and c_l, so one matrix product sums the logarithms for all
pairs of neighbours of a node.

Complexity: O(Q M sum_i d_i^2), d_i here the degrees of the graph. A second or two of processor time for the complete
graph of 64 nodes, milliseconds for a ring or a torus.

Considered: Gauss's rule for 2 / x = integral of 2 z^(x-1) over z from 0 to 1, which is exact with as many powers as the
highest degree (at degree 63, 20 of them are as good as 12 here, and take three times as long); the joint law of x_e and
x_f by convolution, O(M^3) per pair of edges; enumeration of the draws, O(2^M); a sample of draws, whose largest
eigenvalue is biased upwards (the oracle of the tests).

Shapes: n nodes, m edges, M matchings, Q = 91 pairs of powers, k neighbours of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.topology.graphs import Edge, laplacian

Array = NDArray[np.float64]

_POWERS = 12  # whose sum is 2 / x


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of the Laplacians of a round."""

    lone: Array
    """E[L_lone], (n, n)."""
    mean: Array
    """E[A_c], (2, n, n)."""
    square: Array
    """E[A_c A_d], symmetric in c and d, (2, 2, n, n)."""


def moments(nodes: int, matchings: Sequence[Sequence[Edge]], probabilities: Array) -> Moments:
    """Return the moments for ``matchings`` that are drawn with ``probabilities``, none of them 0."""
    edges = [edge for matching in matchings for edge in matching]
    own = np.repeat(np.arange(len(matchings)), [len(matching) for matching in matchings])
    covered = np.zeros((len(matchings), nodes), dtype=np.int64)
    for number, matching in enumerate(matchings):
        covered[number, np.ravel(matching)] = 1
    law = _degree_sums(np.array(edges), own, covered, probabilities)  # (m, 2M + 1)
    sums = np.arange(law.shape[1])
    values = (sums > 2) * np.array([np.ones(len(sums)), 2.0 / np.maximum(sums, 1)])
    alone = np.einsum("cx,dx,ex->cde", values, values, law)  # E[f_c(x_e) f_d(x_e)]

    pairs = _Pairs(covered, probabilities)
    square = np.zeros((2, 2, nodes, nodes))
    for i in range(nodes):
        at = np.array([number for number, edge in enumerate(edges) if i in edge])
        ends = np.array(edges)[at].sum(axis=1) - i
        products = pairs.products(i, ends, own[at])  # (2, 2, k, k)
        products[:, :, range(len(at)), range(len(at))] = alone[:, :, at]
        # L_e L_f = (e_i - e_j)(e_i - e_l)' for different edges, and twice that for one edge, which comes at both ends.
        square[:, :, i, i] += products.sum(axis=(2, 3))
        square[:, :, i, ends] -= products.sum(axis=2)
        square[:, :, ends, i] -= products.sum(axis=3)
        square[:, :, ends[:, None], ends] += products
    return Moments(
        laplacian(nodes, edges, law[:, 2]),
        np.array([laplacian(nodes, edges, law @ value) for value in values]),
        (square + square.transpose(1, 0, 2, 3)) / 2.0,
    )


def _degree_sums(edges: NDArray[np.int64], own: NDArray[np.int64], covered: NDArray[np.int64], p: Array) -> Array:
    """Return P(e is drawn and x_e = x), (m, 2M + 1)."""
    law = np.zeros((len(edges), 2 * len(p) + 1))
    law[:, 0] = 1.0
    for number, chance in enumerate(p):
        step = covered[number, edges].sum(axis=1)  # ends of each edge that it covers
        left = np.where(own == number, 0.0, 1.0 - chance)[:, None] * law
        for size in (0, 1, 2):
            left[step == size, size:] += chance * law[step == size, : law.shape[1] - size]
        law = left
    return law


class _Pairs:
    """E[f_c(x_e) f_d(x_f)] for edges e and f that meet."""

    def __init__(self, covered: NDArray[np.int64], probabilities: Array) -> None:
        self._covered = covered
        x = np.arange(3, 2 * covered.sum(axis=0).max() + 3)
        z = np.exp(-np.geomspace(0.5 / x[-1], 2.5, _POWERS))
        h = np.linalg.lstsq(z ** x[:, None] * x[:, None] / 2.0, np.ones(len(x)))[0]
        z, h = np.append(z, 1.0), np.append(h, 0.0)
        one = np.append(np.zeros(_POWERS), 1.0)
        first, second = np.triu_indices(len(z))  # the others are transposes
        factor = np.array([one, h])
        self._rule = np.einsum("cq,dq->cdq", factor[:, first], factor[:, second])
        self._rule[:, :, first == second] /= 2.0

        z, u = z[first, None], z[second, None]
        p = probabilities
        #                                                 logarithms of the factors by (c_i, c_j, c_l), (2, 2, 2, Q, M)
        drawn = np.array([[[np.log(p * z ** (a + b) * u ** (a + c)) for c in (0, 1)] for b in (0, 1)] for a in (0, 1)])
        self._factors = np.log1p(np.exp(drawn) - p)
        self._conditions = drawn - self._factors

    def products(self, i: int, ends: NDArray[np.int64], own: NDArray[np.int64]) -> Array:
        """Return the moments for all pairs of the edges from i to ``ends`` in matchings ``own``, (2, 2, k, k).

        The diagonal means nothing.
        """
        cover = self._covered[:, ends].astype(float)  # (M, k), for products of floats
        logs = np.where(self._covered[:, i] == 1, self._factors[1], self._factors[0])  # (2, 2, Q, M)
        base, by_j, by_l = logs[0, 0], logs[1, 0] - logs[0, 0], logs[0, 1] - logs[0, 0]
        both = logs[1, 1] - logs[0, 0] - by_j - by_l
        of_e, of_f = self._conditions[1, 1], self._conditions[1, :, 1]  # (2, Q, M), by what e's covers of l, f's of j

        left = both[:, None, :] * cover.T + by_l[:, None, :]  # (Q, k, M)
        left[:, range(len(own)), own] += (of_e[1] - of_e[0])[:, own]
        total = left @ cover
        total += (by_j @ cover + base.sum(axis=1, keepdims=True) + of_e[0][:, own])[:, :, None]
        total += of_f[0][:, None, own] + (of_f[1] - of_f[0])[:, None, own] * cover[own].T
        half = np.tensordot(self._rule, np.exp(total, out=total), 1)
        return half + half.transpose(1, 0, 3, 2)
