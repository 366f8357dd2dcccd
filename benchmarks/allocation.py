"""Check that `minimax` is exact, and measure how much faster than the paper's linear program it is.

Exactness: `minimax` against all splits (small instances; the times of all workers must match, not only the latest's)
and against branch and bound, `scipy.optimize.milp` (middle instances), both with bounds, multiples and ties.
Speed: `minimax` and `minimax_lp` (HiGHS, sparse) in turns on the same instances; medians and their ratio.

    python benchmarks/allocation.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from rich.progress import track
from scipy.optimize import Bounds, LinearConstraint, milp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.allocation import Allocation, minimax, minimax_lp, proportional

SMALL, MIDDLE = 1500, 500
WORKERS, TURNS = (10, 100, 1000), 31
RATIO_AT_LEAST, MS_BELOW = 20.0, 1.0

Instance = tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray, np.ndarray, int]


def small(rng: np.random.Generator) -> tuple[Instance, np.ndarray]:
    """Return times of few binary digits, so that ties abound and floats are exact, and all legal splits."""
    while True:
        n, step = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        lower = rng.integers(0, 5, n)
        upper = lower + rng.integers(0, 7, n)
        choices = [[x for x in range(low, high + 1) if x % step == 0] for low, high in zip(lower, upper, strict=True)]
        if all(choices):
            break
    total = sum(int(rng.choice(choice)) for choice in choices)
    splits = np.array([split for split in itertools.product(*choices) if sum(split) == total])
    slope = rng.integers(0, 6, n) / rng.choice([1, 8])
    return (slope, rng.integers(-3, 6, n) * 1.0, rng.integers(0, 4, n) * 1.0, total, lower, upper, step), splits


def middle(rng: np.random.Generator) -> Instance:
    """Return seconds as measured, or (every third) tenths, for ties; some slopes are zero."""
    n, step = int(rng.integers(5, 25)), int(rng.choice([1, 4]))
    slope = rng.lognormal(-6, 1, n) * (rng.random(n) > 0.1)
    intercept, comm = rng.normal(0.02, 0.01, n), rng.exponential(0.01, n)
    if rng.random() < 1 / 3:
        slope, intercept, comm = rng.integers(0, 4, n) / 10, rng.integers(-3, 6, n) / 10, rng.integers(0, 4, n) / 10
    lower = step * rng.integers(0, 10, n)
    upper = lower + step * rng.integers(0, 40, n)
    total = int(rng.integers(lower.sum() // step, upper.sum() // step + 1)) * step
    return slope, intercept, comm, total, lower, upper, step


def large(rng: np.random.Generator, n: int) -> Instance:
    """Return n devices with the saturation and out-of-memory points of LB-BSP section 5.5, 380 samples each."""
    kind = rng.integers(0, 3, n)
    lower, upper = np.array([58, 92, 103])[kind], np.array([384, 1184, 788])[kind]
    slope = np.array([2.0e-3, 1.2e-3, 0.8e-3])[kind] * rng.lognormal(0, 0.1, n)
    return slope, rng.uniform(0.02, 0.05, n), rng.exponential(0.05, n), 380 * n, lower, upper, 1


def legal(instance: Instance, shares: np.ndarray) -> bool:
    _, _, _, total, lower, upper, step = instance
    inside = (lower <= shares).all() and (shares <= upper).all()
    return bool(inside and shares.sum() == total and (shares % step == 0).all())


def exactness() -> tuple[str, bool]:
    rng = np.random.default_rng(0)
    count: Counter[str] = Counter()
    for _ in track(range(SMALL), "brute force"):
        instance, splits = small(rng)
        slope, intercept, comm = instance[:3]
        times = -np.sort(-(slope * splits + intercept + comm), axis=1)
        found = minimax(*instance)
        best = min(map(tuple, times.tolist()))
        count["small"] += legal(instance, found.shares) and tuple(sorted(found.finish_s.tolist(), reverse=True)) == best
        count["small multiples"] += instance[-1] > 1
        count["small ties"] += int((times[:, 0] == best[0]).sum() > 1)
    for _ in track(range(MIDDLE), "branch and bound"):
        instance = middle(rng)
        slope, intercept, comm, total, lower, upper, step = instance
        n = slope.size
        exact = milp(
            np.append(np.zeros(n), 1.0),
            integrality=np.append(np.ones(n), 0.0),
            bounds=Bounds(np.append(lower // step, -np.inf), np.append(upper // step, np.inf)),
            constraints=[
                LinearConstraint(np.c_[np.diag(slope * step), -np.ones(n)], ub=-(intercept + comm)),
                LinearConstraint(np.append(np.ones(n), 0.0), total // step, total // step),
            ],
            options={"mip_rel_gap": 0.0},
        )
        found = minimax(*instance)
        # HiGHS answers to its feasibility tolerance of 1e-6, in seconds.
        agree = exact.status == 0 and abs(found.latest_s - exact.fun) <= 1e-6
        count["middle"] += legal(instance, found.shares) and agree
        count["middle multiples"] += step > 1
        finish = np.sort(found.finish_s)
        count["middle ties"] += int((np.diff(finish) < 1e-12).any())
    lines = [
        "| oracle | instances | with multiples | with ties | `minimax` equal |",
        "|---|---:|---:|---:|---:|",
        f"| every split, all workers' times | {SMALL} | {count['small multiples']} | {count['small ties']} "
        f"| {count['small']} |",
        f"| branch and bound, latest worker | {MIDDLE} | {count['middle multiples']} | {count['middle ties']} "
        f"| {count['middle']} |",
    ]
    return "\n".join(lines), count["small"] == SMALL and count["middle"] == MIDDLE


def seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def speed() -> tuple[str, bool]:
    rng = np.random.default_rng(1)
    lines = [
        "| workers | `minimax` ms | `minimax_lp` ms | ratio | linear program later by, at most | `proportional` ms |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for n in WORKERS:
        ours, theirs, shares, later = [], [], [], []
        for turn in track(range(TURNS + 1), f"{n} workers"):
            instance = large(rng, n)
            found, relaxed = minimax(*instance), minimax_lp(*instance)
            if not isinstance(relaxed, Allocation):
                raise SystemExit(f"HiGHS failed on {n} workers: {relaxed.message}")
            later.append(relaxed.latest_s / found.latest_s - 1)
            for times, call in (
                (ours, lambda instance=instance: minimax(*instance)),
                (theirs, lambda instance=instance: minimax_lp(*instance)),
                (shares, lambda instance=instance: proportional(1 / instance[0], instance[3])),
            ):
                if turn:  # the first turn warms up
                    times.append(seconds(call))
                else:
                    call()
        lines.append(
            f"| {n} | {median(ours) * 1e3:.3f} | {median(theirs) * 1e3:.2f} | {median(theirs) / median(ours):.0f} "
            f"| {max(later):.4%} | {median(shares) * 1e3:.3f} |"
        )
    # of the last row, the largest cluster
    return "\n".join(lines), median(theirs) / median(ours) >= RATIO_AT_LEAST and median(ours) * 1e3 < MS_BELOW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the tables as benchmarks/results/allocation.md")
    write = parser.parse_args().write
    exact, equal = exactness()
    table, fast = speed()
    text = (
        f"{exact}\n\n{table}\n\nMedians of {TURNS} instances, each solved by all three in turns. "
        "Ratio: median of `minimax_lp` over median of `minimax`.\n\n"
        f"Equal everywhere: {'yes' if equal else 'NO'}. At {WORKERS[-1]:,} workers below {MS_BELOW:g} ms, and at least "
        f"{RATIO_AT_LEAST:g} times sooner than the linear program: {'yes' if fast else 'NO'}."
    )
    print(text)
    if write:
        from _report import write_result

        write_result("allocation", text)
    sys.exit(not (equal and fast))


if __name__ == "__main__":
    main()
