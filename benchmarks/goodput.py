r"""Compare the batch that ``Goodput`` chooses with the best of a grid of fixed batches, on simulated clusters.

A cluster has 2 to 16 ranks of unequal speed (log-normal, σ = 0.6), whose steps have a fixed part and scatter by 2 %,
and a transfer. The noise scale is between a sixteenth and 64 times the batch to begin with, and stays, or grows by a
factor of up to 16 in the course of the training, as it does in most. Ranks report squared norms of gradients that are
drawn in 256 directions, so Ŝ and Ĝ² scatter as in a training. Every round visits data of epochs that end with a
remainder.

The goodput of a run is Σ r / Σ T from the round on after which a quarter has passed: r with the true noise scale, T in
simulated time. Every fixed batch of the grid (powers of two times the first, within the bounds) trains by LB-BSP alike.

    python benchmarks/goodput.py [--clusters 30] [--write]
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.goodput import Goodput, gain
from hvd_hetero.rounds import RoundTable
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, RoundSimulation, Worker
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

ROUNDS, SKIPPED = 800, 200
DIRECTIONS = 256
START, LEAST, MOST = 256, 128, 8192
EPOCH = 100 * START + 77
AT_LEAST = 0.95


@dataclass(frozen=True)
class World:
    """A cluster, and the noise of its training."""

    cluster: Cluster
    first_scale: float
    growth: float
    seed: int

    def scale(self, samples: float) -> float:
        """Return the noise scale after so many samples; runs of all batches have the same length in samples."""
        part = min(samples / (ROUNDS * START), 1.0)
        return self.first_scale * self.growth**part

    @property
    def shown(self) -> str:
        """The cells of its row."""
        workers = self.cluster.workers
        speeds = [1.0 / worker.compute.slope_s for worker in workers]
        transfer_s = self.cluster.network.recorded_s[0]
        first_s = START / sum(speeds)
        return (
            f"{len(workers)} | 1:{max(speeds) / min(speeds):.1f} | {workers[0].compute.intercept_s / first_s:.2f} "
            f"| {transfer_s / first_s:.2f} | {self.first_scale:,.0f} | {self.growth:.1f}"
        )


def world(seed: int) -> World:
    """Draw a world."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 17))
    speeds = 1000.0 * rng.lognormal(0.0, 0.6, count) / count
    first_s = START / float(speeds.sum())  # a first round without fixed costs
    fixed_s, transfer_s = first_s * 2.0 ** rng.uniform(-5, 0.5), first_s * 2.0 ** rng.uniform(-6, 1)
    workers = tuple(Worker(Compute.at_speed(v, fixed_s), variation=(Jitter("round", 0.02),)) for v in speeds)
    network = Network(kind="recorded", recorded_s=(transfer_s,))
    growth = 1.0 if seed % 3 == 0 else 2.0 ** rng.uniform(0, 4)
    return World(Cluster(workers, network, seed), START * 2.0 ** rng.uniform(-4, 6), growth, seed)


class Trained(RoundSimulation):
    """A simulation whose ranks also report the noise of their gradients."""

    def __init__(self, of: World, global_batch: int | Goodput) -> None:
        super().__init__(of.cluster, LBBSP(), global_batch, data=WholeRounds(EPOCH))
        self._world = of
        self._rng = np.random.default_rng([of.seed, 1])
        self._samples = 0.0
        self.progress = 0.0
        self.moves = 0

    def _table(self, plan, used, *rest) -> RoundTable:
        table = super()._table(plan, used, *rest)
        scale = self._world.scale(self._samples)
        self._samples += float(used.sum())
        self.progress += gain(int(used.sum()), START, scale)
        if self.planner.goodput is None:
            return table
        shares = used.astype(float)
        gradient = np.full(DIRECTIONS, DIRECTIONS**-0.5)  # |G|² = 1, S = the scale
        scatter = np.sqrt(scale / DIRECTIONS / shares)[:, None]
        means = gradient + scatter * self._rng.normal(size=(len(shares), DIRECTIONS))
        mean = shares @ means / shares.sum()
        table = table.replaced("gradient_samples", shares)
        table = table.replaced("gradient_square", np.einsum("id,id->i", means, means))
        return table.replaced("mean_square", np.full(len(shares), mean @ mean))


def goodput_of(of: World, global_batch: int | Goodput) -> tuple[float, Trained]:
    """Train on as many samples as all others, and return the progress per second after the first quarter."""
    run = Trained(of, global_batch)
    whole, begin = ROUNDS * START, SKIPPED * START
    before = 0.0, 0.0
    while run._samples < whole:
        batch = run.planner.plan().total
        run.step()
        run.moves += run.planner.plan().total != batch
        if run._samples < begin:
            before = run.progress, run.now_s
    return (run.progress - before[0]) / (run.now_s - before[1]), run


def compared(clusters: int) -> tuple[str, bool]:
    """Return the table, and whether the choice is good enough everywhere."""
    lines = [
        "| ranks | speeds | fixed | transfer | φ | grows | best fixed batch | chosen at the end | moves "
        "| of the best | of the worst | of the first |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    ratios = []
    grid = [LEAST * 2**k for k in range(int(math.log2(MOST / LEAST)) + 1)]
    for seed in track(range(clusters), "clusters"):
        of = world(seed)
        fixed = {batch: goodput_of(of, batch)[0] for batch in grid}
        rate, run = goodput_of(of, Goodput(start=START, least=LEAST, most=MOST))
        best = max(fixed, key=fixed.__getitem__)
        ratios.append(rate / fixed[best])
        lines.append(
            f"| {of.shown} | {best:,} | {run.planner.plan().total:,} | {run.moves} | {ratios[-1]:.3f} "
            f"| {rate / min(fixed.values()):.2f} | {rate / fixed[START]:.2f} |"
        )
    text = (
        "Fixed part and transfer: of the time of the first batch without both. φ: the noise scale at the beginning; it "
        "grows so many times until the end. Ratios: goodput of the batch that adapts over that of the best, the worst "
        f"and the first ({START}) fixed batch.\n\n" + "\n".join(lines) + "\n\n"
        f"Of the best: {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}; target {AT_LEAST} in each: "
        f"{sum(ratio < AT_LEAST for ratio in ratios)} of {len(ratios)} miss it."
    )
    return text, min(ratios) >= AT_LEAST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    arguments = parser.parse_args()
    text, good = compared(arguments.clusters)
    print(text)
    if arguments.write:
        from _report import write_result

        print(write_result("goodput", text))
    if not good:
        raise SystemExit(f"in some cluster the goodput is below {AT_LEAST} of the best fixed batch's")


if __name__ == "__main__":
    main()
