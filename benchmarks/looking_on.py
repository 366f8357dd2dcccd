"""The cost of looking on: telemetry and the live view, as a share of a step of 50 ms, and a line of 1,000 ranks.

    python benchmarks/looking_on.py [--write] [--pairs N] [--steps N]

Two real ranks train a small linear model under LB-BSP, without and with looking on, in alternating blocks of one job.
Computing is a sleep of 50 ms, since the machine's noise in real work is larger than the effect. A block counts
with its median step. Steps in which the live view writes are not in that; so the time that the training
thread spends in what looks on is measured as well, with all steps, as a share of the block. Then the time of one
round's record, of 2 and of 1,000 ranks, without a training around it.

Takes about four minutes, and needs a quiet machine.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
from _report import error_of_median, judged, write_result

from hvd_hetero.columns import COLUMNS
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable
from hvd_hetero.telemetry import Recorder, TelemetryWriter
from hvd_hetero.telemetry.live import LiveView
from hvd_hetero.testing import launch

RANK = Path(__file__).with_name("_looking_on_rank.py")
TARGET, SMALL, LINE_MS = 1.005, 0.001, 2.0
ROUNDS = 500
KINDS = {"telemetry": "telemetry", "both": "telemetry and live view"}


def rounds(workers: int) -> list[FinishedRound]:
    """Return rounds of so many ranks with figures of seven digits, as if measured, and all that LB-BSP publishes."""
    rng, made = np.random.default_rng(0), []
    seconds = ("compute_s", "input_s", "wait_s", "once_s", "fixed_samples", "cpu", "memory")
    for number in range(8):
        columns = {name: np.zeros(workers) for name in COLUMNS}
        columns |= {name: rng.uniform(0.01, 1.0, workers) for name in seconds}
        columns |= {"samples_per_s": rng.uniform(100, 2000, workers), "samples": rng.integers(10, 100, workers)}
        plan = RoundPlan.of(columns["samples"].astype(int))
        table = RoundTable(np.stack(list(columns.values()), axis=1).ravel(), workers)
        made.append(FinishedRound(number, 0, plan, table, 0.05))
    return made


def timed_ms(look_on: Callable[[FinishedRound], object], made: list[FinishedRound]) -> list[float]:
    took = []
    for number in range(ROUNDS + 20):
        finished = made[number % len(made)]
        begin = time.perf_counter()
        look_on(finished)
        took.append(1e3 * (time.perf_counter() - begin))
    return took[20:]


def one_round(folder: Path) -> tuple[list[str], bool]:
    """Return the table of one round's cost, and whether a line of 1,000 ranks is written in time."""
    lines = [
        "| milliseconds for one round | 2 ranks: median | 99 of 100 below | 1,000 ranks: median | 99 of 100 below |",
        "|---|---:|---:|---:|---:|",
    ]
    cells: dict[str, list[float]] = {}
    for workers in (2, 1000):
        made = rounds(workers)
        writer = TelemetryWriter(folder / f"{workers}.jsonl", policy="lb-bsp", workers=workers, global_batch=10**6)
        listeners = {
            "on_round, an empty function": lambda record: None,
            "live view, between two lines": LiveView(io.StringIO()),
            "live view, a line": LiveView(io.StringIO(), count(step=10).__next__),
        }
        ways: dict[str, Recorder] = {"a line of telemetry": writer}
        for name, listener in listeners.items():
            ways[name] = Recorder()
            ways[name].add(listener)
        for name, look_on in ways.items():
            took = timed_ms(look_on, made)
            cells.setdefault(name, []).extend([statistics.median(took), float(np.percentile(took, 99))])
            look_on.close()
    lines += [f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |" for name, values in cells.items()]
    return lines, cells["a line of telemetry"][2] < LINE_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks (default 60)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (default 20)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = launch(RANK, 2, [folder, options.pairs, options.steps], timeout_s=900).reports[0]
        once, in_time = one_round(Path(folder))
    lines = [
        "| looking on | step, times that without (median) | error | quartiles | share of the step spent in it | error "
        "| at most 0.5 % |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    met = in_time
    for kind, shown in KINDS.items():
        ratios, shares = found[kind]
        median, error = statistics.median(ratios), error_of_median(ratios, len(ratios))
        low, _, high = statistics.quantiles(ratios, n=4)
        share, share_error = statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(len(shares))
        verdict = judged([(median, error), (1.0 + share, share_error)], TARGET, SMALL)
        met = met and verdict == "met"
        lines.append(
            f"| {shown} | {median:.4f} | {error:.4f} | {low:.4f} to {high:.4f} | {share:.2%} | {share_error:.2%} | "
            f"{verdict} |"
        )
    step_ms = 1e3 * statistics.median(found["seconds"])
    lines += [
        "",
        f"{options.pairs} pairs of blocks of {options.steps} steps on two ranks; a step without looking on takes "
        f"{step_ms:.1f} ms. Undecided is a figure whose error is above {SMALL:g} and which is less than two errors "
        f"from {TARGET:g}.",
        "",
        *once,
        "",
        f"{ROUNDS} rounds. Target: a line of 1,000 ranks in below {LINE_MS:g} ms, in the median: "
        f"{'met' if in_time else '**missed**'}.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_result("looking_on", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
