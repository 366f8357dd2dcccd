"""The summary in the terminal, by rich. No text is markup: names come from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from hvd_hetero.tools.report.build import Report
from hvd_hetero.tools.report.tables import Table, contents, side_by_side, worth_table
from hvd_hetero.tools.report.worth_words import worth_sentences
from hvd_hetero.tools.simulation.worth import Worth

# More causes are on the page.
_CAUSES_SHOWN = 4
# All columns of the ranks' table fit. A narrower terminal leaves out the spare ones, as a phone does.
_ALL_COLUMNS_FROM_WIDTH = 110


def write_summary(console: Console, reports: Sequence[Report]) -> None:
    """Print one report, or two and their comparison."""
    for report in reports:
        _write(console, report)
    if len(reports) == 2:
        compared = side_by_side(reports)
        console.print(Text("Side by side", style="bold"))
        console.print(Text(compared["text"]))
        _table(console, compared["table"])


def _write(console: Console, report: Report) -> None:
    shown = contents(report)
    console.print(Text(shown["name"], style="bold"))
    console.print(Text(shown["facts"], style="dim"))
    for name in ("verdict", "why", "next"):
        console.print(Text.assemble((f"{name.capitalize() + ':':<9}", "bold"), getattr(report.verdict, name)))
    for note in report.notes:
        console.print(Text.assemble(("Note:    ", "bold yellow"), note))
    console.print(Text("   ".join(f"{value} {name}" for value, name in shown["tiles"])))
    if report.costs:
        console.print(Text(report.costs))
    for name in ("kinds", "ranks", "spread"):
        _table(console, shown[name])
    causes = shown["causes"]
    # The verdict may have named all of them.
    if any(why not in report.verdict.why for _, why, _ in causes.rows):
        _table(console, replace(causes, rows=causes.rows[:_CAUSES_SHOWN]))
        if (more := len(causes.rows) - _CAUSES_SHOWN) > 0:
            console.print(Text(f"{more} more cause{'s' if more > 1 else ''}.", style="dim"))
    if shown["alternatives"].rows:
        _table(console, shown["alternatives"])
    console.print(Text(shown["replayed"], style="dim"))
    if report.worth is not None:
        _table(console, shown["worth"])
        console.print(Text(shown["worth_text"]))
    console.print()


def write_worth(console: Console, worth: Worth, prices: Sequence[float] = ()) -> None:
    """Print what each rank is worth."""
    _table(console, worth_table(worth, prices))
    console.print(Text(" ".join(worth_sentences(worth))))


def _table(console: Console, shown: Table | None) -> None:
    if shown is None:
        return
    kept = [i for i in range(len(shown.headings)) if i not in shown.spare or console.width >= _ALL_COLUMNS_FROM_WIDTH]
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for i in kept:
        words = i == 0 or i in shown.words
        table.add_column(Text(shown.headings[i]), justify="left" if words else "right", overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(row[i]) for i in kept))
    console.print(table)
