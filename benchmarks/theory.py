"""Check the run-time and throughput formulas against Monte Carlo, for P from 2 to 1,000 workers.

Eqs. 7 to 14, and the means of Eqs. 16 and 17, against the mean over simulated rounds of exponential times. Eqs. 15, 17
and 18 for given times (their means do not exist, or are in the former table) against counting: workers of those speeds
run batch after batch for a long while, and finished batches are counted. Last, the paper's alternating sum of Eq. 10 in
double precision.

    python benchmarks/theory.py [--write]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _theory as theory

WORKERS = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
ROUNDS = 400_000  # at P = 2 the variance of 1/X_{P:P} is infinite (barely): fewer would show it
CHUNK = 4_000_000  # times drawn at once
RATE, DATASET, BATCH = 0.5, 50_000, 64
WITHIN = 0.01


def simulate(workers: int, rng: np.random.Generator) -> dict[str, float]:
    """Return means over rounds: times to the first and to the last, samples by the first, synchronous throughput."""
    sums, left = np.zeros(4), ROUNDS
    while left:
        rounds = min(left, CHUNK // workers)
        times = rng.exponential(1 / RATE, (rounds, workers))
        first, last = times.min(axis=1), times.max(axis=1)
        done = BATCH * first * (1 / times).sum(axis=1)
        sums += first.sum(), last.sum(), done.sum(), (workers * BATCH / last).sum()
        left -= rounds
    return dict(zip(("first", "last", "done", "throughput"), sums / ROUNDS, strict=True))


def means() -> tuple[str, float]:
    lines = [
        "| P | E[X_1:P] (7, 9) | ratio (8) | E[X_P:P] (10) | epoch, non-blocking (11, 13) "
        "| epoch, synchronous (12, 14) | samples per round (16) | synchronous samples/s (17) "
        "| long-run speed-up | furthest off |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rng, worst = np.random.default_rng(0), 0.0
    for p in track(WORKERS, "Monte Carlo"):
        seen = simulate(p, rng)
        rounds = DATASET / (p * BATCH)
        pairs = [
            (theory.round_time_nonblocking(p, RATE), seen["first"]),
            (theory.round_time_ratio(p), seen["first"] / seen["last"]),
            (theory.round_time_synchronous(p, RATE), seen["last"]),
            (theory.epoch_time_nonblocking(p, DATASET, BATCH, RATE), rounds * seen["first"]),
            (theory.epoch_time_synchronous(p, DATASET, BATCH, RATE), rounds * seen["last"]),
            (theory.expected_samples_nonblocking(p, BATCH), seen["done"]),
            (theory.expected_throughput_synchronous(p, BATCH, RATE), seen["throughput"]),
            (theory.long_run_speedup(p), seen["done"] / seen["first"] * seen["last"] / (p * BATCH)),
        ]
        off = [formula / measured - 1 for formula, measured in pairs]
        furthest = max(map(abs, off))
        worst = max(worst, furthest)
        cells = " | ".join(f"{formula:.5g} ({o:+.2%})" for (formula, _), o in zip(pairs, off, strict=True))
        lines.append(f"| {p} | {cells} | {furthest:.2%} |")
    return "\n".join(lines), worst


def counted() -> tuple[str, float]:
    lines = ["| P | non-blocking samples/s (15) | synchronous (17) | ratio (18) |", "|---:|---:|---:|---:|"]
    rng, worst = np.random.default_rng(1), 0.0
    for p in WORKERS:
        times = rng.exponential(1 / RATE, p)
        horizon = 1000 * times.max()
        free = BATCH * np.floor(horizon / times).sum() / horizon
        together = BATCH * p * np.floor(horizon / times.max()) / horizon
        pairs = [
            (theory.throughput_nonblocking(times, BATCH), free),
            (theory.throughput_synchronous(times, BATCH), together),
            (theory.throughput_ratio(times), free / together),
        ]
        off = [formula / measured - 1 for formula, measured in pairs]
        worst = max(worst, *map(abs, off))
        cells = " | ".join(f"{formula:.5g} ({o:+.2%})" for (formula, _), o in zip(pairs, off, strict=True))
        lines.append(f"| {p} | {cells} |")
    return "\n".join(lines), worst


def stability() -> str:
    lines = ["| P | H_P / rate | alternating sum of Eq. 10, in doubles |", "|---:|---:|---:|"]
    for p in (10, 30, 50, 60, 100, 1000, 10_000):
        try:
            printed = f"{p / RATE * sum(math.comb(p - 1, k) * (-1) ** k / (k + 1) ** 2 for k in range(p)):.6g}"
        except OverflowError:
            printed = "overflow"
        lines.append(f"| {p} | {theory.round_time_synchronous(p, RATE):.6g} | {printed} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the tables as benchmarks/results/theory.md")
    write = parser.parse_args().write
    table, off = means()
    given, off_given = counted()
    good = max(off, off_given) <= WITHIN
    text = (
        f"{table}\n\nrate {RATE}, D = {DATASET:,}, B = {BATCH}; in brackets: how far"
        f" from the mean of {ROUNDS:,} rounds.\n\n"
        f"{given}\n\nFor one draw of times per P, against counting batches over a thousand of the slowest's.\n\n"
        f"{stability()}\n\n"
        f"All within {WITHIN:.0%} of Monte Carlo: {'yes' if good else 'NO'} (furthest {max(off, off_given):.2%})."
    )
    print(text)
    if write:
        from _report import write_result

        write_result("theory", text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
