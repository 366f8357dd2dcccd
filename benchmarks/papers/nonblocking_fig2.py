"""Non-blocking SGD, Figures 2 and 3: training without shuffling, and accuracy over epochs and over time.

    python benchmarks/papers/nonblocking_fig2.py [--write]

Figure 2: every worker holds a fixed part of the data; a straggler abandons the micro-batches that it has not begun
(Algorithm 1). The paper shuffles each worker's part by the end of an epoch, since "without shuffling, the performance
of the model will be worse". Here an epoch is ``D / (P B)`` rounds on fixed parts, four of the eight workers are half as
fast, and the samples come sorted by class within a part, or in any order; abandoned ones are lost. Beside it is this
project's queue, under which each sample is visited once (``data/cutter.py``). Here each digit is there once, because
copies of an abandoned sample would train in its place. Parts are whole batches, 1,024 samples in all; the queue has
all 1,438, so its accuracy is no match for theirs.

Figure 3 (and 4, which shows the same on CIFAR-100): D-PSGD and MATCHA at a budget of 0.5, each with and without
non-blocking, other nodes slow in every round: as ``nonblocking_table1``, which judges accuracy and time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import _pictures
import _tables
import numpy as np
from _digits import noisy_digits
from _learners import learner_for
from _problems import TrainingProblem
from nonblocking_table1 import BATCH, MICRO_BATCHES, SIGNAL_S, WORKERS, cluster, mixing

from hvd_hetero.policies import BSP, NonBlocking, Policy
from hvd_hetero.tools.simulation import Options, RoundSimulation
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.topology.mixing import ALLREDUCE

RATE, EPOCHS, SLOW, COPIES = 0.5, 120, 4, 8
PER_ROUND = BATCH // MICRO_BATCHES
WAYS = ("fixed parts, not shuffled", "fixed parts, shuffled", "each sample once")


@dataclass(frozen=True, slots=True)
class Curve:
    """A training: (epochs of D samples, seconds, accuracy), and the share of the samples that were ever used."""

    points: list[tuple[float, float, float]]
    used: float

    @property
    def last(self) -> float:
        """Mean accuracy over the last fifth."""
        tail = self.points[-max(len(self.points) // 5, 1) :]
        return float(np.mean([accuracy for _, _, accuracy in tail]))


def abandoning(problem: TrainingProblem, shuffled: bool, by_class: bool) -> Curve:
    """Train on fixed parts, as Algorithm 1 does, with the rounds that the simulator has for such workers."""
    rng = np.random.Generator(np.random.PCG64(3))
    part = problem.samples // WORKERS // BATCH * BATCH
    order = rng.permutation(problem.samples)[: part * WORKERS]
    if by_class:
        order = order[np.argsort(problem.data.train_y[order], kind="stable")]
    parts = [order[i::WORKERS] for i in range(WORKERS)]
    policy = NonBlocking(MICRO_BATCHES, anticipates=False)
    rounds = RoundSimulation(cluster(0, SLOW), policy, WORKERS * BATCH, options=Options(signal_s=SIGNAL_S))
    parameters, used, points = problem.start(0), np.zeros(problem.samples, dtype=bool), []
    for epoch in range(EPOCHS):
        for first in range(0, part, BATCH):
            done = rounds.step().table.column("samples").astype(int)
            taken = np.concatenate([p[first : first + n] for p, n in zip(parts, done, strict=True)])
            used[taken] = True
            parameters = parameters - RATE * problem.gradient(parameters, taken)
        points.append((epoch + 1.0, rounds.now_s, problem.accuracy(parameters)))
        if shuffled:
            parts = [rng.permutation(p) for p in parts]
    return Curve(points, float(used[np.concatenate(parts)].mean()))


def trained(problem: TrainingProblem, policy: Policy, kind: str, slow: int, epochs: int) -> Curve:
    """Train on this project's queue of samples."""
    among = mixing(kind, 0)
    learner = learner_for(policy, problem, RATE, 0, among)
    data = WholeRounds(problem.samples, shuffle=True, seed=0)
    options = Options(sync=among or ALLREDUCE, signal_s=SIGNAL_S)
    rounds = RoundSimulation(cluster(0, slow), policy, WORKERS * BATCH, options=options, data=data, learner=learner)
    points, seen, each = [], 0, problem.samples // 2
    while seen < epochs * problem.samples:
        before, seen = seen, seen + rounds.step().table.total
        if before // each < seen // each:
            points.append((seen / problem.samples, rounds.now_s, learner.accuracy))
    return Curve(points, 1.0)


