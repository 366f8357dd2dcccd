r"""Non-blocking SGD, Theorem 6: the bound for non-blocking D-PSGD beside the gradients of a training.

    python benchmarks/papers/nonblocking_theorem6.py [--write]

With P workers, K rounds, x̄_k the mean of the workers' models, L the Lipschitz constant of the gradients, σ² the
variance of a worker's stochastic gradient, f(0) the loss at the start and f* the least:

    (1/K) sum_k E |∇f(x̄_k)|²  <=  16 (f(0) - f*) L / K  +  (16 f(0) - 16 f* + 8 L) σ / sqrt(K P)

for K large, at a learning rate of order 1 / (2L + σ sqrt(K/P)), the fastest worker at most twice as fast as the
slowest. Checked on the convex problem, multinomial logistic regression on the digits, whose L is known:
L <= λ_max(Zᵀ Z) / (2N) + decay (Böhning 1992). Workers are slowed up to twice in every round and average on a ring
(D-PSGD, this project's unbiased scaling). σ² is the mean variance of a batch of b at the start and the end of a
training, the larger. f* is the loss of a long training by plain gradient descent.

The bound is loose, so more is checked: the exponents of K and P that it is stated for ("linear speed-up").
"""

from __future__ import annotations

import math
import sys

import _pictures
import _tables
import numpy as np
from _learners import NeighboursLearner
from _problems import SoftmaxRegression, digits
from rich.progress import track

from hvd_hetero.policies import NonBlocking
from hvd_hetero.tools.simulation import Cluster, Compute, Options, RandomSlowDown, RoundSimulation, Worker
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.topology import ring
from hvd_hetero.topology.mixing import NeighbourMixing

WORKERS, ROUNDS, BATCH, MICRO_BATCHES, LEAST_RUN = (2, 4, 8), (200, 800, 3200), 4, 4, 3000


def lipschitz(problem: SoftmaxRegression) -> float:
    """Return Böhning's bound on the curvature of the mean loss."""
    z = np.hstack([problem.data.train_x, np.ones((problem.samples, 1))])
    return float(np.linalg.eigvalsh(z.T @ z)[-1] / (2 * problem.samples) + problem.decay)


def least(problem: SoftmaxRegression, curvature: float) -> tuple[float, np.ndarray]:
    """Return the least loss, and where it is, by gradient descent with momentum (Nesterov)."""
    x = previous = problem.start(0)
    every = np.arange(problem.samples)
    for k in range(LEAST_RUN):
        y = x + k / (k + 3) * (x - previous)
        x, previous = y - problem.gradient(y, every) / curvature, x
    return problem.loss(x), x


def deviation(problem: SoftmaxRegression, parameters: np.ndarray) -> float:
    """Return σ: the root of the mean squared distance of a batch's gradient from the whole."""
    rng = np.random.Generator(np.random.PCG64(5))
    whole = problem.gradient(parameters, np.arange(problem.samples))
    batches = (rng.integers(problem.samples, size=BATCH) for _ in range(400))
    return math.sqrt(np.mean([np.sum((problem.gradient(parameters, b) - whole) ** 2) for b in batches]))


def mean_square(problem: SoftmaxRegression, workers: int, rounds: int, rate: float) -> float:
    """Return the mean over rounds of |∇f(x̄)|² in one training."""
    policy = NonBlocking(MICRO_BATCHES, anticipates=False)
    mixing = NeighbourMixing(ring(workers))
    learner = NeighboursLearner(problem, rate, mixing, seed=0)
    machines = Cluster((Worker(Compute.at_speed(1000.0), variation=(RandomSlowDown("round", 2.0),)),) * workers, seed=1)
    simulation = RoundSimulation(
        machines, policy, workers * BATCH, options=Options(sync=mixing),
        data=WholeRounds(problem.samples, shuffle=True, seed=workers), learner=learner,
    )  # fmt: skip
    every, total = np.arange(problem.samples), 0.0
    for _ in range(rounds):
        total += float(np.sum(problem.gradient(learner.parameters, every) ** 2))
        simulation.step()
    return total / rounds


def main() -> int:
    options = _tables.options(__doc__ or "")
    problem = SoftmaxRegression(digits(0))
    curvature = lipschitz(problem)
    best, where = least(problem, curvature)
    start = problem.start(0)
    sigma, gap = max(deviation(problem, start), deviation(problem, where)), problem.loss(start) - best
    rows: list[list[object]] = []
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for p in track(WORKERS, "training"):
        for k in ROUNDS:
            seen = mean_square(problem, p, k, 1.0 / (2 * curvature + sigma * math.sqrt(k / p)))
            bound = 16 * gap * curvature / k + (16 * gap + 8 * curvature) * sigma / math.sqrt(k * p)
            found[p, k] = seen, bound
            rows.append([p, k, f"{seen:.4g}", f"{bound:.4g}", f"{seen / bound:.2%}"])
    lines = _tables.table(["P", "K", "mean of squared gradients", "bound", "of the bound"], rows)
    verdicts = _tables.Verdicts()
    largest = max(seen / bound for seen, bound in found.values())
    verdicts.check("mean squared gradient over the bound, largest", largest, most=1.0)
    for p in WORKERS:
        exponent = _exponent(ROUNDS[-2:], [found[p, k][0] for k in ROUNDS[-2:]])
        verdicts.check(f"P = {p}: exponent of K, last two (paper: -1/2 for K large)", exponent, least=-0.65, most=-0.35)
    last = _exponent(WORKERS, [found[p, ROUNDS[-1]][0] for p in WORKERS])
    verdicts.check(f"K = {ROUNDS[-1]}: exponent of P (paper: -1/2 for K large)", last, least=-0.65, most=-0.35)
    lines += ["", f"L = {curvature:.3g}, sigma = {sigma:.3g}, f(0) - f* = {gap:.3g}; batches of {BATCH} samples."]
    _pictures.store(draw(found), "nonblocking_theorem6", options.write)
    return _tables.finish("nonblocking_theorem6", lines, verdicts, options.write)


def _exponent(x: tuple[int, ...], y: list[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def draw(found: dict[tuple[int, int], tuple[float, float]]) -> object:
    figure, (axis,) = _pictures.panels(1, "Non-blocking SGD, Theorem 6")
    for colour, p in zip(_pictures.COLOURS, WORKERS, strict=False):
        axis.loglog(ROUNDS, [found[p, k][0] for k in ROUNDS], "o-", color=colour, label=f"P = {p}")
        axis.loglog(ROUNDS, [found[p, k][1] for k in ROUNDS], "--", color=colour, label=f"bound, P = {p}")
    axis.set_xticks(ROUNDS, [f"{k:,}" for k in ROUNDS])
    axis.minorticks_off()
    axis.set_ylim(top=100)
    axis.set_xlabel("rounds K")
    axis.set_ylabel("mean of squared gradients")
    axis.legend(fontsize=8, ncols=3, loc="upper center")
    return figure


if __name__ == "__main__":
    sys.exit(main())
