"""Does a recorded run tell what another policy would do? Real ranks that sleep, each policy from each one's telemetry.

    python benchmarks/papers/what_if.py [--write] [--keep DIR] [--ranks N]

Two and three ranks compute by sleeping m x + b for a micro-batch of x samples: m = 2 and 4 ms, or 2, 2 and 4 ms, and
b = 0, 10 and 30 ms. All else is real: PyTorch, Horovod, the loader, signals and transfers. Each policy runs once. Then
``hvd-hetero simulate --from`` predicts the rate of each policy from the telemetry of each: 25 pairs for each
cluster, 150 in all. Both rates leave out the first tenth of the samples.

Target: at least nine in ten predictions within 10 % of the measured rate, and each of the others told as a range that
holds it.

Takes about 15 minutes. ``--keep`` keeps the telemetry, and what a folder has already is not recorded again; so
``--ranks 2`` and ``--ranks 3`` may record at different times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import _tables
import numpy as np
from rich.progress import Progress

from hvd_hetero.simulation.compare import Outcome, compare_between
from hvd_hetero.simulation.description import Description
from hvd_hetero.simulation.replay import replay
from hvd_hetero.simulation.schemes import choose
from hvd_hetero.telemetry import Run, read_run
from hvd_hetero.testing import KEEP_MEMORY, launch

POLICIES = ("bsp", "lb-bsp", "self-adaptive", "non-blocking", "elastic-bsp")
SLOPES_MS = {2: (2.0, 4.0), 3: (2.0, 2.0, 4.0)}
FIXED_MS = (0, 10, 30)
WITHIN, SHARE, WARM_UP = 0.10, 0.9, 0.1
GLOBAL_BATCH, DATASET = 96, 808  # an epoch ends with 40 samples of 96


def file_of(folder: Path, policy: str, fixed_ms: float) -> Path:
    return folder / f"{policy}.{fixed_ms:g}.jsonl"


def record(ranks: int, options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    wanted = [fixed for fixed in FIXED_MS if not all(file_of(folder, p, fixed).exists() for p in POLICIES)]
    task = progress.add_task(f"{ranks} ranks", total=len(wanted) * len(POLICIES))

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{") and "done" in json.loads(line):
            progress.advance(task)

    arguments = ["--policies", *POLICIES, "--slopes-ms", *SLOPES_MS[ranks], "--fixed-ms", *wanted, "--out", folder]
    arguments += ["--global-batch", GLOBAL_BATCH, "--dataset", DATASET, "--epochs", options.epochs]
    worker = Path(__file__).with_name("_what_if_rank.py")
    if wanted:
        launch(worker, ranks, arguments, timeout_s=options.timeout, env=KEEP_MEMORY, on_line=on_line)


def measured(run: Run) -> float:
    """Samples per second without the first tenth of the samples."""
    samples = run.samples.sum(axis=1)
    done = np.cumsum(samples)
    first = int(np.searchsorted(done, WARM_UP * done[-1]))
    return float(samples[first:].sum() / run.elapsed_s[first:].sum())


def told(run: Run) -> dict[str, Outcome]:
    """What the command tells of each policy."""
    machines = replay(run)
    schemes = tuple(choose(policy, "policies") for policy in POLICIES)
    described = Description(
        machines.cluster, run.global_batch, machines.full_rounds, schemes, dataset=machines.dataset,
        between=machines.extremes,
    )  # fmt: skip
    return {outcome.scheme: outcome for outcome, _ in compare_between(described)}


def judged(outcome: Outcome, real: float) -> tuple[str, str]:
    """Return the cell of the table, and what is counted."""
    off = outcome.samples_per_s / real - 1
    least, most = outcome.between.get("samples_per_s", (outcome.samples_per_s,) * 2)
    kind = "within" if abs(off) <= WITHIN else "in its range" if least <= real <= most else "missed"
    shown = f"{off:+.1%}"
    if "samples_per_s" in outcome.between:
        shown += f" ({least / real - 1:+.0%} … {most / real - 1:+.0%})"
    return f"**{shown}**" if kind == "missed" else shown, kind


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--epochs", type=int, default=15, help="epochs of each training (default 15)")
        parser.add_argument("--ranks", type=int, choices=SLOPES_MS, nargs="+", default=[*SLOPES_MS])
        parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each job (default 600)")
        parser.add_argument("--keep", type=Path, help="folder to keep the telemetry in")

    options = _tables.options(__doc__ or "", extend)
    rows, counts, verdicts = [], Counter[str](), _tables.Verdicts()
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in options.ranks:
            folder = (options.keep or Path(temporary)) / f"{ranks}-ranks"
            folder.mkdir(parents=True, exist_ok=True)
            with Progress(transient=True) as progress:
                record(ranks, options, folder, progress)
            for fixed_ms in FIXED_MS:
                runs = {policy: read_run(file_of(folder, policy, fixed_ms)) for policy in POLICIES}
                rates = {policy: measured(run) for policy, run in runs.items()}
                name = f"{ranks} ranks, b = {fixed_ms} ms"
                rows.append([name, "measured, samples/s", *(f"{rates[p]:.0f}" for p in POLICIES)])
                for source, run in runs.items():
                    outcomes = told(run)
                    cells = [judged(outcomes[policy], rates[policy]) for policy in POLICIES]
                    counts.update(kind for _, kind in cells)
                    rows.append([name, f"from {source}", *(cell for cell, _ in cells)])
    verdicts.check("share of predictions within 10 %", counts["within"] / counts.total(), least=SHARE)
    verdicts.check("others whose range does not hold what was measured", counts["missed"], most=0)
    lines = _tables.table(["job", "", *POLICIES], rows)
    lines += ["", f"{counts.total()} predictions: {counts['within']} within 10 %, {counts['in its range']} others "]
    lines[-1] += f"with a range that holds the truth, {counts['missed']} without (bold). In brackets the range."
    return _tables.finish("what_if", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