def main() -> int:
    options = _tables.options(__doc__ or "")
    problem = noisy_digits(0, copies=1)
    verdicts, rows, second = _tables.Verdicts(), [], {}
    for label, by_class in (("any order", False), ("sorted by class", True)):
        curves = {WAYS[0]: abandoning(problem, False, by_class), WAYS[1]: abandoning(problem, True, by_class)}
        curves[WAYS[2]] = trained(problem, NonBlocking(MICRO_BATCHES, anticipates=False), "centralised", SLOW, EPOCHS)
        second[label] = curves
        rows += [
            [f"{label}: {n}", f"{c.used:.1%}", f"{c.last:.4f}", f"{c.points[-1][1]:.1f}"] for n, c in curves.items()
        ]
        lost = curves[WAYS[1]].last - curves[WAYS[0]].last
        verdicts.check(f"Fig. 2, {label}: accuracy lost without shuffling (paper: worse)", lost, least=1 / 359)
    lines = ["Figure 2:", "", *_tables.table(["", "samples ever used", "accuracy", "s in all"], rows), ""]

    problem, third = noisy_digits(0, COPIES), dict[str, Curve]()
    for kind in ("D-PSGD", "MATCHA"):
        third[kind] = trained(problem, BSP(max_micro_batch=PER_ROUND), kind, 0, 12)
        third[f"{kind}, non-blocking"] = trained(problem, NonBlocking(MICRO_BATCHES, anticipates=False), kind, 0, 12)
        lost = third[kind].last - third[f"{kind}, non-blocking"].last
        verdicts.check(
            f"Fig. 3: accuracy that non-blocking {kind} loses at the same epoch (paper: none)", lost, most=0.01
        )
        sooner = third[kind].points[-1][1] / third[f"{kind}, non-blocking"].points[-1][1]
        verdicts.check(f"Fig. 3: the same epochs of {kind} take times as long (paper: up to 2)", sooner, least=1.7)
    rows = [[n, f"{c.last:.4f}", f"{c.points[-1][1]:.1f}"] for n, c in third.items()]
    lines += ["Figure 3:", "", *_tables.table(["", "accuracy", "s for 12 epochs of D samples"], rows)]
    _pictures.store(draw(second, third), "nonblocking_fig2", options.write)
    return _tables.finish("nonblocking_fig2", lines, verdicts, options.write)


def draw(second: dict[str, dict[str, Curve]], third: dict[str, Curve]) -> object:
    figure, axes = _pictures.panels(3, "Non-blocking SGD, Figures 2 and 3, simulated")
    for style, (label, curves) in zip(("-", "--"), second.items(), strict=True):
        for colour, (name, curve) in zip(_pictures.COLOURS, curves.items(), strict=False):
            if name == WAYS[2] and style == "--":
                continue  # the queue shuffles in any case
            shown = name if name == WAYS[2] else f"{name}, {label}"
            epochs, _, accuracy = zip(*curve.points, strict=True)
            axes[0].plot(epochs, accuracy, color=colour, linestyle=style, label=shown)
    axes[0].set_title("Fig. 2: without shuffling", fontsize=10)
    for column, axis, what in ((0, axes[1], "epochs"), (1, axes[2], "simulated seconds")):
        for k, (name, curve) in enumerate(third.items()):
            style, points = ("-", "--")[k // 2], np.array(curve.points)
            axis.plot(points[:, column], points[:, 2], color=_pictures.COLOURS[k % 2], linestyle=style, label=name)
        axis.set_title(f"Fig. 3: over {what}", fontsize=10)
        axis.set_xlabel(what)
    axes[0].set_xlabel("epochs")
    axes[0].set_ylabel("test accuracy")
    for axis in axes:
        axis.set_ylim(0.8, 1.0)
        axis.legend(fontsize=7, loc="lower right")
    return figure


if __name__ == "__main__":
    sys.exit(main())
