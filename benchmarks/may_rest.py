"""Whether a rank that costs more than it gives is left out: LB-BSP with ``may_rest``, in simulated clusters.

    python benchmarks/may_rest.py [--write] [--clusters 50]

Each cluster has 2 to 8 workers, most of them within a factor of two, and one to three as slow as a third down to a
two-hundredth; micro-batches have a fixed cost of up to 16 samples; times scatter by 3 %. Each trains with LB-BSP, with
``may_rest``, and with LB-BSP once for each number of slowest workers that are left out for good. A cell is samples per
second after the first 100 rounds, as a share of the best of these. The least that is asked: 0.99 in each cluster.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from _report import write_result
from rich.progress import track

from hvd_hetero.policies import LBBSP
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Worker, simulate

ROUNDS, START, TARGET = 1500, 100, 0.99


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
    options = parser.parse_args()
    rows = []
    for seed in track(range(options.clusters), "clusters"):
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
    print("\n".join(table))
    if options.write:
        write_result("may_rest", "\n".join(table))
    return 0 if (shares >= TARGET).all() else 1


if __name__ == "__main__":
    sys.exit(main())
