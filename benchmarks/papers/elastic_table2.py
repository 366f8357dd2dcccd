"""ElasticBSP, Table II: the time of each barrier search, in the paper's own layout.

    python benchmarks/papers/elastic_table2.py [--write] [--trials N]

The paper's figures and the instances are in ``benchmarks/barriers.py``: the paper gives only sizes. Its
machine is a Xeon E5-2620 v3 at 2.4 GHz; averages of 10 trials there and here. A time counts only with the answer: on
every instance that was timed, ZipLine has to find what Algorithm 2 of the paper finds, written out literally, and
neither scan may wait less than ZipLine, which is exact, nor may FullGridScan wait longer than GridScan, whose
candidates are among its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter

import _tables
import numpy as np
from barriers import CELLS, TABLE_II_US, algorithm_2_hashed, instance, same
from rich.progress import Progress

from hvd_hetero.barriers import Barrier, full_grid_scan, grid_scan, zipline

SEARCHES: dict[str, Callable[[np.ndarray], Barrier]] = {
    "ZipLine": zipline,
    "FullGridScan": full_grid_scan,
    "GridScan": grid_scan,
}
LONG_TRIALS = 2  # of the largest cell of FullGridScan, seven seconds each
SEED = 0


@dataclass(slots=True)
class Cell:
    """A column of the table: times and answers of each search on the same instances."""

    times_us: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SEARCHES})
    waits: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SEARCHES})
    literal: list[bool] = field(default_factory=list)
    """For each instance, True if ZipLine's answer is the literal Algorithm 2's."""


def measure(workers: int, lookahead: int, trials: int, progress: Callable[[], None] = lambda: None) -> Cell:
    cell, rng = Cell(), np.random.default_rng([SEED, workers, lookahead])
    instances = [instance(rng, workers, lookahead) for _ in range(trials)]
    for name, search in SEARCHES.items():
        search(instance(rng, 10, 15))  # what a first call pays for is not the search's
        long = name == "FullGridScan" and workers * lookahead > 100_000
        for ends in instances[:LONG_TRIALS] if long else instances:
            began = perf_counter()
            barrier = search(ends)
            cell.times_us[name].append(1e6 * (perf_counter() - began))
            cell.waits[name].append(barrier.wait)
        progress()
    cell.literal = [same(zipline(ends), algorithm_2_hashed(ends)) for ends in instances]
    return cell


def judge(found: dict[tuple[int, int], Cell]) -> tuple[list[str], _tables.Verdicts]:
    """Return the table, and its targets."""
    verdicts = _tables.Verdicts()
    mean_us = {(name, cell): fmean(found[cell].times_us[name]) for name in SEARCHES for cell in found}
    paper_us = {(name, cell): TABLE_II_US[name][CELLS.index(cell)] for name in SEARCHES for cell in found}
    rows: list[list[object]] = []
    for name in SEARCHES:
        rows.append([name, *(f"{paper_us[name, cell]:,.0f} / {mean_us[name, cell]:,.0f}" for cell in found)])
        for workers, lookahead in found:
            ratio = mean_us[name, (workers, lookahead)] / paper_us[name, (workers, lookahead)]
            verdicts.check(f"{name}, {workers} workers, R = {lookahead}: µs over the paper's", ratio, most=1.0)
    lines = _tables.table(["µs, paper / ours", *(f"{n} workers, R = {r}" for n, r in found)], rows)

    verdicts.check("cells of the paper's eighteen that are missing", len(CELLS) * 3 - len(mean_us), most=0)
    literal = [good for cell in found.values() for good in cell.literal]
    what = f"instances, of {len(literal)}, on which ZipLine finds what the literal Algorithm 2 finds"
    verdicts.check(what, sum(literal), least=max(len(literal), 1))
    for other in ("GridScan", "FullGridScan"):
        better, compared = _less(found, other, "ZipLine")
        verdicts.check(f"instances, of {compared}, on which {other} waits less than ZipLine", better, most=0)
    worse, compared = _less(found, "GridScan", "FullGridScan")
    verdicts.check(f"instances, of {compared}, on which GridScan waits less than FullGridScan", worse, most=0)
    thin = sum(min(map(len, cell.waits.values())) < LONG_TRIALS for cell in found.values())
    verdicts.check(f"cells with less than {LONG_TRIALS} instances that all three have searched", thin, most=0)

    few, many, wide = (10, 150), (1000, 150), (1000, 15)
    if {few, many, wide} <= set(found):
        growth: list[list[object]] = []
        steps = (("10 to 1,000 workers, R = 150", few, many), ("R = 15 to 150, 1,000 workers", wide, many))
        for what, small, large in steps:
            cells = [(paper_us[s, large] / paper_us[s, small], mean_us[s, large] / mean_us[s, small]) for s in SEARCHES]
            growth.append([what, *(f"{theirs:,.0f} / {ours:,.0f}" for theirs, ours in cells)])
        lines += ["", *_tables.table(["times as long, paper / ours", *SEARCHES], growth)]
        faster = (mean_us["FullGridScan", many] / mean_us["FullGridScan", few]) / (
            mean_us["ZipLine", many] / mean_us["ZipLine", few]
        )
        what = "from 10 to 1,000 workers FullGridScan's time grows more than ZipLine's, times (paper: 2.5)"
        verdicts.check(what, faster, least=2.0)
    return lines, verdicts


def _less(found: dict[tuple[int, int], Cell], one: str, other: str) -> tuple[int, int]:
    """Return on how many instances ``one`` waits less than ``other``, beyond rounding, and of how many."""
    pairs = [
        pair
        for cell in found.values()
        for pair in zip(cell.waits[one], cell.waits[other], strict=False)  # the long one has seen the first of them
    ]
    return sum(a < b - 1e-9 * abs(b) for a, b in pairs), len(pairs)


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trials", type=int, default=10, help="instances per cell (default 10, as in the paper)")

    options = _tables.options(__doc__ or "", extend)
    found = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("searching", total=len(SEARCHES) * len(CELLS))
        for workers, lookahead in CELLS:
            found[workers, lookahead] = measure(workers, lookahead, options.trials, lambda: progress.advance(task))
    lines, verdicts = judge(found)
    return _tables.finish("elastic_table2", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
