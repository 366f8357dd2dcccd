"""How far does it scale? Cost of a simulated round, and of the policy's own decision, from 10 to 10,000 workers.

    python benchmarks/papers/scale.py [--write] [--plot FILE.png]

LB-BSP (EMA) on workers of 50 to 150 samples per second whose batches scatter by 5 %, so that nearly every round is
split anew. Decision: the time in ``policy.next``, per round, which in production every rank spends on its own while
the others do; the rest of a round is the simulator's. Targets: 1,000 workers x 1,000 rounds below a minute; the
decision at 1,000 workers below 1 % of a round of 100 ms.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import _tables
import numpy as np
from rich.progress import Progress

from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.simulation import Cluster, Compute, Jitter, RoundSimulation, Worker

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
PER_WORKER = 64


class Timed(LBBSP):
    """LB-BSP that records the time of each decision."""

    def __init__(self, **how: object) -> None:
        super().__init__("ema", **how)  # type: ignore[arg-type]
        self.seconds: list[float] = []

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:  # noqa: D102 - the policy's
        began = perf_counter()
        plan = super().next(plan, finished)
        self.seconds.append(perf_counter() - began)
        return plan


def cluster(workers: int) -> Cluster:
    speeds = np.random.Generator(np.random.PCG64(workers)).uniform(50, 150, workers)
    return Cluster(tuple(Worker(Compute.at_speed(float(v)), variation=(Jitter("round", 0.05),)) for v in speeds))


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plot", type=Path, help="draw the costs as well (needs matplotlib)")

    options = _tables.options(__doc__ or "", extend)
    verdicts, rows, costs = _tables.Verdicts(), [], []
    with Progress(transient=True) as progress:
        rounds_of = {n: min(1000, max(30, 200_000 // n)) if n != 1000 else 1000 for n in SIZES}
        task = progress.add_task("simulating", total=sum(rounds_of.values()))
        for n, rounds in rounds_of.items():
            always, usual = Timed(tolerance=0.0), Timed()
            began = perf_counter()
            simulation = RoundSimulation(cluster(n), always, PER_WORKER * n)
            simulation.run(rounds, lambda: progress.advance(task))
            whole_s = perf_counter() - began
            RoundSimulation(cluster(n), usual, PER_WORKER * n).run(30)
            decision_s = median(always.seconds[3:])
            costs.append((n, whole_s / rounds, decision_s))
            each_us = 1e6 * np.array(always.seconds[3:])
            cells = [f"{whole_s:.1f}", f"{1e3 * whole_s / rounds:.2f}", f"{1e6 * whole_s / rounds / n:.1f}"]
            cells += [
                f"{1e6 * decision_s:.0f}",
                f"{np.quantile(each_us, 0.99):.0f}",
                f"{1e6 * median(usual.seconds[3:]):.0f}",
            ]
            rows.append([f"{n:,}", rounds, *cells])
            if n == 1000:
                verdicts.check("1,000 workers x 1,000 rounds, s", whole_s, most=60.0)
                verdicts.check("decision at 1,000 workers, share of 100 ms", decision_s / 0.1, most=0.01)
    lines = _tables.table(
        [
            "workers",
            "rounds",
            "s in all",
            "ms a round",
            "µs a round and worker",
            "decision, µs",
            "99 %",
            "with tolerance 0.03, µs",
        ],
        rows,
    )
    lines += [
        "",
        "Decision: split anew in every round (tolerance 0). With the default tolerance: the first 30 rounds, in which "
        "plans still change.",
    ]
    if options.plot:
        draw(costs, options.plot)
    return _tables.finish("scale", lines, verdicts, options.write)


def draw(costs: list[tuple[int, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    sizes = [n for n, _, _ in costs]
    axis.loglog(sizes, [1e3 * r for _, r, _ in costs], "o-", color="#0072B2", label="simulated round, all workers")
    axis.loglog(sizes, [1e3 * d for _, _, d in costs], "s-", color="#D55E00", label="the policy's decision")
    axis.axhline(1.0, color="#888888", linestyle="--", linewidth=1, label="1 % of a round of 100 ms")
    axis.set_xlabel("workers")
    axis.set_ylabel("milliseconds")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
