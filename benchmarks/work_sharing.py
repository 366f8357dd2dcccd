r"""Work shared inside a round: what ranks that claim their micro-batches gain over LB-BSP and `lb-non-blocking`.

    python benchmarks/work_sharing.py [--write] [--cycles N] [--jobs stumbling-2 stumbling-3 steady-2]
    python benchmarks/work_sharing.py --simulated [--write]

A rank begins with half of its share by LB-BSP; the rest of the round is cut into micro-batches that a counter of a
`TCPStore` hands out, one after the other. Before its step, a rank claims the next one, so it knows whether the present
one is its last. Two ways to cut the round:

- **equal:N**: all micro-batches have the size of an Nth of an equal share;
- **shrinking:N**: each rank's own half is N / 2 micro-batches; then each has 1/2n of what is left, down to a fourth of
  an Nth, so that ranks end closer together.

Ranks train a linear model; computing is a sleep of 1 ms a sample and half a millisecond a micro-batch on the fastest
rank, with the real passes included, as in `stumbles.py`. Five micro-batches of each fifty of a rank take three times as
long, in random places. Policies train in alternating blocks of one run; a ratio is that of
a policy's samples per second over all blocks to those of the better one of LB-BSP and `lb-non-blocking`, with its
standard error. The steady job has no stumbles, and half as many blocks.

With ``--simulated``, 2 to 32 equally fast ranks: production's policies on simulated machines, and shared rounds by the
same sizes at known speeds, with the micro-batch costs that the table names, an exchange of 3 ms, and free claims.
Either one micro-batch in ten takes three times as long, or a machine is three times as slow for 100 ms at a time,
a tenth of the time.

Each takes six minutes or less, the measurement on a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _report import write_result
from _work_sharing_pieces import PIECES
from numpy.typing import NDArray

from hvd_hetero.policies import resolve_policy
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.testing import launch
from hvd_hetero.tools.simulation.availability import Availabilities, Availability
from hvd_hetero.tools.simulation.cluster import Cluster, Worker
from hvd_hetero.tools.simulation.compute import Compute
from hvd_hetero.tools.simulation.engine import simulate
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.variation import Variation

LB, FIRST = "lb-bsp", "lb-non-blocking"
SHARED = ("equal:8", "shrinking:4")
JOBS = {"stumbling-2": ((1.0, 1.0), 0.1), "stumbling-3": ((1.0, 1.5, 2.0), 0.1), "steady-2": ((1.0, 2.0), 0.0)}
CHANCE, TIMES = 0.1, 3.0
LEAST = {"stumbling": 1.05, "steady": 1.0}
REASON = (
    "Why it gains little over rounds that end early: both wait for part of one micro-batch at the end of a round, and "
    "both pay for each micro-batch. Shared rounds wait less only by smaller last micro-batches. On steady ranks every "
    "micro-batch of a rank but one is cost without gain. To save it, their number would have to be searched, as "
    "`lb-non-blocking` does it."
)
SHARE, SAMPLE_MS, FIXED_MS = 96, 1.0, 0.5
RANKS, EXCHANGE_MS, ROUNDS, SKIPPED = (2, 4, 8, 16, 32), 3.0, 600, 60
SLICE_MS, SLICES = 100.0, 5000
COSTS_MS = (0.5, 1.2)  # of a micro-batch: as the sleeps have it, and with the rest that ranks had here


@dataclass(frozen=True, slots=True)
class Stumbles(Variation):
    """Some micro-batches take ``TIMES`` as long."""

    def draw(self, rng: np.random.Generator, first: int, count: int) -> NDArray[np.float64]:
        """Return the factors."""
        return np.where(rng.random(count) < CHANCE, TIMES, 1.0)


def ratio_of(rates: list[float], others: list[float]) -> tuple[float, float]:
    """Return how many times as fast one policy is over all blocks, and its error, found by leaving out each block."""

    def without(block: int) -> float:
        return statistics.harmonic_mean(rates[:block] + rates[block + 1 :]) / statistics.harmonic_mean(
            others[:block] + others[block + 1 :]
        )

    each = [without(block) for block in range(len(rates))]
    error = math.sqrt((len(each) - 1) * statistics.pvariance(each))
    return statistics.harmonic_mean(rates) / statistics.harmonic_mean(others), error


def measured(job: str, options: argparse.Namespace) -> tuple[list[str], dict[str, float]]:
    """Measure one job on real ranks; return its lines of the table, and the ratios of shared rounds."""
    factors, chance = JOBS[job]
    kinds = (LB, FIRST, *SHARED)
    arguments: list[Any] = ["--kinds", *kinds, "--factors", *factors, "--chance", chance, "--times", TIMES]
    arguments += ["--sample-ms", SAMPLE_MS, "--fixed-ms", FIXED_MS, "--warm-up", options.warm_up]
    arguments += [
        "--cycles",
        options.cycles if chance else options.cycles // 2,
        "--rounds",
        options.rounds,
        "--seed",
        options.seed,
    ]
    worker = Path(__file__).with_name("_work_sharing_rank.py")
    found = launch(worker, len(factors), arguments, timeout_s=options.timeout).reports[0]
    best = max((LB, FIRST), key=lambda kind: statistics.harmonic_mean(found[kind]["rates"]))
    lines, ratios = [], {}
    for kind in kinds:
        of = found[kind]
        ratios[kind], error = ratio_of(of["rates"], found[best]["rates"])
        ratio = "1" if kind == best else f"{ratios[kind]:.3f} ± {error:.3f}"
        rate = statistics.harmonic_mean(of["rates"])
        lines.append(
            f"| {job} | {', '.join(f'{f:g}' for f in factors)} | {kind} | {rate:.1f} | "
            f"{ratio} | {of['computing']:.1%} | {of['ending']:.1%} | {of['other']:.1%} | {of['other_ms']:.2f} | "
            f"{of['difference']:.1e} | {'yes' if of['each_once'] else 'NO'} |"
        )
        print(lines[-1], flush=True)
    return lines, ratios


def machines(workers: int, fixed_ms: float, slow: str) -> Cluster:
    """Return equally fast machines; ``slow``: for a micro-batch, or for some time."""
    compute, rng = Compute(SAMPLE_MS / 1e3, fixed_ms / 1e3), np.random.default_rng(0)
    network = Network(latency_s=EXCHANGE_MS / 1e3 / (2 * (workers - 1)))
    each = []
    for _ in range(workers):
        shares = np.where(rng.random(SLICES) < CHANCE, 1.0 / TIMES, 1.0)
        if slow == "micro-batch":
            each.append(Worker(compute, variation=(Stumbles("batch"),)))
        else:
            each.append(Worker(compute, Availability.series(shares, SLICE_MS / 1e3)))
    return Cluster(tuple(each), network)


def shared_rate(pieces: str, number: int, cluster: Cluster, fixed_ms: float) -> float:
    """Return samples per second of ranks that share rounds."""
    workers = len(cluster.workers)
    plan = RoundPlan.of([SHARE] * workers)
    claimed, own = PIECES[pieces](plan, number)
    availability = Availabilities([worker.availability for worker in cluster.workers])
    stumbles, rng = cluster.workers[0].variation, np.random.default_rng(1)
    now_s = 0.0
    for _ in range(ROUNDS):
        ends_s = np.full(workers, now_s)
        # Each rank's own first, then whoever is free first.
        turns = [(at, [*range(workers)]) for at in range(len(own[0]))] + [(at, [-1]) for at in range(len(claimed))]
        for at, ranks in turns:
            work_s = np.zeros(workers)
            for rank in ranks:
                first = int(np.argmin(ends_s)) if rank < 0 else rank
                size = own[rank][at] if rank >= 0 else claimed[at]
                factor = TIMES if stumbles and rng.random() < CHANCE else 1.0
                work_s[first] = factor * (SAMPLE_MS * size + fixed_ms) / 1e3
            ends_s = availability.finish(ends_s, work_s)
        now_s = float(ends_s.max()) + EXCHANGE_MS / 1e3
    return plan.total * ROUNDS / now_s


def simulated(workers: int, fixed_ms: float, slow: str) -> str:
    """Return one line of the simulated table."""
    cluster = machines(workers, fixed_ms, slow)
    rates = {
        kind: simulate(cluster, resolve_policy(kind), SHARE * workers, ROUNDS).rate(SKIPPED) for kind in (LB, FIRST)
    }
    for kind in SHARED:
        pieces, _, number = kind.partition(":")
        rates[kind] = shared_rate(pieces, int(number), cluster, fixed_ms)
    best = max(rates[LB], rates[FIRST])
    return (
        f"| {workers} | {fixed_ms:g} | {slow} | {rates[FIRST] / rates[LB]:.3f} | "
        f"{' | '.join(f'{rates[kind] / rates[LB]:.3f}' for kind in SHARED)} | "
        f"{' | '.join(f'{rates[kind] / best:.3f}' for kind in SHARED)} |"
    )


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    parser.add_argument("--simulated", action="store_true", help="2 to 32 simulated ranks, in place of real ones")
    parser.add_argument("--jobs", nargs="*", default=[*JOBS], choices=[*JOBS], help="which to measure (default all)")
    parser.add_argument("--cycles", type=int, default=9, help="blocks of each policy (default 9)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a block (default 15)")
    parser.add_argument("--warm-up", type=int, default=45, help="rounds of each that do not count (default 45)")
    parser.add_argument("--seed", type=int, default=2, help="of stumbles and data (default 2)")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each job (default 400)")
    options = parser.parse_args()
    if options.simulated:
        return all_simulated(options)
    lines = [
        "| job | ranks, times as slow | policy | samples/s | of the better one of both | computing | end of a round, "
        "with waiting | the rest | the rest, ms a micro-batch | off one process | each sample once |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    print("\n".join(lines))
    words = {True: "has", False: "has not"}
    kept = dict.fromkeys(SHARED, True)
    for job in options.jobs:
        more, ratios = measured(job, options)
        lines += more
        kept = {kind: kept[kind] and ratios[kind] >= LEAST[job.partition("-")[0]] for kind in SHARED}
    lines += [
        "",
        f"{options.cycles} alternating blocks of {options.rounds} rounds, after {options.warm_up}. Sharing stays if it "
        f"has {LEAST['stumbling']} of the better one where ranks stumble, and {LEAST['steady']} where they are steady: "
        f"{', '.join(f'{kind} {words[has]}' for kind, has in kept.items())}.",
        "",
        REASON,
    ]
    finish("work_sharing", lines, options)
    return 0


def all_simulated(options: argparse.Namespace) -> int:
    """Print the simulated table."""
    lines = [
        f"| ranks | a micro-batch costs, ms | slow for a | {FIRST} | {' | '.join(SHARED)} | "
        f"{' | '.join(f'{kind}, of the better' for kind in SHARED)} |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for slow in ("micro-batch", f"{SLICE_MS:g} ms"):
        for fixed_ms in COSTS_MS:
            lines += [simulated(workers, fixed_ms, slow) for workers in RANKS]
    lines += ["", "Samples per second over LB-BSP's, and over those of the better one of LB-BSP and lb-non-blocking."]
    finish("work_sharing_simulated", lines, options)
    return 0


def finish(name: str, lines: list[str], options: argparse.Namespace) -> None:
    """Print the table, and store it if that is asked for."""
    print("\n".join(lines))
    if options.write:
        write_result(name, "\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main())
