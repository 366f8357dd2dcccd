"""Whether a rank that costs more than it gives is left out: LB-BSP with ``may_rest``, in simulated clusters.

    python benchmarks/may_rest.py [--write] [--clusters 50]
    python benchmarks/may_rest.py --ranks [--write]

Each cluster has 2 to 8 workers, most of them within a factor of two, and one to three as slow as a third down to a
two-hundredth; micro-batches have a fixed cost of up to 16 samples; times scatter by 3 %. Each trains with LB-BSP, with
``may_rest``, and with LB-BSP once for each number of slowest workers that are left out for good. A cell is samples per
second after the first 100 rounds, as a share of the best of these. The least that is asked: 0.99 in each cluster.

``--ranks``: two real ranks over torch.distributed, whose layer sleeps for each sample, so that the second is slow as
planned whatever else runs; "without" is the first one with all samples, and the second without any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from _report import write_result
from rich.progress import track

from hvd_hetero.policies import LBBSP
from hvd_hetero.testing import launch, torchrun
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Worker, simulate

ROUNDS, START, TARGET = 1500, 100, 0.99
RANK = Path(__file__).with_name("_may_rest_rank.py")
SPEEDS, REAL_ROUNDS, REAL_START = ("1:0.5", "1:0.1", "1:0.01"), 400, 60


def worker(speed: float, fixed: float) -> Worker:
    return Worker(Compute(1 / speed, fixed / speed), variation=(Jitter(sigma=0.03),))


def drawn(seed: int) -> tuple[list[float], float, int]:
    """Return speeds, the fixed cost in samples, and the global batch."""
    rng = np.random.default_rng(seed)
    fast = rng.uniform(0.5, 1.0, int(rng.integers(1, 6)))
    slow = np.exp(rng.uniform(np.log(1 / 200), np.log(1 / 3), int(rng.integers(1, 4))))
    return [*fast.tolist(), *slow.tolist()], float(rng.uniform(0.0, 16.0)), int(rng.integers(4, 65)) * 8


def pace(speeds: list[float], fixed: float, batch: int, seed: int, *, may_rest: bool = False) -> float:
    """Return samples per second."""
    cluster = Cluster(tuple(worker(speed, fixed) for speed in speeds), seed=seed)
    return simulate(cluster, LBBSP(may_rest=may_rest), batch, ROUNDS).rate(START)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table under benchmarks/results")
    parser.add_argument("--clusters", type=int, default=50)
    parser.add_argument("--ranks", action="store_true", help="real ranks in the place of simulated clusters")
    options = parser.parse_args()
    name, text, met = ("may_rest_ranks", *of_ranks()) if options.ranks else ("may_rest", *of_clusters(options.clusters))
    print(text)
    if options.write:
        write_result(name, text)
    return 0 if met else 1


def of_ranks() -> tuple[str, bool]:
    """Return the table of real ranks, and whether it is as asked."""
    rows, least = (
        [
            "| speeds | LB-BSP, all | may rest | without the second | may rest, of the better |",
            "|---|---:|---:|---:|---:|",
        ],
        1.0,
    )
    for speeds in track(SPEEDS, "speeds"):
        arguments = [speeds, REAL_ROUNDS, REAL_START]
        (first, *_) = launch(RANK, 2, arguments, timeout_s=600, starter=torchrun(2)).reports
        share = first["may rest"] / max(first["all"], first["without"])
        least = min(least, share)
        cells = [f"{first[name] / first['without']:.3f}" for name in ("all", "may rest", "without")]
        rows.append(f"| {speeds} | {' | '.join(cells)} | {share:.3f} |")
    rows += ["", "Samples per second, as multiples of what the first rank does alone."]
    return "\n".join(rows), least >= TARGET


def of_clusters(clusters: int) -> tuple[str, bool]:
    """Return the table of simulated clusters, and whether it is as asked."""
    rows = []
    for seed in track(range(clusters), "clusters"):
        speeds, fixed, batch = drawn(seed)
        by_speed = sorted(speeds, reverse=True)
        paces = {n: pace(by_speed[:n], fixed, batch, seed) for n in range(1, len(speeds) + 1)}
        best = max(paces, key=paces.__getitem__)
        rests = pace(by_speed, fixed, batch, seed, may_rest=True)
        rows.append((seed, by_speed, fixed, batch, best, paces[len(speeds)] / paces[best], rests / paces[best]))
    shares = np.array([row[-1] for row in rows])
    table = [
        "| cluster | speeds | fixed cost, samples | global batch | best without | LB-BSP, all | may rest |",
        "|---:|---|---:|---:|---:|---:|---:|",
        *(
            f"| {seed} | {' '.join(f'{speed:.3g}' for speed in speeds)} | {fixed:.1f} | {batch} | "
            f"{len(speeds) - best} | {all_of:.3f} | {rests:.3f} |"
            for seed, speeds, fixed, batch, best, all_of, rests in rows
        ),
        "",
        f"Least {shares.min():.3f}, median {np.median(shares):.3f}; at least {TARGET} in "
        f"{int((shares >= TARGET).sum())} of {len(shares)}. LB-BSP without resting: least "
        f"{min(row[-2] for row in rows):.3f}, median {np.median([row[-2] for row in rows]):.3f}.",
    ]
    return "\n".join(table), bool((shares >= TARGET).all())


if __name__ == "__main__":
    sys.exit(main())
