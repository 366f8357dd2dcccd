"""``hvd-hetero simulate``: what each scheme would gain, on a described cluster or a recorded run's machines.

It is not part of the package ``simulation``, because writing the help of all commands must not import that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_hetero.simulation.compare import Outcome
    from hvd_hetero.simulation.description import Description
    from hvd_hetero.simulation.replay import Replay
    from hvd_hetero.simulation.results import Simulated

__all__ = ["add_arguments", "run"]

_LEAST_WIDTH = 140
_COLUMNS = {
    "samples/s": ("samples_per_s", ".1f"),
    "times BSP": ("times_bsp", ".2f"),
    "of best split": ("of_best", ".3f"),
    "waiting": ("waiting_share", ".1%"),
    "transfer": ("transfer_share", ".1%"),
    "s per update": ("round_s", ".4g"),
}
_RANKS_SHOWN = 8
_REPLAYED = ("bsp", "lb-bsp", "self-adaptive", "non-blocking", "elastic-bsp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("cluster", nargs="?", type=Path, metavar="CLUSTER.toml", help="description of the cluster")
    parser.add_argument("--from", dest="run_file", type=Path, metavar="RUN.jsonl", help="telemetry of a recorded run")
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help="names separated by commas, or a list as in a description; replaces the described ones",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of the global batch; replaces the described number"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random draws; replaces the described one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw a picture (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.simulation.compare import compare_between

    if (args.cluster is None) == (args.run_file is None):
        raise ValueError(
            "give either a description of a cluster or --from RUN.jsonl, and not both; "
            "docs/simulation.md shows a description"
        )
    if args.plot is not None:
        from hvd_hetero.simulation.figure import check_picture

        check_picture(args.plot)
    described, recorded = _described(args)
    with _progress(args.quiet or args.json) as progress:
        found = compare_between(described, recorded.extremes if recorded else (), progress)
    outcomes = [outcome for outcome, _ in found]
    if args.json:
        _write_json(described, recorded, outcomes)
    else:
        _write_table(described, recorded, outcomes)
    if args.plot is not None:
        _plot(args.plot, found, described)
    return 0


def _described(args: argparse.Namespace) -> tuple[Description, Replay | None]:
    from hvd_hetero.simulation.description import ROUNDS, SEED, Description, check, read_description
    from hvd_hetero.simulation.limits import MOST_SAMPLES
    from hvd_hetero.simulation.replay import replay
    from hvd_hetero.simulation.schemes import choose, choose_all
    from hvd_hetero.simulation.strict import shown
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.telemetry.files import named

    machines: Replay | None = None
    if args.run_file is not None:
        recorded = read_run(args.run_file)
        try:
            machines = replay(recorded)
        except ValueError as error:
            raise ValueError(f"{named(args.run_file)}: {error}") from None
        schemes = tuple(choose(name, "--policies") for name in _REPLAYED)
        # If the recording holds no end of an epoch, assume ten epochs: some schemes re-allocate once an epoch.
        dataset = machines.dataset or max(machines.rounds * recorded.global_batch // 10, recorded.global_batch)
        dataset = min(dataset, MOST_SAMPLES)
        described = Description(machines.cluster, recorded.global_batch, machines.rounds, schemes, dataset=dataset)
    else:
        described = read_description(args.cluster)
    if args.policies is not None:
        described = replace(described, schemes=choose_all(args.policies, "--policies"))
    if args.rounds is not None:
        if not ROUNDS.least <= args.rounds <= ROUNDS.most:
            raise ValueError(f"--rounds must be at least 1 and at most {ROUNDS.most}, got {shown(args.rounds)}")
        described = replace(described, rounds=args.rounds)
    if args.seed is not None:
        if not SEED.least <= args.seed <= SEED.most:
            raise ValueError(f"--seed must be at least 0 and below 2**63, got {shown(args.seed)}")
        described = replace(described, cluster=replace(described.cluster, seed=args.seed))
    check(described, named((args.cluster or args.run_file).name))
    return described, machines


def _write_table(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    ranges = any(outcome.between for outcome in outcomes)
    least_width = _LEAST_WIDTH * (2 if ranges else 1)  # a cut-off figure is worse than a wrapped line
    console = Console(highlight=False, width=max(Console().width, least_width))
    workers = len(described.cluster.workers)
    console.print(f"{workers} workers, {described.global_batch} samples a round, {described.rounds} rounds.")
    if recorded is not None:
        # The policy's name comes from a file, so it is not markup.
        console.print(f"Recorded: {recorded.policy}, {recorded.measured_rate:.1f} samples/s.", markup=False)
        ranks = [f"{least * 1e3:.3g} … {most * 1e3:.3g}" for least, _, most in recorded.fixed_s[:_RANKS_SHOWN]]
        more = ", …" if len(recorded.fixed_s) > _RANKS_SHOWN else ""
        console.print(f"Fixed cost of a micro-batch in ms, rank by rank: {', '.join(ranks)}{more}.")
    table = Table()
    table.add_column("scheme", no_wrap=True)
    headings = [*_COLUMNS]
    with_loss = described.target_loss is not None
    trained = any(outcome.final_loss is not None for outcome in outcomes)
    headings += [f"s to loss {described.target_loss:g}"] if with_loss else []
    headings += ["last loss"] if trained else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for o in outcomes:
        cells = [o.shown(name, form) for name, form in _COLUMNS.values()]
        if with_loss:
            cells.append("never" if o.time_to_loss_s in (None, float("inf")) else f"{o.time_to_loss_s:.1f}")
        if trained:
            cells.append(f"{o.final_loss:.4f}")
        table.add_row(escape(o.scheme), *cells)
    console.print(table)
    if ranges:
        console.print(
            "This run does not tell what a micro-batch costs besides its samples. Ranges lie between the least and the "
            "most that it allows, on all ranks alike. For figures, record more epochs whose last round is short; the "
            "first five rounds do not count."
        )


def _write_json(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    document = {
        "workers": len(described.cluster.workers),
        "global_batch": described.global_batch,
        "rounds": described.rounds,
        "seed": described.cluster.seed,
        "recorded": recorded
        and {
            "policy": recorded.policy,
            "samples_per_s": recorded.measured_rate,
            "fixed_s": [[least, most] for least, _, most in recorded.fixed_s],
        },
        "schemes": [outcome.plain() for outcome in outcomes],
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def _plot(path: Path, found: Sequence[tuple[Outcome, Simulated]], described: Description) -> None:
    from hvd_hetero.simulation.figure import comparison_figure

    title = f"{len(described.cluster.workers)} workers, {described.global_batch} samples a round"
    comparison_figure(found, title).savefig(path, dpi=110)
    sys.stderr.write(f"picture: {path}\n")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda label, share: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    tasks = {}
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as shown:

        def advance(label: str, share: float) -> None:
            if label not in tasks:
                tasks[label] = shown.add_task(escape(label), total=1.0)
            shown.update(tasks[label], completed=min(share, 1.0))

        yield advance
