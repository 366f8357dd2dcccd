"""Whether a recorded run predicts another policy. Real ranks, each policy's rate from each one's telemetry.

    python benchmarks/papers/validation.py [--write] [--keep DIR] [--jobs NAME ...] [--epochs N]

Two and three ranks compute in two ways. They sleep m x + b for a micro-batch of x samples, m = 2 and 4 ms, or 2, 2 and
4 ms, and b = 0, 10 and 30 ms. Or they train the demo's network under processor quotas: a core and half of one, or 0.6,
0.6 and 0.3 of two cores. All else is real: PyTorch, Horovod, the loader, signals and transfers. The five policies of a
job train in turn, an epoch each, so that a slow minute of the machine hits all. Then ``hvd-hetero simulate --from``
predicts the rate of each policy from the telemetry of each. The 20 pairs for each job whose policies differ count, 160
in all. Both rates leave out the first tenth of the samples.

Target: at least nine in ten predictions within 10 % of the measured rate, and each of the others given as a range that
holds it; for the sleeps and for the quotas.

A last table has figures of the ranks under quotas: milliseconds of computing for a sample, by the clock, milliseconds
of a processor, how much of that by other threads than the one that trains, and for which share of the time the quota
held the rank back.

Needs a quiet machine with two cores and writable control groups; takes about 11 minutes. ``--keep`` keeps the
telemetry, and a job that a folder has already is not recorded again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import _tables
import numpy as np
from rich.progress import Progress

from hvd_hetero.telemetry import Run, read_run
from hvd_hetero.testing import KEEP_MEMORY, launch, quota_available
from hvd_hetero.tools.simulation.compare import Outcome, compare_between
from hvd_hetero.tools.simulation.description import recorded_description
from hvd_hetero.tools.simulation.policy_choices import choose

POLICIES = ("bsp", "lb-bsp", "self-adaptive", "non-blocking", "elastic-bsp")
WITHIN, SHARE, WARM_UP = 0.10, 0.9, 0.1
EPOCHS = {"sleeps": 6, "quotas": 7}


@dataclass(frozen=True)
class Job:
    """How the ranks compute. An epoch ends with a short round: 40 samples of 96, or 52 of 128."""

    kind: str
    each: tuple[float, ...]
    """Milliseconds of a sample, or shares of a core."""
    fixed_ms: int = 0

    @property
    def name(self) -> str:
        """Name of the job in the table."""
        more = f"b = {self.fixed_ms} ms" if self.kind == "sleeps" else ", ".join(f"{s:g}" for s in self.each)
        return f"{len(self.each)} ranks, {more}"

    def arguments(self) -> list[object]:
        """Arguments of its ranks."""
        if self.kind == "sleeps":
            sizes = ["--global-batch", 96, "--dataset", 808]
            return [*sizes, "--slopes-ms", *self.each, "--fixed-ms", self.fixed_ms]
        sizes = ["--global-batch", 128, "--dataset", 1204]
        return [*sizes, "--shares", *self.each, *(["--pin"] if len(self.each) == 2 else [])]


SLEEPS = {
    f"sleeps-{len(m)}-{b}": Job("sleeps", m, b)
    for m in ((2.0, 4.0), (2.0, 2.0, 4.0))
    for b in (0, 10, 30)
}  # fmt: skip
QUOTAS = {f"quotas-{len(q)}": Job("quotas", q) for q in ((1.0, 0.5), (0.6, 0.6, 0.3))}
JOBS = SLEEPS | QUOTAS


def record(job: Job, folder: Path, options: argparse.Namespace, progress: Progress) -> None:
    epochs = options.epochs or EPOCHS[job.kind]
    task = progress.add_task(job.name, total=epochs * len(POLICIES))

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{") and "turn" in json.loads(line):
            progress.advance(task)

    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--policies", *POLICIES, "--out", folder, "--epochs", epochs, *job.arguments()]
    worker = Path(__file__).with_name("_validation_rank.py")
    env = KEEP_MEMORY | ({"HOROVOD_CYCLE_TIME": f"{options.cycle_ms:g}"} if options.cycle_ms else {})
    launch(worker, len(job.each), arguments, timeout_s=options.timeout, env=env, on_line=on_line)


def ranks_of(job: Job, folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(len(job.each))]


def run_of(folder: Path, policy: str, rested: dict[str, float]) -> Run:
    """Return a policy's run, without the time in which others trained."""
    run = read_run(folder / f"{policy}.jsonl")
    rest_s = np.array([rested.get(str(number), 0.0) for number in run.round])
    return run.replace(elapsed_s=np.maximum(run.elapsed_s - rest_s, 0.0))


