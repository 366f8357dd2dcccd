"""One self-contained HTML page: no network, no script, text escaped. Needs jinja2.

The page forbids itself all but its own style sheet (Content-Security-Policy), so even a name that slipped through
unescaped could run and load nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_hetero import __version__
from hvd_hetero.telemetry.files import named
from hvd_hetero.tools.report.build import Report
from hvd_hetero.tools.report.pictures import Shapes, pictures, scale_tops
from hvd_hetero.tools.report.tables import contents, side_by_side

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "hvd-hetero report"
# The generator's name stands in so many bytes of every page.
_HEAD_BYTES = 2048


def check_page(path: Path) -> None:
    """Raise if the page could not be written there, or would overwrite something else; called before the work."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise ValueError(
            "the page needs jinja2, which is not installed; run `pip install jinja2`, or give --no-page"
        ) from None
    if os.path.isfile(path):
        with path.open("rb") as file:
            begin = file.read(_HEAD_BYTES)
        if begin and f'content="{GENERATOR}"'.encode() not in begin:
            raise ValueError(
                f"--page must not overwrite other files, and {named(path)} is no report; name another file"
            )
    elif os.path.exists(path) or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"--page must name a file that can be written, got {named(path)}; name another one")


def page(reports: Sequence[Report]) -> str:
    """Return the page of one run, or of two side by side on one scale."""
    template, style = _template()
    scales = scale_tops([report.figures for report in reports])
    return template.render(
        generator=GENERATOR,
        version=__version__,
        style=style,
        reports=[contents(report) | {"pictures": pictures(report.figures, scales)} for report in reports],
        comparison=side_by_side(reports) if len(reports) == 2 else None,
    )


@cache
def _template() -> tuple[Template, Shapes]:
    """Return the page's template and its style sheet; compiling the template takes longer than filling it in."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html, css = (resources.files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    return environment.from_string(html), Shapes(css)
