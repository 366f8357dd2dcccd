"""One self-contained HTML page: no network, no script, text escaped. Needs jinja2.

The page forbids itself all but its own style sheet (Content-Security-Policy), so even a name that slipped through
unescaped could run and load nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_hetero import __version__
from hvd_hetero.telemetry.files import named
from hvd_hetero.tools.report.figures import Figures
from hvd_hetero.tools.report.made import Report
from hvd_hetero.tools.report.pictures import Scales, pictures
from hvd_hetero.tools.report.svg import Shapes
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
from hvd_hetero.tools.report.words import duration, number, percent
from hvd_hetero.tools.report.worth_words import worth_sentences, worth_table

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "hvd-hetero report"
_BEGIN = 2048  # bytes by which a report is known


def check_page(path: Path) -> None:
    """Raise if the page could not be written there, or would overwrite something else; called before the work."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ValueError("the page needs jinja2: pip install jinja2, or give --no-page") from None
    if os.path.isfile(path):
        with path.open("rb") as file:
            begin = file.read(_BEGIN)
        if begin and f'content="{GENERATOR}"'.encode() not in begin:
            raise ValueError(
                f"--page names {named(path)}, which exists and is no report; name another file, or move it"
            )
    elif os.path.exists(path) or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"--page must name a file that can be written, got {named(path)}; name another")


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page."""
    path.write_text(page(reports), encoding="utf-8")


def page(reports: Sequence[Report]) -> str:
    """Return the page of one run, or of two side by side."""
    template, style = _template()
    scales = Scales.of([report.figures for report in reports])
    return template.render(
        generator=GENERATOR,
        version=__version__,
        style=style,
        reports=[_shown(report, scales) for report in reports],
        comparison=_compared(reports) if len(reports) == 2 else None,
    )


@cache
def _template() -> tuple[Template, Shapes]:
    """Return the page's template and its style sheet; compiling the template takes longer than filling it in."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html, css = (resources.files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    return environment.from_string(html), Shapes(css)


def _compared(reports: Sequence[Report]) -> dict[str, Any]:
    text = comparison([report.name for report in reports], [report.figures for report in reports])
    return {"text": text, "table": comparison_table(reports)}


def _shown(report: Report, scales: Scales) -> dict[str, Any]:
    found, worth = report.figures, report.worth
    return {
        "name": report.name,
        "facts": facts(found),
        "verdict": report.verdict,
        "notes": report.notes,
        "tiles": tiles(found),
        "costs": report.costs,
        "kinds": kinds_table(found),
        "ranks": ranks_table(found),
        "spread": spread_table(found) if found.workers > MOST_RANKS else None,
        "causes": causes_table(report),
        "alternatives": alternatives_table(found),
        "replayed": replay_note(found),
        "worth": worth and worth_table(worth, report.prices),
        "worth_told": " ".join(worth_sentences(worth, report.verdict.next))
        if worth
        else f"Unknown: {found.no_alternatives}",
        "pictures": pictures(found, scales),
    }


def facts(found: Figures) -> str:
    """Return one line on the run: policy, ranks, rounds."""
    ranks = f"{found.workers:,} rank{'s' if found.workers != 1 else ''}"
    epochs = f", {found.epochs:,} epochs" if found.epochs > 1 else ""
    known = math.isfinite(found.noise_scale)
    noise = f" Gradient noise scale in the last tenth of the rounds: {found.noise_scale:,.0f} samples." if known else ""
    return (
        f"Policy {found.policy}, {ranks}, {found.global_batch:,} samples a round. {found.rounds:,} "
        f"round{'s' if found.rounds != 1 else ''} in {duration(found.elapsed_s)}{epochs}, without the start-up.{noise}"
    )


def tiles(found: Figures) -> list[tuple[str, str]]:
    """Return the figures that come first: value and name."""
    first = [
        (number(found.samples_per_s), "samples per second"),
        (f"{found.slowdown:.2f}", "slowdown against the ideal"),
        (percent(found.waiting_for_ranks), "lost to late ranks" if found.workers > 1 else "waiting for data"),
        (percent(found.kinds["transfer"]), "lost to transfers" if found.workers > 1 else "synchronising"),
    ]
    best = None if found.alternatives is None else found.alternatives.of("best split")
    if best is not None and best.certain:
        first.append((f"{best.times_run:.2f}\N{MULTIPLICATION SIGN}", "as fast with the best split"))
    return first


def replay_note(found: Figures) -> str:
    """Return the note on how the table of other splits was computed."""
    if found.alternatives is None:
        return f"Other splits were not computed: {found.no_alternatives}"
    note = (
        f"Replayed in simulated time on the last {found.alternatives.rounds} whole rounds, with the speeds and "
        "transfers that they had, as hvd-hetero simulate --from does. Rates are without the first tenth of the samples."
    )
    if not all(each.certain for each in found.alternatives.each):
        note += " If the run leaves the fixed cost of a micro-batch open, a figure is a range."
    if found.micro_batches > 1:
        note += (
            f" This run did up to {found.micro_batches:,} micro-batches a round, and its ideal has as many. "
            "These splits do one, so they may be faster than the ideal."
        )
    return note
