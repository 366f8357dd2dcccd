"""Non-blocking SGD, Theorems 1 to 5: the formulas beside rounds that the simulator runs.

    python benchmarks/papers/nonblocking_theorems.py [--write]

P workers, exponential times of mean 1 / rate per batch of B samples; the non-blocking rounds are cut into so many
micro-batches that the computed part of the current one hardly counts (the theorems count fractions of samples). The
last column has the same round with N = 8 micro-batches, as one would use: how far theory is from practice.
Target: every formula within 2 % of the simulation.
"""

from __future__ import annotations

import sys

import _tables
import _theory as theory
import numpy as np
from rich.progress import track

from hvd_hetero.policies import BSP, NonBlocking
from hvd_hetero.tools.simulation import Cluster, Compute, Exponential, RoundSimulation, Worker

WORKERS = (2, 4, 8, 16, 32)
RATE, DATASET, BATCH, ROUNDS = 0.5, 50_000, 64, 30_000
FINE = 16_384  # micro-batches of a round that stands for a continuous one
WITHIN = 0.02


def cluster(workers: int) -> Cluster:
    compute = Compute.at_speed(FINE * RATE)  # a batch of FINE grains, the B samples, takes 1 / RATE in the mean
    return Cluster(tuple(Worker(compute, variation=(Exponential(),)) for _ in range(workers)), seed=workers)


def run(workers: int, policy: BSP | NonBlocking, rounds: int) -> tuple[float, float, float]:
    """Return mean seconds of a round, mean samples of a round (B per worker), and the mean rate over rounds."""
    result = RoundSimulation(cluster(workers), policy, FINE * workers).run(rounds)
    elapsed_s, samples = np.array(result.elapsed_s), np.array(result.samples) * (BATCH / FINE)
    return float(elapsed_s.mean()), float(samples.mean()), float((samples / elapsed_s).mean())


def main() -> int:
    options = _tables.options(__doc__ or "")
    verdicts, rows, worst = _tables.Verdicts(), [], 0.0
    for p in track(WORKERS, "simulating"):
        # E[1/X_{P:P}] has infinite variance at P = 2: more rounds there.
        blocking_s, _, throughput = run(p, BSP(), ROUNDS * max(1, 16 // p**2))
        first_s, samples, _ = run(p, NonBlocking(FINE, anticipates=False), ROUNDS * max(1, 8 // p))
        coarse_s, coarse_samples, _ = run(p, NonBlocking(8, anticipates=False), ROUNDS // 4)
        rounds = DATASET / (p * BATCH)
        epoch_s = theory.epoch_time_nonblocking(p, DATASET, BATCH, RATE)
        blocking_epoch_s = theory.epoch_time_synchronous(p, DATASET, BATCH, RATE)
        per_s = theory.expected_throughput_synchronous(p, BATCH, RATE)
        speedup = (samples / first_s) / (p * BATCH / blocking_s)
        pairs = [
            ("Lemma 1, Eqs. 7, 9: s per round", theory.round_time_nonblocking(p, RATE), first_s),
            ("Eq. 10: s per round, D-PSGD", theory.round_time_synchronous(p, RATE), blocking_s),
            ("Theorem 1, Eq. 8: ratio", theory.round_time_ratio(p), first_s / blocking_s),
            ("Theorem 2, Eqs. 11, 13: s per epoch", epoch_s, rounds * first_s),
            ("Eqs. 12, 14: the same, D-PSGD", blocking_epoch_s, rounds * blocking_s),
            ("Theorem 3, Eqs. 15, 16: samples per round", theory.expected_samples_nonblocking(p, BATCH), samples),
            ("Theorem 4, Eq. 17: samples per s, D-PSGD", per_s, throughput),
            ("Theorem 5: ratio of throughputs in the long run", theory.long_run_speedup(p), speedup),
        ]
        for what, formula, seen in pairs:
            off = seen / formula - 1
            worst = max(worst, abs(off))
            rows.append([p, what, f"{formula:.5g}", f"{seen:.5g}", f"{off:+.2%}"])
        rows.append([p, "s until D samples are done, non-blocking", "-", f"{DATASET * first_s / samples:.5g}", "-"])
        practice = (coarse_samples / coarse_s) / (p * BATCH / blocking_s)
        rows.append(
            [p, "the same with N = 8 micro-batches", f"{theory.long_run_speedup(p):.5g}", f"{practice:.5g}", "-"]
        )
    verdicts.check("furthest formula, relative", worst, most=WITHIN)
    lines = _tables.table(["P", "what", "formula", "simulated", "off"], rows)
    lines += ["", f"rate {RATE}, D = {DATASET:,}, B = {BATCH}; {ROUNDS:,} rounds and more per figure."]
    lines += [
        "Theorem 2 takes an epoch as D / (P B) rounds, but a non-blocking round does fewer than P B samples: another",
        "line has the time until all D are done. Theorem 5 is stated for the times of one round; its mean does not",
        "exist under exponential times (nor 1/X's), so its formula here is this project's own, that of the long run.",
        "The long-run ratio is the quotient of mean samples and mean seconds of a round. With N = 8 a worker ends the",
        "micro-batch at hand: for the slowest of many, whose times are exponential, that is long.",
    ]
    return _tables.finish("nonblocking_theorems", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
