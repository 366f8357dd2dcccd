"""Ranks that wait for the longest texts: samples divided by number, by what they cost, and by rules of other programs.

    python benchmarks/costs.py [--write] [--only PART ...] [--cycles CYCLES] [--rounds ROUNDS]

Lengths are log-normal (σ = 1, median 24, at most 512). In *padded* batches each text is as long as the longest of its
micro-batch; in *packed* ones texts lie behind one another, and each sees itself alone. The share that a rank waits is

    1 - mean of the ranks' seconds of work / the longest of them,        in each round.

*real*: two ranks, equal and 1 : 1/2 (by processor quota), a core each, train a small transformer beside DDP over Gloo,
64 texts a round, in turns of four rounds of one job. All ways to divide take the same samples in the same rounds. The
time of a round is over that of the division by number, which LB-BSP makes by speeds alone, in turns of the same cycle.

*simulated*: 8 and 64 ranks whose speeds fall from 1 to 1/2, 32 texts a rank and round. Balancer, planner, policy and
cutter are the program's own, one of each for each rank, with a made-up clock: a micro-batch takes, at speed 1,

    a Σ L + Σ L²  (packed),        a b M + b M²  (padded: b texts, the longest of M),

with a = 6 times the width, as floating-point operations would have it, and noise of 2 % each round. *known costs and
speeds* is the program's division where nothing has to be learnt. *noise alone* is what ranks would wait if the division
were perfect.

*own*: what the calls for costs and weights take in steps of about 50 ms of two equal real ranks, padded batches: of a
rank's processor, and by the clock, which runs on while a rank waits for the sum of the weights.

*late*: costs that are known before training, beside costs that a function of what the dataset returns tells
(``late_costs.md``). Two real ranks at 1 : 1/2 sleep beside DDP for as long as their texts would take by the formulas
above, in turns of one job; simulated ranks take eight other draws of lengths. The share is that of all rounds together.

The other rules are for equal ranks, and are the benchmark's own code (``_cost_rules.py``).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _cost_rules import waiting
from _costs_simulated import NOISE, known_and_late, noise_alone, simulated
from _report import error_of_median, write_result
from rich.progress import Progress

RANK, OWN_RANK, LATE_RANK = (
    Path(__file__).with_name(f"_{name}_rank.py") for name in ("costs", "costs_own", "late_costs")
)
SPEEDS = {"1 : 1": (1.0, 1.0), "1 : 1/2": (1.0, 2.0)}  # by how much each rank is slower
BATCHES = ("padded", "packed")
TARGET, OWN_TARGET = 0.05, 0.01
HEAD = [
    "| ranks | texts | divided by | waiting, median | mean | a round over by number | error | below 5 % |",
    "|---|---|---|---:|---:|---:|---:|---|",
]
OWN_HEAD = ["| call | processor, a round | clock, a round | processor, of a step |", "|---|---:|---:|---:|"]
LATE_HEAD = [
    "| texts | by number | costs known | late | late - known, points | error | below 5 % | within 2 points |",
    "|---|---:|---:|---:|---:|---:|---|---|",
]
LATE_TARGET = 0.02
SEEDS = 8
Table = tuple[list[str], bool]
"""Lines, and whether targets are met."""


def row_of(ranks: str, texts: str, name: str, busy_s: Any, ratio: str) -> tuple[str, bool]:
    """Return a row of the table, and whether it meets the target, which only ``cost_of`` has."""
    waits, said = waiting(busy_s), ""
    met = name != "cost_of" or float(np.median(waits)) < TARGET
    if name == "cost_of":
        said = "met" if met else "**missed**"
    return f"| {ranks} | {texts} | {name} | {np.median(waits):.1%} | {waits.mean():.1%} | {ratio} | {said} |", met


def real_rows(speeds: str, texts: str, reports: list[dict[str, Any]]) -> Table:
    """Return the rows of one job."""
    rows, met, seconds = [], True, reports[0]["seconds"]
    for name in seconds:
        over = [a / b for a, b in zip(seconds[name], seconds["number"], strict=True)]
        ratio = f"{statistics.median(over):.3f} | {error_of_median(over, len(over)):.3f}"
        busy_s = np.transpose([each["busy_s"][name] for each in reports])
        row, good = row_of(f"2 real, {speeds}", texts, name, busy_s, ratio)
        rows.append(row)
        met &= good
    return rows, met


def real(options: argparse.Namespace, progress: Progress) -> Table:
    """Measure all jobs of real ranks."""
    rows, notes, met = [*HEAD], [""], True
    for speeds, factors in SPEEDS.items():
        for texts in BATCHES:
            task = progress.add_task(f"2 real, {speeds}, {texts}", total=options.cycles)
            arguments = ["--batches", texts, "--factors", *factors, "--cycles", options.cycles]
            reports = launched(RANK, arguments, task, progress)
            found, good = real_rows(speeds, texts, reports)
            rows += found
            met &= good
            learnt = ", ".join(f"{each:.3g}" for each in reports[0]["learnt"])
            notes.append(
                f"- {speeds}, {texts}: {reports[1]['slowness']}; a text costs, by number, L, L², padding: {learnt}"
            )
    return rows + notes, met


def simulations(options: argparse.Namespace, progress: Progress) -> Table:
    """Simulate all clusters."""
    rows, met = [*HEAD], True
    for ranks in (8, 64):
        for texts in BATCHES:
            task = progress.add_task(f"{ranks} simulated, {texts}", total=1)
            busy_s = simulated(ranks, options.rounds, padded=texts == "padded")
            by_number = np.max(busy_s["number"], axis=1).sum()
            for name, each in busy_s.items():
                ratio = f"{np.max(each, axis=1).sum() / by_number:.3f} | "
                row, good = row_of(f"{ranks} simulated", texts, name, each, ratio)
                rows.append(row)
                met &= good
            progress.advance(task)
        noise = noise_alone(ranks, options.rounds)
        rows.append(row_of(f"{ranks} simulated", "", f"noise of {NOISE:.0%} alone", noise, " | ")[0])
    return rows, met


def own(options: argparse.Namespace, progress: Progress) -> Table:
    """Measure what costs and weights take themselves."""
    reports = launched(OWN_RANK, ["--rounds", options.rounds], progress.add_task("own", total=2), progress)
    return own_rows(reports)


def own_rows(reports: list[dict[str, Any]]) -> Table:
    """Return the table of what was spent, of each call by the rank that takes longer."""
    step_s, rows, whole_s = reports[0]["step_s"], [*OWN_HEAD], 0.0
    for name in reports[0]["spent"]:
        cpu_s, wall_s = (max(figure) for figure in zip(*(each["spent"][name] for each in reports), strict=True))
        whole_s += cpu_s
        rows.append(f"| {name} | {1e3 * cpu_s:.3f} ms | {1e3 * wall_s:.3f} ms | {cpu_s / step_s:.2%} |")
    met = whole_s < OWN_TARGET * step_s
    rows.append(f"| together | {1e3 * whole_s:.3f} ms | | {whole_s / step_s:.2%} |")
    said = f"Below {OWN_TARGET:.0%} of a step: {'met' if met else '**missed**'}."
    return [*rows, "", f"Steps of {1e3 * step_s:.0f} ms, {reports[0]['texts']} texts on two equal ranks. {said}"], met


def share_waited(busy_s: Any) -> float:
    """Return the share of all rounds' time that ranks wait."""
    busy = np.asarray(busy_s, dtype=np.float64)
    return float(1.0 - busy.mean(axis=1).sum() / busy.max(axis=1).sum())


