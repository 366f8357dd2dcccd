"""Common parts of this folder's scripts: options, tables, verdicts, and where results are stored."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _report import write_result  # noqa: E402 - found by the path above


class Verdicts:
    """Targets that figures meet or miss; NaN misses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.met = True

    def check(self, what: str, figure: float, least: float = float("-inf"), most: float = float("inf")) -> None:
        """Note whether a figure lies within bounds."""
        good = least <= figure <= most
        bounds = [f"at least {least:g}"] * (least > float("-inf")) + [f"at most {most:g}"] * (most < float("inf"))
        self.lines.append(f"- {what}: {figure:.4g} ({' and '.join(bounds)}): {'met' if good else 'MISSED'}")
        self.met = self.met and good


def options(description: str, extend: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Return the options of all scripts and the script's own."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results/papers")
    if extend is not None:
        extend(parser)
    return parser.parse_args()


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a table in Markdown, with the first column to the left and figures to the right."""
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return lines + ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def finish(name: str, lines: Sequence[str], verdicts: Verdicts, write: bool) -> int:
    """Print the text, store it if asked to, and return an exit code: 0 if all targets were met."""
    closing = ["", *verdicts.lines, "", "All targets met." if verdicts.met else "Not all targets met: see MISSED."]
    text = "\n".join([*lines, *(closing if verdicts.lines else [])])
    print(text)
    if write:
        write_result(f"papers/{name}", text)
    return 0 if verdicts.met else 1
