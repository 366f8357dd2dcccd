"""How far does it scale? Cost of a simulated round, and of all that a rank decides in it, from 10 to 10,000 workers.

    python benchmarks/papers/scale.py [--write] [--plot FILE.png]

The default ``LBBSP()`` on workers of 50 to 150 samples per second whose batches scatter by 5 %. EMA beside it, since
the default's mixture costs more. Each worker has a ``SpeedMeter`` and a predictor of its own, as in production, so a
simulated round has no target: it costs a worker what it costs a rank.

Decision: all that a rank does with the sum of the rows, which is on every rank the same work: make its table, check
whether the ranks agree, set aside speeds that cannot be, split, and keep to limits of memory. With tolerance 0 as well,
where every round is split again. Targets: the decision below 1 % of a round of 100 ms at 1,000 workers, and below 5 ms
at 10,000.
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

from hvd_hetero.columns import COLUMNS
from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import FinishedRound, RoundTable
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, RoundSimulation, Worker

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
PER_WORKER = 64
FEW, WARM = 40, 5  # rounds where few will do, and first ones that do not count


def cluster(workers: int) -> Cluster:
    speeds = np.random.Generator(np.random.PCG64(workers)).uniform(50, 150, workers)
    return Cluster(tuple(Worker(Compute.at_speed(float(v)), variation=(Jitter("round", 0.05),)) for v in speeds))


class Timed:
    """A simulation whose ranks' decisions are timed, one of the n that would all take as long."""

    def __init__(self, workers: int, policy: LBBSP) -> None:
        self.simulation = RoundSimulation(cluster(workers), policy, PER_WORKER * workers)
        self.decision_s: list[float] = []
        self.round_s: list[float] = []
        self._learn = self.simulation.planner.learn
        self.simulation.planner.learn = self._decide  # type: ignore[method-assign]

    def _decide(self, finished: FinishedRound) -> None:
        rows = np.array([finished.table.column(name) for name in COLUMNS])
        summed = rows.T.astype(np.float32).ravel()  # as it travels
        began = perf_counter()
        table = RoundTable(summed, finished.table.workers)
        assert table.unanimous
        assert table.total == finished.plan.total
        _ = table.transfer_s
        decided = FinishedRound(finished.round, finished.epoch, finished.plan, table, finished.elapsed_s)
        self._learn(decided)
        self.decision_s.append(perf_counter() - began)

    def run(self, rounds: int) -> float:
        """Train so many rounds; return their seconds in all."""
        for _ in range(rounds):
            began = perf_counter()
            self.simulation.step()
            self.round_s.append(perf_counter() - began)
        return sum(self.round_s)

    @property
    def each_us(self) -> float:
        """Microseconds a worker and round."""
        return 1e6 * median(self.round_s[WARM:]) / self.simulation.machines.count


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plot", type=Path, help="draw the costs as well (needs matplotlib)")

    options = _tables.options(__doc__ or "", extend)
    verdicts, rows, costs = _tables.Verdicts(), [], []
    with Progress(transient=True) as progress:
        for n in progress.track(SIZES, description="simulating"):
            rounds = min(1000, 1_000_000 // n)
            usual, ema, again = Timed(n, LBBSP()), Timed(n, LBBSP("ema")), Timed(n, LBBSP(tolerance=0.0))
            whole_s = usual.run(rounds)
            ema.run(max(rounds // 10, FEW))
            again.run(FEW)
            decisions_s = [np.array(timed.decision_s[WARM:]) for timed in (usual, again)]
            typical_s, anew_s = (float(np.median(s)) for s in decisions_s)
            each = [f"{timed.each_us:.1f}" for timed in (usual, ema)]
            costs.append((n, whole_s / rounds, typical_s))
            decision = [f"{1e6 * s:.0f}" for s in (typical_s, float(np.quantile(decisions_s[0], 0.99)), anew_s)]
            rows.append([f"{n:,}", rounds, f"{whole_s:.1f}", *each, *decision])
            if n == 1000:
                verdicts.check("decision at 1,000 workers, share of 100 ms", max(typical_s, anew_s) / 0.1, most=0.01)
            if n == 10_000:
                verdicts.check("decision at 10,000 workers, ms", 1e3 * max(typical_s, anew_s), most=5.0)
    headings = ["workers", "rounds", "s in all", "µs a worker and round", "EMA, µs"]
    lines = _tables.table([*headings, "decision, µs", "99 %", "split again, µs"], rows)
    lines += [
        "",
        "Default `LBBSP()`, but for the column of EMA. Medians, but for the seconds in all and the 99 %. "
        f"Split again: {FEW} rounds with tolerance 0.",
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
    axis.loglog(sizes, [1e3 * d for _, _, d in costs], "s-", color="#D55E00", label="a rank's decision")
    axis.axhline(1.0, color="#888888", linestyle="--", linewidth=1, label="1 % of a round of 100 ms")
    axis.set_xlabel("workers")
    axis.set_ylabel("milliseconds")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
