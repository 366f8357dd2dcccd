"""Rules for the weights of MATCHA's rounds: their rho = || E[W'W] - J ||, and how soon they train.

x = d_i + d_j is the number of partners of a pair's two ranks in the round, together; k matchings are drawn; l_n and l_t
are the largest eigenvalues of the Laplacian of all edges, and of those drawn. Each rule has the parameters that make
its rho least. All but the first keep || W || <= 1 in every round. E[W'W] is a sum over all 2^M draws, so this also
checks ``matcha(...).rho``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

import numpy as np
from _problems import SmallNetwork, digits
from scipy.optimize import minimize

from hvd_hetero.topology import Graph, Matcha, matcha
from hvd_hetero.topology.graphs import laplacian

Array = np.ndarray
LOSS, MOST_ROUNDS, SEEDS, BATCH = 0.2, 500, 4, 8


class Draws:
    """All 2^M draws of a schedule."""

    def __init__(self, m: Matcha) -> None:
        p = np.array(m.probabilities)
        active = np.array(list(itertools.product([0.0, 1.0], repeat=len(p))))
        self.schedule, self.nodes, self.number = m, m.nodes, active.sum(axis=1)[:, None, None]
        self.chances = np.where(active == 1.0, p, 1.0 - p).prod(axis=1)
        self.laplacians = np.tensordot(active, [laplacian(m.nodes, matching) for matching in m.matchings], 1)
        degrees = self.laplacians.diagonal(axis1=1, axis2=2)
        self.sums = np.maximum(degrees[:, :, None] + degrees[:, None, :], 2.0)
        self.largest_degrees = np.maximum(degrees[:, :, None], degrees[:, None, :])

    def mixing(self, weights: Array | float) -> Array:
        """Return W of every draw, (2^M, n, n)."""
        drawn = weights * (self.laplacians < 0.0)
        return np.asarray(drawn + np.eye(self.nodes) * (1.0 - drawn.sum(axis=2, keepdims=True)))

    def rho(self, mixing: Array) -> float:
        return float(np.linalg.eigvalsh(np.tensordot(self.chances, mixing @ mixing, 1) - 1.0 / self.nodes)[-1])

    def best(self, weights: Callable[[Array], Array | float], bounds: Sequence[float]) -> Array:
        """Return W of every draw with the parameters that make rho least, each from 0 to its bound."""
        most = np.array(bounds)

        def scaled(x: Array) -> Array:
            return np.clip(x, 0.0, 1.0) / max(1.0, np.clip(x, 0.0, 1.0).sum()) * most  # their shares sum to at most 1

        # Where every bound of a draw is below alpha, rho is flat: one start is low.
        starts = [np.full(len(most), 0.9 / len(most)), np.full(len(most), 0.05), *np.eye(len(most))]
        found = [minimize(lambda x: self.rho(self.mixing(weights(scaled(x)))), x, method="Nelder-Mead") for x in starts]
        return self.mixing(weights(scaled(min(found, key=lambda one: float(one.fun)).x)))


def rules(draws: Draws) -> Iterator[tuple[str, Array]]:
    """Yield each rule's name and W of every draw."""
    x = draws.sums
    most = float(np.linalg.eigvalsh(draws.laplacians[-1])[-1])
    largest = np.linalg.eigvalsh(draws.laplacians)[:, -1][:, None, None]
    yield "alpha", draws.best(lambda p: p[0], [1.0])
    yield "alpha <= 2/l_n", draws.best(lambda p: p[0], [2.0 / most])
    yield "min(alpha, 1/k)", draws.best(lambda p: np.minimum(p[0], 1.0 / np.maximum(draws.number, 1.0)), [1.0])
    yield "min(alpha, 2/l_t)", draws.best(lambda p: np.minimum(p[0], 2.0 / np.maximum(largest, 1.0)), [1.0])
    yield "min(alpha, 2/x)", draws.best(lambda p: np.minimum(p[0], 2.0 / x), [1.0])
    yield "a + 2b/x", draws.best(lambda p: np.where(x == 2.0, 0.5, p[0] + p[1] * 2.0 / x), [2.0 / most, 1.0])
    yield "Metropolis", draws.mixing(1.0 / (1.0 + draws.largest_degrees))
    yield "here", draws.mixing(draws.schedule.alpha * 2.0 / (x + 2.0))


def compared(graphs: Mapping[str, Graph], budgets: Sequence[float]) -> str:
    """Return a table of rho, with a row per graph and budget, and a column per rule."""
    rows: list[list[str]] = []
    for (name, graph), budget in itertools.product(graphs.items(), budgets):
        draws = Draws(matcha(graph, budget))
        found = dict(rules(draws))
        rows.append([name, str(budget), *(f"{draws.rho(w):.4f}" for w in found.values())])
    return _table(["graph", "budget", *found], rows)


def trained(graphs: Mapping[str, tuple[Graph, float]], rates: Sequence[float], names: Sequence[str]) -> str:
    """Return a table of the rounds until the mean model's loss is reached, with a column per rule."""
    problem = SmallNetwork(digits())
    rows: list[list[str]] = []
    for name, (graph, budget) in graphs.items():
        draws = Draws(matcha(graph, budget))
        found = dict(rules(draws))
        for rate in rates:
            rounds = [[_rounds(problem, draws, found[rule], rate, seed) for seed in range(SEEDS)] for rule in names]
            cells = [f"{mean(some):.0f}" if max(some) <= MOST_ROUNDS else "-" for some in rounds]
            rows.append([name, str(budget), str(rate), *cells])
    return _table(["graph", "budget", "learning rate", *names], rows)


def _rounds(problem: SmallNetwork, draws: Draws, mixing: Array, rate: float, seed: int) -> int:
    """Return the rounds of x <- W x - rate g until the loss, or MOST_ROUNDS + 1; each fifth looks at the loss."""
    rng, places = np.random.default_rng(seed), 2 ** np.arange(len(draws.schedule.matchings))[::-1]
    models = np.tile(problem.start(seed), (draws.nodes, 1))
    for number in range(MOST_ROUNDS):
        steps = [problem.gradient(model, rng.integers(0, problem.samples, BATCH)) for model in models]
        models = mixing[draws.schedule.active(seed, number) @ places] @ models - rate * np.array(steps)
        if number % 5 == 4 and problem.loss(models.mean(axis=0)) <= LOSS:
            return number + 1
    return MOST_ROUNDS + 1


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
