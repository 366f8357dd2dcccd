"""Check `zipline` against the paper's ZipLine, and measure how much faster it is, beside the paper's Table II.

Exactness: against brute force over all choices of ends (2,000 small instances, half of them full of ties), and against
Algorithm 2 as the paper writes it, set Z for set Z, on those and larger ones; `grid_scan` and `full_grid_scan` against
Algorithm 1 as the paper describes it.
Speed: `zipline` and the literal Algorithm 2 in turns on the same instances; medians and their ratio.

    python benchmarks/barriers.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hvd_hetero.barriers import Barrier, full_grid_scan, grid_scan, zipline

SMALL = 2000
CELLS = [(10, 15), (10, 150), (100, 15), (100, 150), (1000, 15), (1000, 150)]  # workers, R
TABLE_II_US = {
    "ZipLine": (1.49e2, 1.32e3, 6.37e3, 4.99e4, 2.53e5, 2.38e6),
    "FullGridScan": (1.54e3, 4.67e4, 8.13e4, 2.15e6, 4.04e6, 2.07e8),
    "GridScan": (1.68e2, 5.50e3, 1.11e3, 4.38e4, 7.45e3, 2.57e5),
}
RATIO_AT_LEAST = 15.0

Point = tuple[float, int, int]  # end, worker, iteration
Found = tuple[float, list[int]]  # d_Z, and the iteration of each worker in Z


def algorithm_2(ends: np.ndarray) -> Found:
    """Run ZipLine as printed: Z is an ascending list, searched for the worker's old end at each addition."""
    n = len(ends)
    omega = deque(sorted((end, p, i) for p, row in enumerate(ends.tolist()) for i, end in enumerate(row)))
    z: list[Point] = []

    def take() -> None:
        point = omega.popleft()
        for at, old in enumerate(z):
            if old[1] == point[1]:
                del z[at]
                break
        z.append(point)

    while len(z) < n:
        take()
    best, best_z = z[-1][0] - z[0][0], list(z)
    while omega:
        del z[0]
        while len(z) < n:
            if not omega:  # the printed loop would read beyond the end here
                return best, _iterations(best_z)
            take()
        wait = z[-1][0] - z[0][0]
        if wait < best:
            best, best_z = wait, list(z)
    return best, _iterations(best_z)


def algorithm_2_hashed(ends: np.ndarray) -> Found:
    """Run the same scan with Z a dict in order of insertion, which plain Python need not search."""
    omega = sorted((end, p, i) for p, row in enumerate(ends.tolist()) for i, end in enumerate(row))
    z: dict[int, Point] = {}
    best, best_z = np.inf, []
    for point in omega:
        z.pop(point[1], None)
        z[point[1]] = point
        if len(z) == len(ends):
            wait = point[0] - next(iter(z.values()))[0]
            if wait < best:
                best, best_z = wait, list(z.values())
    return best, _iterations(best_z)


def _iterations(z: list[Point]) -> list[int]:
    return [i for _, _, i in sorted(z, key=lambda point: point[1])]


def algorithm_1(ends: np.ndarray, rows: range | list[int]) -> Found:
    """Run GridScan as described, with each of ``rows`` designated in turn."""
    best, best_z = np.inf, []
    for row in rows:
        for e in ends[row]:
            z = [int(np.abs(other - e).argmin()) for other in ends]
            times = [other[i] for other, i in zip(ends, z, strict=True)]
            if max(times) - min(times) < best:
                best, best_z = max(times) - min(times), z
    return best, best_z


def brute_force(ends: np.ndarray) -> tuple[float, float]:
    """Return the least d_Z of all R^n choices, and the earliest barrier that has it."""
    return min((max(z) - min(z), max(z)) for z in itertools.product(*ends.tolist()))


def instance(rng: np.random.Generator, workers: int, lookahead: int) -> np.ndarray:
    """Return workers whose mean intervals differ up to fourfold, with 5 % noise: a stable heterogeneous cluster."""
    mean = rng.uniform(0.5, 2.0, (workers, 1))
    return np.cumsum(mean * np.maximum(rng.normal(1.0, 0.05, (workers, lookahead)), 0.5), axis=1)


def small_instance(rng: np.random.Generator, tied: bool) -> np.ndarray:
    shape = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    return np.cumsum(rng.integers(1, 4, shape) if tied else rng.uniform(0.5, 1.5, shape), axis=1)


def same(barrier: Barrier, found: Found) -> bool:
    return (barrier.wait, barrier.index.tolist()) == (found[0], list(found[1]))