def measured(run: Run) -> float:
    """Return samples per second without the first tenth of the samples."""
    samples = run.samples.sum(axis=1)
    done = np.cumsum(samples)
    first = int(np.searchsorted(done, WARM_UP * done[-1]))
    return float(samples[first:].sum() / run.elapsed_s[first:].sum())


def told(run: Run) -> dict[str, Outcome]:
    """Return the command's prediction for each policy."""
    described, _ = recorded_description(run, [choose(policy, "policies") for policy in POLICIES])
    return {outcome.policy: outcome for outcome in compare_between(described)}


def judged(outcome: Outcome, real: float) -> tuple[str, str]:
    """Return the cells of the table, and what is counted."""
    off = outcome.samples_per_s / real - 1
    least, most = outcome.between.get("samples_per_s", (outcome.samples_per_s,) * 2)
    kind = "within" if abs(off) <= WITHIN else "in its range" if least <= real <= most else "missed"
    shown = f"{off:+.1%}"
    if "samples_per_s" in outcome.between:
        shown += f" ({least / real - 1:+.0%} … {most / real - 1:+.0%})"
    return f"**{shown}**" if kind == "missed" else shown, kind


def used(folder: Path, job: Job, runs: dict[str, Run]) -> list[list[str]]:
    """Return what each rank used, a line for each policy."""
    ranks, rows = ranks_of(job, folder), []
    for policy, run in runs.items():
        cells = []
        for rank, of in enumerate(ranks):
            figures, wall_s = of[policy], float(run.compute_s[:, rank].sum())
            each_ms = 1e3 / figures["samples"]
            others = figures["cpu_s"] - figures["main_s"]
            cells.append(
                f"{wall_s * each_ms:.2f}, {figures['cpu_s'] * each_ms:.2f}, {others / figures['cpu_s']:.0%}, "
                f"{figures['held_s'] / run.elapsed_s.sum():.0%}"
            )
        rows.append([job.name, policy, *cells, *[""] * (3 - len(cells))])
    return rows


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--epochs", type=int, help=f"epochs of each training (default {EPOCHS})")
        parser.add_argument("--jobs", choices=JOBS, nargs="+", default=[*JOBS])
        parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each job (default 300)")
        parser.add_argument("--keep", type=Path, help="folder to keep the telemetry in")
        parser.add_argument("--cycle-ms", type=float, help="Horovod's cycle, in which idle ranks ask for news")

    options = _tables.options(__doc__ or "", extend)
    if any(name in QUOTAS for name in options.jobs) and not quota_available():
        print(f"quotas cannot be set here: {quota_available().why}; use --jobs with sleeps alone", file=sys.stderr)
        return 1
    rows, uses, counts = [], [], {"sleeps": Counter[str](), "quotas": Counter[str]()}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.jobs:
            job, folder = JOBS[name], (options.keep or Path(temporary)) / name
            with Progress(transient=True) as progress:
                if not (folder / "rank.0.json").exists():
                    record(job, folder, options, progress)
            rested = {policy: of["rested"] for policy, of in ranks_of(job, folder)[0].items()}
            runs = {policy: run_of(folder, policy, rested[policy]) for policy in POLICIES}
            rates = {policy: measured(run) for policy, run in runs.items()}
            rows.append([job.name, "measured, samples/s", *(f"{rates[p]:.0f}" for p in POLICIES)])
            for source, run in runs.items():
                try:
                    outcomes = told(run)
                    cells = [judged(outcomes[policy], rates[policy]) for policy in POLICIES]
                except ValueError as refused:  # too short a run, as the command says
                    print(f"{job.name}, from {source}: {refused}", file=sys.stderr)
                    cells = [("refused", "missed")] * len(POLICIES)
                others = zip(POLICIES, cells, strict=True)
                counts[job.kind].update(kind for policy, (_, kind) in others if policy != source)
                rows.append([job.name, f"from {source}", *(cell for cell, _ in cells)])
            uses += used(folder, job, runs) if job.kind == "quotas" else []
    verdicts = _tables.Verdicts()
    lines = _tables.table(["job", "", *POLICIES], rows)
    for kind, count in counts.items():
        if count:
            lines += ["", f"{kind}, {count.total()} predictions of other policies: {count['within']} within 10 %, "]
            lines[-1] += f"{count['in its range']} others with a range that holds the truth, "
            lines[-1] += f"{count['missed']} without (bold). In brackets the range."
            verdicts.check(f"{kind}: share of predictions within 10 %", count["within"] / count.total(), least=SHARE)
            verdicts.check(f"{kind}: others whose range does not hold what was measured", count["missed"], most=0)
    if uses:
        lines += ["", "What a rank used: milliseconds for a sample, processor time, by other threads, held back", ""]
        lines += _tables.table(["job", "policy", "rank 0", "rank 1", "rank 2"], uses)
    return _tables.finish("validation", lines, verdicts, options.write)


if __name__ == "__main__":
    sys.exit(main())
