"""Rules for the weights of MATCHA's rounds, compared by rho = || E[W'W] - J ||, each at its best parameter.

All but the first keep || W || <= 1 in every round. x = d_i + d_j is the number of partners of a pair's two ranks in the
round, together; k matchings are drawn; l_n and l_t are the largest eigenvalues of the Laplacian of all edges, and of
those drawn. E[W'W] is a sum over all 2^M draws, so this also checks ``matcha(...).rho``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import minimize_scalar

from hvd_hetero.topology import Graph, matcha
from hvd_hetero.topology.graphs import laplacian


def compared(graphs: Mapping[str, Graph], budgets: tuple[float, ...]) -> str:
    """Return a table with a row per graph and budget, and a column per rule."""
    rows = {(name, budget): rules(graph, budget) for name, graph in graphs.items() for budget in budgets}
    names = list(next(iter(rows.values())))
    head = f"| graph | budget | {' | '.join(names)} |\n|---|---:|{'---:|' * len(names)}"
    return "\n".join(
        [head, *(f"| {g} | {b} | {' | '.join(f'{x:.4f}' for x in row.values())} |" for (g, b), row in rows.items())]
    )


def rules(graph: Graph, budget: float) -> dict[str, float]:
    """Return the rho of each rule for the weights of a round, over all 2^M draws, at its best parameter."""
    m = matcha(graph, budget)
    n, p, eye = m.nodes, np.array(m.probabilities), np.eye(m.nodes)
    draws = np.array(list(itertools.product([0.0, 1.0], repeat=len(p))))
    chances = np.where(draws == 1.0, p, 1.0 - p).prod(axis=1)
    draws, chances = draws[chances > 0.0], chances[chances > 0.0]
    parts = np.tensordot(draws, [laplacian(n, matching) for matching in m.matchings], 1)  # (draws, n, n)
    pairs, degrees = (parts < 0.0).astype(float), parts.diagonal(axis1=1, axis2=2)
    sums = np.where(pairs, degrees[:, :, None] + degrees[:, None, :], 2.0)
    number, largest = draws.sum(axis=1), np.linalg.eigvalsh(parts)[:, -1]
    most = np.linalg.eigvalsh(laplacian(n, graph.edges))[-1]

    def rho(weights: Callable[[float], np.ndarray], parameter: float) -> float:
        drawn = weights(parameter) * pairs
        w = drawn + eye * (1.0 - drawn.sum(axis=2))[:, :, None]
        return float(np.linalg.eigvalsh(np.tensordot(chances, w @ w, 1) - 1.0 / n)[-1])

    def least(weights: Callable[[float], np.ndarray], bound: float = 1.0) -> float:
        found = minimize_scalar(lambda x: rho(weights, x), bounds=(0.0, bound), method="bounded")
        return min(float(found.fun), rho(weights, bound))

    def capped(bounds: np.ndarray) -> float:
        return least(lambda alpha: np.minimum(alpha, bounds))

    return {
        "alpha": least(lambda alpha: alpha * pairs),
        "alpha <= 2/l_n": least(lambda alpha: alpha * pairs, 2.0 / most),
        "min(alpha, 1/k)": capped(1.0 / np.maximum(number, 1.0)[:, None, None]),
        "min(alpha, 2/max x)": capped(2.0 / sums.max(axis=(1, 2), keepdims=True)),
        "min(alpha, 2/l_t)": capped(2.0 / np.maximum(largest, 1.0)[:, None, None]),
        "min(alpha, 2/x)": capped(2.0 / sums),
        "Metropolis": rho(lambda _: 1.0 / (1.0 + np.maximum(degrees[:, :, None], degrees[:, None, :])), 0.0),
        "beta 2/x": least(lambda beta: np.where(sums == 2.0, 0.5, 2.0 * beta / sums)),
        "here": m.rho,
    }