def late_row(texts: str, by_number: str, blocks: dict[str, list[Any]]) -> tuple[str, bool]:
    """Return a row of the table of late costs, from blocks of rounds, and whether it meets the targets."""
    known, late = ([share_waited(block) for block in blocks[name]] for name in ("known", "late"))
    waits = [share_waited(np.concatenate(blocks[name])) for name in ("known", "late")]
    error = 100 * error_of_median([b - a for a, b in zip(known, late, strict=True)], len(known))
    apart = waits[1] - waits[0]
    met = max(waits) < TARGET, abs(apart) < LATE_TARGET
    said = " | ".join("met" if each else "**missed**" for each in met)
    row = f"| {texts} | {by_number} | {waits[0]:.1%} | {waits[1]:.1%} | {100 * apart:+.2f} | {error:.2f} | {said} |"
    return row, all(met)


def late(options: argparse.Namespace, progress: Progress) -> Table:
    """Compare late costs with known ones."""
    rows, met = [*LATE_HEAD], True
    for texts in BATCHES:
        task = progress.add_task(f"2 real, late, {texts}", total=options.cycles)
        arguments = ["--batches", texts, "--factors", *SPEEDS["1 : 1/2"], "--cycles", options.cycles]
        reports = launched(LATE_RANK, arguments, task, progress)
        busy_s = {name: np.transpose([each["busy_s"][name] for each in reports]) for name in reports[0]["busy_s"]}
        blocks = {name: np.split(each, options.cycles) for name, each in busy_s.items()}
        row, good = late_row(f"{texts}, 2 real", f"{share_waited(busy_s['number']):.1%}", blocks)
        rows.append(row)
        met &= good
    for texts in BATCHES:
        task = progress.add_task(f"2 simulated, late, {texts}", total=SEEDS)
        found = []
        for seed in range(SEEDS):
            found.append(known_and_late(options.rounds, seed, padded=texts == "padded"))
            progress.advance(task)
        row, good = late_row(f"{texts}, 2 simulated", "", {name: [each[name] for each in found] for name in found[0]})
        rows.append(row)
        met &= good
    return rows, met


def launched(script: Path, arguments: list[Any], task: Any, progress: Progress) -> list[dict[str, Any]]:
    """Run two ranks, and return what each reports."""
    from hvd_hetero.testing import KEEP_MEMORY, launch, torchrun

    done = launch(
        script, 2, arguments, timeout_s=1800, env=KEEP_MEMORY, starter=torchrun(2),
        on_line=lambda rank, line: progress.advance(task),
    )  # fmt: skip
    return list(done.reports)


PARTS: dict[str, Callable[[argparse.Namespace, Progress], Table]] = {
    "real": real, "simulated": simulations, "own": own, "late": late,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS][:3], help="some of the parts")
    parser.add_argument("--cycles", type=int, default=12, help="turns of each way to divide; 2 or more")
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count, simulated or for *own*")
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    options = parser.parse_args()
    if options.cycles < 2:
        parser.error("--cycles must be at least 2: fewer turns have no quartiles")
    lines, met = ["Texts of log-normal lengths: how long ranks wait for each other."], True
    with Progress() as progress:
        for part in [part for part in PARTS if part in options.only]:
            found, good = PARTS[part](options, progress)
            progress.console.print("\n".join(found), markup=False, soft_wrap=True)
            lines += ["", *found]
            met &= good
    if options.write:
        write_result("late_costs" if options.only == ["late"] else "costs", "\n".join(lines))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
