"""``hvd-hetero simulate``: what each scheme would gain, on a described cluster or a recorded run's machines.

It is not part of the package ``simulation``, because writing the help of all commands must not import that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_hetero.tools.simulation.description import Description
    from hvd_hetero.tools.simulation.replay import Replay

_REPLAYED = ("bsp", "lb-bsp", "self-adaptive", "non-blocking", "lb-non-blocking", "elastic-bsp")


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
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a round; replaces the present number")
    parser.add_argument("--drop", metavar="WORKERS", help='without these workers, counted from 0: "2" or "0,3"')
    parser.add_argument(
        "--add", action="append", default=[], metavar="WORKER", help='one more: "0", like worker 0, or "slope_ms = 2.5"'
    )
    parser.add_argument(
        "--replace", action="append", default=[], metavar="WORKER:OTHER", help='"2: 0" or "2: samples_per_s = 400"'
    )
    parser.add_argument("--network", metavar="SETTINGS", help='another: "bandwidth_mbps = 1000, message_mb = 50"')
    parser.add_argument(
        "--worth", action="store_true", help="what each worker is worth: with and without it, by lb-bsp"
    )
    parser.add_argument("--prices", metavar="WORKER=PRICE,…", help='with --worth: per hour, "0=2.40,1=0.80"')
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random draws; replaces the described one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw a picture (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.tools.cli.comparison import draw, write_json, write_table
    from hvd_hetero.tools.simulation.compare import compare_between

    if (args.cluster is None) == (args.run_file is None):
        raise ValueError(
            "give either a description of a cluster or --from RUN.jsonl, and not both; "
            "docs/simulation.md shows a description"
        )
    _check_question(args)
    if args.plot is not None:
        from hvd_hetero.tools.simulation.figure import check_picture

        check_picture(args.plot)
    described, recorded = _described(args)
    if args.worth:
        return _tell_worth(args, described, recorded)
    with _progress(args.quiet or args.json) as progress:
        found = compare_between(described, progress)
    outcomes = [outcome for outcome, _ in found]
    if args.json:
        write_json(described, recorded, outcomes)
    else:
        write_table(described, recorded, outcomes)
    if args.plot is not None:
        draw(args.plot, found, described)
    return 0


def _check_question(args: argparse.Namespace) -> None:
    """Raise if ``--worth`` is asked together with another question, or ``--prices`` without it."""
    if args.prices is not None and not args.worth:
        raise ValueError("--prices goes with --worth; add --worth, or leave --prices out")
    asked = {f"--{name}": getattr(args, name) for name in ("drop", "add", "replace", "network", "policies", "plot")}
    if args.worth and (others := [option for option, value in asked.items() if value]):
        raise ValueError(
            f"--worth asks about the workers as they are, under lb-bsp, and goes without {others[0]}; ask one question "
            "a call"
        )
    unused = {"--rounds": args.rounds, "--seed": args.seed} if args.worth and args.run_file is not None else {}
    if given := [option for option, value in unused.items() if value is not None]:
        raise ValueError(f"--worth --from goes by the recorded rounds, and makes no use of {given[0]}; leave it out")


def _tell_worth(args: argparse.Namespace, described: Description, recorded: Replay | None) -> int:
    from hvd_hetero.tools.cli.comparison import write_worth, write_worth_json
    from hvd_hetero.tools.simulation.worth import prices_of, worth_of_cluster, worth_of_run

    prices = () if args.prices is None else prices_of(args.prices, len(described.cluster.workers))
    if recorded is not None:
        worth = worth_of_run(recorded, args.global_batch)
    else:
        with _progress(args.quiet or args.json) as progress:
            worth = worth_of_cluster(described, progress)
    (write_worth_json if args.json else write_worth)(described, worth, prices)
    return 0


def _described(args: argparse.Namespace) -> tuple[Description, Replay | None]:
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.telemetry.files import named
    from hvd_hetero.tools.simulation.description import ROUNDS, SEED, check, read_description, recorded_description
    from hvd_hetero.tools.simulation.schemes import choose, choose_all
    from hvd_hetero.tools.simulation.settings import checked
    from hvd_hetero.tools.simulation.what_if import Changes

    machines: Replay | None = None
    if args.run_file is not None:
        recorded = read_run(args.run_file)
        if recorded.left_out:
            sys.stderr.write(
                f"{named(args.run_file)}: {recorded.left_out}. What a micro-batch costs besides its samples, and what "
                "a rank read of its CPU before a round, are not known from it. The samples of an epoch are estimated.\n"
            )
        try:
            described, machines = recorded_description(
                recorded, tuple(choose(name, "--policies") for name in _REPLAYED)
            )
        except ValueError as error:
            raise ValueError(f"{named(args.run_file)}: {error}") from None
    else:
        described = read_description(args.cluster)
    if args.policies is not None:
        described = replace(described, schemes=choose_all(args.policies, "--policies"))
    if args.rounds is not None:
        described = replace(described, rounds=checked("--rounds", args.rounds, ROUNDS))
    if args.seed is not None:
        described = replace(described, cluster=replace(described.cluster, seed=checked("--seed", args.seed, SEED)))
    if args.global_batch is not None:
        described = replace(described, global_batch=args.global_batch, totals=())
    changes = Changes(args.drop, args.add, args.replace, args.network)
    between = tuple(changes.of(cluster) for cluster in described.between)
    described = replace(described, cluster=changes.of(described.cluster), between=between)
    check(described, named((args.cluster or args.run_file).name))
    return described, machines


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
