"""Output of ``hvd-hetero simulate``: a table or JSON, with a recommendation, and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_hetero.tools.cli.output import printer

if TYPE_CHECKING:
    from hvd_hetero.tools.simulation.compare import Outcome
    from hvd_hetero.tools.simulation.description import Description
    from hvd_hetero.tools.simulation.replay import Replay
    from hvd_hetero.tools.simulation.results import Simulated
    from hvd_hetero.tools.simulation.worth import Worth

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


def write_table(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    """Print what was simulated, the table of all schemes, and the recommendation."""
    from rich.markup import escape
    from rich.table import Table

    from hvd_hetero.tools.simulation.recommendation import told

    ranges = any(outcome.between for outcome in outcomes)
    least_width = _LEAST_WIDTH * (2 if ranges else 1)  # a cut-off figure is worse than a wrapped line
    console = printer(width=max(printer().width, least_width))
    workers = len(described.cluster.workers)
    console.print(f"{workers} workers, {described.global_batch} samples a round, {described.rounds} rounds.")
    if recorded is not None:
        # The policy's name comes from a file, so it is not markup.
        console.print(f"Recorded: {recorded.run.policy}, {recorded.measured_rate:.1f} samples/s.", markup=False)
        ranks = [f"{least * 1e3:.3g} … {most * 1e3:.3g}" for least, _, most in recorded.fixed_s[:_RANKS_SHOWN]]
        more = ", …" if len(recorded.fixed_s) > _RANKS_SHOWN else ""
        console.print(f"Fixed cost of a micro-batch in ms, rank by rank: {', '.join(ranks)}{more}.")
        console.print(f"Its rounds scatter: another run's samples/s may differ by {recorded.rate_error:.1%}.")
    table = Table()
    table.add_column("scheme", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for o in outcomes:
        table.add_row(escape(o.scheme), *(o.shown(name, form) for name, form in _COLUMNS.values()))
    console.print(table)
    console.print(told(outcomes), markup=False)
    if any(outcome.between.keys() - {"samples_per_s"} for outcome in outcomes):
        console.print(
            "This run leaves the fixed cost of a micro-batch open. Ranges lie between the least and the "
            "most that it allows, on all ranks alike. For figures, record more epochs whose last round is short; the "
            "first five rounds do not count."
        )


def write_json(described: Description, recorded: Replay | None, outcomes: Sequence[Outcome]) -> None:
    """Print the same figures as JSON."""
    from hvd_hetero.tools.simulation.recommendation import told

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
        "recommended": told(outcomes),
        "schemes": [outcome.plain() for outcome in outcomes],
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def write_worth(described: Description, worth: Worth, prices: Sequence[float]) -> None:
    """Print what each worker is worth, as a report does."""
    from hvd_hetero.tools.report.terminal import write_worth as write

    console = printer()
    console.print(f"{worth.workers} workers, {described.global_batch} samples a round, under lb-bsp.")
    write(console, worth, prices)


def write_worth_json(described: Description, worth: Worth, prices: Sequence[float]) -> None:
    """Print the same figures as JSON."""
    document = {"global_batch": described.global_batch, **asdict(worth), "prices": list(prices)}
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def draw(path: Path, found: Sequence[tuple[Outcome, Simulated]], described: Description) -> None:
    """Write the picture."""
    from hvd_hetero.tools.simulation.figure import comparison_figure

    title = f"{len(described.cluster.workers)} workers, {described.global_batch} samples a round"
    comparison_figure(found, title).savefig(path, dpi=110)
    sys.stderr.write(f"picture: {path}\n")
