"""``hvd-hetero simulate``: what each policy would gain, on a described cluster or a recorded run's machines.

It is not part of the package ``simulation``, because writing the help of all commands must not import that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_hetero.tools.cli.output import printer, status

if TYPE_CHECKING:
    from hvd_hetero.tools.simulation.compare import Outcome
    from hvd_hetero.tools.simulation.description import Description
    from hvd_hetero.tools.simulation.policy_choices import PolicyChoice
    from hvd_hetero.tools.simulation.recorded_machines import Replay

# All columns of figures; a cut-off figure is worse than a wrapped line.
_TABLE_WIDTH = 140
_COLUMNS = {
    "samples/s": ("samples_per_s", ".1f"),
    "times BSP": ("times_bsp", ".2f"),
    "of best split": ("of_best", ".3f"),
    "waiting": ("waiting_share", ".1%"),
    "transfer": ("transfer_share", ".1%"),
    "s per update": ("round_s", ".4g"),
}
_RANKS_SHOWN = 8
_OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "--policies": (
        "NAMES",
        "names separated by commas, or a list as in a description; replaces the described ones",
        {},
    ),
    "--rounds": ("N", "rounds of the global batch; replaces the described number", {"type": int}),
    "--global-batch": ("N", "samples of a round; replaces the present number", {"type": int}),
    "--drop": ("WORKERS", 'without these workers, counted from 0: "2" or "0,3"', {}),
    "--add": ("WORKER", 'one more: "0", like worker 0, or "slope_ms = 2.5"', {"action": "append", "default": []}),
    "--replace": ("WORKER:OTHER", '"2: 0" or "2: samples_per_s = 400"', {"action": "append", "default": []}),
    "--network": ("SETTINGS", 'another: "bandwidth_mbps = 1000, message_mb = 50"', {}),
    "--prices": ("WORKER=PRICE,…", 'with --worth: per hour, "0=2.40,1=0.80"', {}),
    "--seed": ("N", "seed of all random draws; replaces the described one", {"type": int}),
}
_FLAGS = {
    "--worth": "what each worker is worth: with and without it, by lb-bsp",
    "--json": "print JSON instead of a table",
    "--quiet": "show no progress",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("cluster", nargs="?", type=Path, metavar="CLUSTER.toml", help="description of the cluster")
    parser.add_argument("--from", dest="run_file", type=Path, metavar="RUN.jsonl", help="telemetry of a recorded run")
    for name, (metavar, text, how) in _OPTIONS.items():
        parser.add_argument(name, metavar=metavar, help=text, **how)
    for name, text in _FLAGS.items():
        parser.add_argument(name, action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from hvd_hetero.tools.simulation.compare import compare_between

    if (args.cluster is None) == (args.run_file is None):
        raise ValueError(
            "simulate needs either a description of a cluster or --from RUN.jsonl, and not both; docs/simulation.md "
            "shows a description"
        )
    _check_question(args)
    described, recorded = _described(args)
    if args.worth:
        return _write_worth(args, described, recorded)
    with _progress(args.quiet or args.json) as progress:
        outcomes = compare_between(described, progress)
    (_write_json if args.json else _write_table)(described, recorded, outcomes)
    return 0


def _check_question(args: argparse.Namespace) -> None:
    """Raise if ``--worth`` is asked together with another question, or ``--prices`` without it."""
    if args.prices is not None and not args.worth:
        raise ValueError("--prices needs --worth; add --worth, or leave --prices out")
    asked = {f"--{name}": getattr(args, name) for name in ("drop", "add", "replace", "network", "policies")}
    if args.worth and (others := [option for option, value in asked.items() if value]):
        raise ValueError(
            f"--worth looks at the described workers under lb-bsp, and cannot go with {others[0]}; run the command "
            "once for each"
        )
    unused = {"--rounds": args.rounds, "--seed": args.seed} if args.worth and args.run_file is not None else {}
    if given := [option for option, value in unused.items() if value is not None]:
        raise ValueError(f"--worth --from uses the recorded rounds, so {given[0]} has no effect; leave it out")


def _write_worth(args: argparse.Namespace, described: Description, recorded: Replay | None) -> int:
    from hvd_hetero.tools.cli.terminal import write_worth
    from hvd_hetero.tools.simulation.worth import prices_of, worth_of_cluster, worth_of_run

    prices = () if args.prices is None else prices_of(args.prices, len(described.cluster.workers))
    if recorded is not None:
        worth = worth_of_run(recorded, args.global_batch)
    else:
        with _progress(args.quiet or args.json) as progress:
            worth = worth_of_cluster(described, progress)
    if args.json:
        document = {"global_batch": described.global_batch, **asdict(worth), "prices": list(prices)}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        console = printer()
        console.print(f"{worth.workers} workers, {described.global_batch} samples a round, under lb-bsp.")
        write_worth(console, worth, prices)
    return 0


def _described(args: argparse.Namespace) -> tuple[Description, Replay | None]:
    from hvd_hetero.policies.policy_names import NAMES_WITHOUT_ARGUMENT
    from hvd_hetero.telemetry import read_run
    from hvd_hetero.telemetry.files import named
    from hvd_hetero.tools.simulation.cluster import Cluster
    from hvd_hetero.tools.simulation.description import ROUNDS, check, read_description, recorded_description
    from hvd_hetero.tools.simulation.policy_choices import choose, choose_all
    from hvd_hetero.tools.simulation.settings import checked
    from hvd_hetero.tools.simulation.what_if import changed

    machines: Replay | None = None
    if args.run_file is not None:
        recorded = read_run(args.run_file)
        if recorded.left_out:
            sys.stderr.write(
                f"{named(args.run_file)}: {recorded.left_out}. So the fixed cost of a micro-batch and the CPU readings "
                "before each round are not known. The samples of an epoch are estimated.\n"
            )
        choices = [choose(name, "--policies") for name in NAMES_WITHOUT_ARGUMENT]
        try:
            described, machines = recorded_description(recorded, choices)
        except ValueError as error:
            raise ValueError(f"{named(args.run_file)}: {error}") from None
    else:
        described = read_description(args.cluster)
    policies = "lb-bsp" if args.worth else args.policies
    if policies is not None:
        described = replace(described, policies=choose_all(policies, "--policies"))
    if args.rounds is not None:
        described = replace(described, rounds=checked("--rounds", args.rounds, ROUNDS))
    if args.seed is not None:
        described = replace(
            described, cluster=replace(described.cluster, seed=checked("--seed", args.seed, Cluster.settings["seed"]))
        )
    if args.global_batch is not None:
        described = replace(described, global_batch=args.global_batch, totals=())
    cluster, *between = (
        changed(cluster, args.drop, args.add, args.replace, args.network)
        for cluster in (described.cluster, *described.between)
    )
    described = replace(described, cluster=cluster, between=tuple(between))
    if args.run_file is not None and policies is None:
        described = replace(described, policies=tuple(_possible(described)))
    check(described, named((args.cluster or args.run_file).name))
    return described, machines


def _possible(described: Description) -> Iterator[PolicyChoice]:
    """Yield the policies that can divide the global batch; say which cannot, and why."""
    for choice in described.policies:
        try:
            choice.make().first(len(described.cluster.workers), described.global_batch)
        except ValueError as error:
            sys.stderr.write(f"{choice.label} is left out: {error}\n")
        else:
            yield choice


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    with status("simulating", quiet=quiet) as tell:
        yield lambda label, share: tell(f"{label}: {min(share, 1.0):.0%}")


def _write_table(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    """Print what was simulated, the table of all policies, and the recommendation."""
    from rich.markup import escape
    from rich.table import Column, Table

    from hvd_hetero.tools.simulation.compare import recommendation

    ranges = any(outcome.between for outcome in outcomes)
    least_width = _TABLE_WIDTH * (2 if ranges else 1)
    console = printer(width=max(printer().width, least_width))
    workers = len(described.cluster.workers)
    console.print(f"{workers} workers, {described.global_batch} samples a round, {described.rounds} rounds.")
    if recorded is not None:
        # The policy's name comes from a file, so it is not markup.
        console.print(f"Recorded: {recorded.run.policy}, {recorded.measured_rate:.1f} samples/s.", markup=False)
        ranks = [f"{least * 1e3:.3g} … {most * 1e3:.3g}" for least, _, most in recorded.fixed_s[:_RANKS_SHOWN]]
        more = ", …" if len(recorded.fixed_s) > _RANKS_SHOWN else ""
        console.print(f"Fixed cost of a micro-batch in ms, rank by rank: {', '.join(ranks)}{more}.")
        console.print(f"Another run of the same policy may differ by {recorded.rate_error:.1%} in samples/s.")
    columns = (Column(heading, justify="right", no_wrap=True) for heading in _COLUMNS)
    table = Table(Column("policy", no_wrap=True), *columns)
    for o in outcomes:
        table.add_row(escape(o.policy), *(o.shown(name, form) for name, form in _COLUMNS.values()))
    console.print(table)
    console.print(recommendation(outcomes), markup=False)
    if any(outcome.between.keys() - {"samples_per_s"} for outcome in outcomes):
        console.print(
            "This run does not show the fixed cost of a micro-batch, so figures are ranges. For single figures, record "
            "more epochs whose last round is short. The first five rounds do not count."
        )


def _write_json(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    """Print the same figures as JSON."""
    from hvd_hetero.tools.simulation.compare import recommendation

    document = {
        "workers": len(described.cluster.workers),
        "global_batch": described.global_batch,
        "rounds": described.rounds,
        "seed": described.cluster.seed,
        "recorded": recorded
        and {
            "policy": recorded.run.policy,
            "samples_per_s": recorded.measured_rate,
            "fixed_s": [[least, most] for least, _, most in recorded.fixed_s],
            "rate_error": recorded.rate_error,
        },
        "recommended": recommendation(outcomes),
        "policies": [outcome.plain() for outcome in outcomes],
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
