"""Real training jobs of Alibaba PAI: LB-BSP's shares in rounds that the first rank ends, beside LB-BSP.

    python benchmarks/papers/alibaba_first.py --traces DIR [--write]

The jobs are as in ``alibaba.py``; a micro-batch costs nothing besides its samples, and neither does a transfer.
Then no policy does more samples per second than all workers together while all are at work: the mean over the rounds
of the workers' summed speeds, "all always at work". That, over LB-BSP, is what any policy could gain. If N is chosen,
the rounds that count hold trials of other numbers, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _tables
import numpy as np
from alibaba import BATCH, cluster

from hvd_hetero.policies import LBBSP, LBNonBlocking, NonBlocking, Policy
from hvd_hetero.tools.simulation import BestSplit, Cluster, Recorded, simulate

LEAST, BEGINNING = 1.05, 40  # rounds that do not count: the number of micro-batches is found in them
CHOSEN = "LB-BSP's shares, ended by the first, N chosen"


def policies() -> dict[str, Policy]:
    return {
        "LB-BSP": LBBSP(),
        "best split": BestSplit(),
        "non-blocking, N = 16": NonBlocking(16),
        **{f"LB-BSP's shares, ended by the first, N = {k}": LBNonBlocking(micro_batches=k) for k in (8, 16, 32)},
        CHOSEN: LBNonBlocking(),
    }


def always_at_work(machines: Cluster, rounds: int) -> float:
    """Return samples per second of all workers together, in the mean over the rounds that count."""
    speeds = np.zeros(rounds)
    for worker in machines.workers:
        (variation,) = worker.variation
        assert isinstance(variation, Recorded)
        speeds += 1.0 / (worker.compute.slope_s * np.array(variation.factors[:rounds]))
    return float(speeds[BEGINNING:].mean())


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, required=True, help="folder with alibaba_pai_job_*.csv")

    options = _tables.options(__doc__ or "", extend)
    paths = sorted(options.traces.glob("alibaba_pai_job_*.csv"))
    if not paths:
        print(f"--traces must hold alibaba_pai_job_*.csv, and {options.traces} has none", file=sys.stderr)
        return 1
    verdicts, lines = _tables.Verdicts(), []
    for path in paths:
        machines, rounds = cluster(path)
        total = BATCH * len(machines.workers)
        rate = {name: simulate(machines, p, total, rounds).rate(BEGINNING) for name, p in policies().items()}
        rate["all always at work"] = always_at_work(machines, rounds)
        rows = [[name, f"{r:.1f}", r / rate["LB-BSP"], r / rate["best split"]] for name, r in rate.items()]
        lines += [f"{path.stem}: {len(machines.workers)} workers, {rounds} rounds", ""]
        lines += [*_tables.table(["", "samples/s", "times LB-BSP", "of the best split"], rows), ""]
        verdicts.check(f"{path.stem}: N chosen, over LB-BSP", rate[CHOSEN] / rate["LB-BSP"], least=LEAST)
    return _tables.finish("alibaba_first", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
