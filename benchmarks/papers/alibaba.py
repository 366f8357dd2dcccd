"""Real training jobs of Alibaba PAI: BSP, LB-BSP with each predictor, and the best possible split.

    python benchmarks/papers/alibaba.py --traces DIR [--write] [--repeat N]

``alibaba_pai_job_*.csv``: the time of each mini-batch of ten workers (normalised to 0 ... 1000). The workers had
equal batches; here worker i's k-th batch of x samples takes x / x_equal of its k-th recorded time, that is, time is
taken to be proportional to the batch (a fixed cost is not in the data). There are no drivers, so NARX is EMA. A
recording is shorter than a training, so it is played ``--repeat`` times.

A job's workers have records at the same time stamps, but one may begin late, end early, or have two at a stamp. Rounds
are the stamps that all workers have; of two records at a stamp the first counts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

import _tables
import numpy as np
from rich.progress import Progress

from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive
from hvd_hetero.tools.simulation import BestSplit, Cluster, Compute, Drivers, Recorded, Worker, simulate

PREDICTORS = ("memoryless", "ema", "reverting", "arima", "simple_rnn", "lstm", "narx", "mixture")
BATCH = 100


def cluster(path: Path) -> tuple[Cluster, int]:
    """Return the machines of a job, and the number of recorded rounds."""
    times: dict[int, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            times[int(row["worker"])].setdefault(int(row["time"]), float(row["batch_time_norm"]))
    stamps = sorted(set.intersection(*(set(each) for each in times.values())))
    if not stamps:
        raise ValueError(f"{path} must have time stamps that all {len(times)} workers share, and has none")
    workers = []
    for _, each in sorted(times.items()):
        seconds = np.array([max(each[stamp], 1.0) for stamp in stamps]) / 1000.0
        typical_s = float(np.median(seconds))
        variation = (Recorded("round", tuple((seconds / typical_s).tolist())),)
        workers.append(Worker(Compute.at_speed(BATCH / typical_s), variation=variation, drivers=Drivers(known=False)))
    return Cluster(tuple(workers)), len(stamps)


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, required=True, help="folder with alibaba_pai_job_*.csv")
        parser.add_argument("--repeat", type=int, default=1, help="times that a recording is played (default 1)")

    options = _tables.options(__doc__ or "", extend)
    paths = sorted(options.traces.glob("alibaba_pai_job_*.csv"))
    if not paths:
        print(f"--traces must hold alibaba_pai_job_*.csv, and {options.traces} has none", file=sys.stderr)
        return 1
    kinds: dict[str, Policy] = {}
    verdicts, lines = _tables.Verdicts(), []
    with Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=len(paths) * (len(PREDICTORS) + 5))
        for path in paths:
            machines, recorded = cluster(path)
            kinds = {"BSP": BSP(), "best split": BestSplit()}
            kinds |= {f"LB-BSP, {name}": LBBSP(name) for name in PREDICTORS}
            kinds |= {
                "self-adaptive": SelfAdaptive(every=20),
                "non-blocking, N = 8": NonBlocking(8),
                "ElasticBSP, R = 15": ElasticBSP(15),
            }
            results = {}
            for name, policy in kinds.items():
                results[name] = simulate(machines, policy, BATCH * len(machines.workers), recorded * options.repeat)
                progress.advance(task)
            rate = {name: result.rate(10) for name, result in results.items()}
            rows = [
                [
                    name,
                    f"{rate[name]:.1f}",
                    rate[name] / rate["BSP"],
                    rate[name] / rate["best split"],
                    f"{result.waiting_share(10):.1%}",
                ]
                for name, result in results.items()
            ]
            lines += [f"{path.stem}: {len(machines.workers)} workers, {recorded} rounds", ""]
            lines += _tables.table(["", "samples/s", "times BSP", "of the best split", "waiting"], rows)
            lines.append("")
            best = max(rate[f"LB-BSP, {name}"] for name in PREDICTORS)
            verdicts.check(f"{path.stem}: LB-BSP (mixture) over BSP", rate["LB-BSP, mixture"] / rate["BSP"], least=1.0)
            verdicts.check(
                f"{path.stem}: the mixture's rate over the best predictor's", rate["LB-BSP, mixture"] / best, least=0.98
            )
    return _tables.finish("alibaba", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