def exactness() -> tuple[str, bool]:
    rng = np.random.default_rng(0)
    brute = scan = grid = 0
    for number in track(range(SMALL), "small instances"):
        ends = small_instance(rng, tied=number % 2 == 0)
        barrier = zipline(ends)
        brute += (barrier.wait, barrier.time) == brute_force(ends)
        scan += same(barrier, algorithm_2(ends))
        first = int(ends[:, 0].argmin())
        grid += same(grid_scan(ends), algorithm_1(ends, [first]))
        grid += same(full_grid_scan(ends), algorithm_1(ends, range(len(ends))))
    larger = agree = 0
    for workers, lookahead in track(CELLS[:-1], "larger instances"):
        for tied in (False, True) * 3:
            ends = instance(rng, workers, lookahead)
            if tied:  # whole numbers, so that many ends share each instant
                ends = np.ceil(ends * 10).astype(int) + np.arange(lookahead)
            barrier = zipline(ends)
            larger += 1
            agree += same(barrier, algorithm_2_hashed(ends)) and same(barrier, algorithm_2(ends))
    lines = [
        "| compared | instances | equal |",
        "|---|---:|---:|",
        f"| `zipline`, brute force (wait and time) | {SMALL} | {brute} |",
        f"| `zipline`, literal Algorithm 2 (wait and every index) | {SMALL} | {scan} |",
        f"| the same, larger, to 1,000 workers | {larger} | {agree} |",
        f"| `grid_scan` and `full_grid_scan`, literal Algorithm 1 | {2 * SMALL} | {grid} |",
    ]
    return "\n".join(lines), brute == scan == SMALL and grid == 2 * SMALL and agree == larger


def speed() -> tuple[str, bool]:
    rng = np.random.default_rng(1)
    lines = [
        "| workers | R | `zipline` µs | Table II | literal µs | ratio | hashed µs | ratio "
        "| `grid_scan` µs | Table II | `full_grid_scan` µs | Table II |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    good = True
    for cell, (workers, lookahead) in enumerate(track(CELLS, "timing")):
        large = workers * lookahead > 20_000
        turns = 5 if large else 15
        took: dict[str, list[float]] = {name: [] for name in ("zipline", "literal", "hashed", "grid", "full")}
        for turn in range(turns + 1):
            ends = instance(rng, workers, lookahead)
            found = zipline(ends)
            calls: list[tuple[str, Callable[[], object], int]] = [
                ("zipline", lambda ends=ends: zipline(ends), 20),
                ("literal", lambda ends=ends: algorithm_2(ends), 1),
                ("hashed", lambda ends=ends: algorithm_2_hashed(ends), 1),
                ("grid", lambda ends=ends: grid_scan(ends), 20),
                ("full", lambda ends=ends: full_grid_scan(ends), 1),
            ]
            for name, call, repeats in calls:
                if name == "full" and workers * lookahead * workers > 10**7 and took["full"]:
                    continue  # seconds each; once is enough
                for _ in range(repeats):
                    start = perf_counter()
                    result = call()
                    seconds = perf_counter() - start
                    if turn:  # the first turn warms up
                        took[name].append(seconds)
                if name == "literal":
                    good &= same(found, result)
        us = {name: median(seconds) * 1e6 for name, seconds in took.items()}
        paper = {name: row[cell] for name, row in TABLE_II_US.items()}
        good &= us["zipline"] < paper["ZipLine"]
        if (workers, lookahead) == (1000, 150):
            good &= us["literal"] / us["zipline"] >= RATIO_AT_LEAST
        lines.append(
            f"| {workers} | {lookahead} | {us['zipline']:,.0f} | {paper['ZipLine']:,.0f} | {us['literal']:,.0f} "
            f"| {us['literal'] / us['zipline']:.0f} | {us['hashed']:,.0f} | {us['hashed'] / us['zipline']:.0f} "
            f"| {us['grid']:,.0f} | {paper['GridScan']:,.0f} | {us['full']:,.0f} | {paper['FullGridScan']:,.0f} |"
        )
    return "\n".join(lines), good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the tables as benchmarks/results/barriers.md")
    write = parser.parse_args().write
    exact, equal = exactness()
    table, fast = speed()
    text = (
        f"{exact}\n\n{table}\n\n"
        "Medians, all in turns on the same instances, where the first two were compared again "
        "(`full_grid_scan` of 1,000 workers: one run). "
        "Table II: the paper's, on its own machine. Literal: Algorithm 2 as printed, in Python; "
        "hashed: the same with Z a dict. Ratios: over `zipline`.\n\n"
        f"Equal everywhere: {'yes' if equal else 'NO'}. Below Table II in every cell, and at 1,000 workers x 150 ends "
        f"at least {RATIO_AT_LEAST:.0f} times sooner than the literal version: {'yes' if fast else 'NO'}."
    )
    print(text)
    if write:
        from _report import write_result

        write_result("barriers", text)
    sys.exit(not (equal and fast))


if __name__ == "__main__":
    main()
