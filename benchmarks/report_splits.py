"""A report's figures for other splits, against those splits measured beside the run.

    python benchmarks/report_splits.py [--write] [--slow F] [--cycles N] [--rounds N]

Two ranks on this machine, the last one slowed down, train the demo's network in blocks: equal batches, LB-BSP, and a
split set by hand to the speeds of the LB-BSP block. From only the telemetry of each LB-BSP block, the report predicts
equal batches and the best split; from the telemetry of each block of equal batches it predicts LB-BSP, which is the
gain in its verdict. The table compares with whole rounds of the blocks beside it. Target: the median is within 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from _report import error_of_median, write_result

RANK = Path(__file__).with_name("_report_splits_rank.py")
MOST = 0.05
AGAINST = (("lb-bsp", "equal batches", "bsp"), ("lb-bsp", "best split", "hand-set"), ("bsp", "lb-bsp", "lb-bsp"))
"""The run whose report predicts, its prediction, and the run that this is compared with."""
WARM_UP = 5


def rate(path: Path) -> float:
    """Return samples per second of whole rounds, without the first ones."""
    from hvd_hetero.telemetry import read_run

    run = read_run(path)
    whole = (run.plan.sum(axis=1) == run.global_batch) & (np.arange(len(run.round)) >= WARM_UP)
    return float(run.samples[whole].sum() / run.elapsed_s[whole].sum())


def main() -> int:
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.testing import KEEP_MEMORY, launch
    from hvd_hetero.tools.report.alternatives import alternatives

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=2.0, help="how many times slower the last rank is (%(default)s)")
    parser.add_argument("--cycles", type=int, default=6, help="blocks of each split; 2 or more (%(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of a block (%(default)s)")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    if options.cycles < 2 or options.rounds < 20:
        parser.error("--cycles must be at least 2, and --rounds at least 20")
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        arguments = ["--slow", options.slow, "--cycles", options.cycles, "--rounds", options.rounds, "--out", out]
        result = launch(
            RANK, 2, arguments, timeout_s=1800, env=KEEP_MEMORY | {"PYTHONPATH": examples},
            on_line=lambda rank, line: print(line) if rank == 0 and line.startswith("cycle") else None,
        )  # fmt: skip
        told = {
            run: [alternatives(read_run(out / f"{run}-{cycle}.jsonl")) for cycle in range(options.cycles)]
            for run in ("bsp", "lb-bsp")
        }
        measured = {
            other: [rate(out / f"{other}-{cycle}.jsonl") for cycle in range(options.cycles)] for _, _, other in AGAINST
        }
    rows = [
        "| the report of | says of | beside it | told over measured | error | of each block |",
        "|---|---|---|---:|---:|---|",
    ]
    missed = []
    for run, name, other in AGAINST:
        ratios = [each.of(name).samples_per_s / true for each, true in zip(told[run], measured[other], strict=True)]
        middle, unsure = statistics.median(ratios), error_of_median(ratios, len(ratios))
        met = abs(middle - 1.0) <= MOST
        missed += [] if met else [f"{name} {middle:.3f}, within {MOST:.0%}"]
        of_each = ", ".join(f"{each:.3f}" for each in ratios)
        rows.append(
            f"| {run} | {name} | {other} | {middle:.3f}{'' if met else ' (**missed**)'} | {unsure:.3f} | {of_each} |"
        )
    certain = sum(each.of("equal batches").certain for each in told["lb-bsp"])
    of_equal = [each.of("lb-bsp") for each in told["bsp"]]
    widest = max(each.most / each.least for each in of_equal)
    gains = [a / b for a, b in zip(measured["lb-bsp"], measured["bsp"], strict=True)]
    slowness = "; ".join(result.reports[0]["slowness"])
    text = "\n".join(
        [
            f"Other splits: two ranks, one {options.slow:g} times slower, blocks of {options.rounds} rounds.",
            "", *rows, "",
            f"- LB-BSP over equal batches, as measured: {statistics.median(gains):.2f} times.",
            f"- The fixed cost of a micro-batch was told by {certain} of {options.cycles} blocks; else there is a "
            "range, and its likely figure counts here.",
            f"- Of equal batches, {sum(each.certain for each in of_equal)} of {options.cycles} blocks told it. In the "
            f"widest range of what LB-BSP would make, the most was {widest:.2f} times the least.",
            "", f"({slowness})", "", f"Missed: {'; '.join(missed) or 'nothing'}.",
        ]
    )  # fmt: skip
    print(text)
    if options.write:
        write_result("report_splits", text)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
