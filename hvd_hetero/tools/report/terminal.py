"""The summary in the terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_hetero.tools.report.made import Report
from hvd_hetero.tools.report.page import facts, replay_note, tiles
from hvd_hetero.tools.report.table import Table
from hvd_hetero.tools.report.tables import (
    MOST_RANKS,
    alternatives_table,
    causes_table,
    comparison_table,
    kinds_table,
    ranks_table,
    spread_table,
)
from hvd_hetero.tools.report.verdict import comparison
from hvd_hetero.tools.report.worth_words import worth_sentences, worth_table

if TYPE_CHECKING:
    from rich.console import Console

    from hvd_hetero.tools.simulation.worth import Worth

_CAUSES = 4
_FULL_WIDTH = 110  # a narrower terminal goes without the spare columns, as a phone does


def write_summary(console: Console, reports: Sequence[Report]) -> None:
    """Print one report, or two and their comparison. No text is markup: names come from files."""
    from rich.text import Text

    for report in reports:
        _write(console, report)
    if len(reports) == 2:
        console.print(Text("Side by side", style="bold"))
        names, found = [report.name for report in reports], [report.figures for report in reports]
        console.print(Text(comparison(names, found)))
        _table(console, comparison_table(reports))


def _write(console: Console, report: Report) -> None:
    from rich.text import Text

    found = report.figures
    console.print(Text(report.name, style="bold"))
    console.print(Text(facts(found), style="dim"))
    for name in ("verdict", "why", "next"):
        console.print(Text.assemble((f"{name.capitalize() + ':':<9}", "bold"), getattr(report.verdict, name)))
    for note in report.notes:
        console.print(Text.assemble(("Partial: ", "bold yellow"), note))
    console.print(Text("   ".join(f"{value} {name}" for value, name in tiles(found))))
    if report.costs:
        console.print(Text(report.costs))
    _table(console, kinds_table(found))
    _table(console, ranks_table(found))
    if found.workers > MOST_RANKS:
        _table(console, spread_table(found))
    causes = causes_table(report)
    if any(why not in report.verdict.why for _, why, _ in causes.rows):  # else the verdict has named them all
        _table(console, Table(causes.headings, causes.rows[:_CAUSES], words=causes.words))
        if (more := len(causes.rows) - _CAUSES) > 0:
            console.print(Text(f"{more} more cause{'s' if more > 1 else ''}.", style="dim"))
    if found.alternatives is not None:
        _table(console, alternatives_table(found))
    console.print(Text(replay_note(found), style="dim"))
    if (worth := report.worth) is not None:
        write_worth(console, worth, report.prices, said=report.verdict.next)
    console.print()


def write_worth(console: Console, worth: Worth, prices: Sequence[float] = (), *, said: str = "") -> None:
    """Print what each rank is worth; not again what was ``said`` above."""
    from rich.text import Text

    _table(console, worth_table(worth, prices))
    console.print(Text(" ".join(worth_sentences(worth, said))))


def _table(console: Console, shown: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    kept = [i for i in range(len(shown.headings)) if i not in shown.spare or console.width >= _FULL_WIDTH]
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for i in kept:
        words = i == 0 or i in shown.words
        table.add_column(Text(shown.headings[i]), justify="left" if words else "right", overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(row[i]) for i in kept))
    console.print(table)
