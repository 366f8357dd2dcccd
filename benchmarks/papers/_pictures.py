"""Common parts of this folder's pictures: colours, axes, and where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for readers who confuse red and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FOLDER = Path(__file__).resolve().parents[1] / "results" / "papers"


def panels(columns: int, title: str, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Return a picture with a row of axes."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(4.4 * columns + 0.4, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    return figure, axes


def bars(axis: Axes, groups: Sequence[str], series: dict[str, Sequence[float]]) -> None:
    """Draw groups of bars side by side, one colour a series."""
    places, width = np.arange(len(groups)), 0.8 / len(series)
    for k, (name, values) in enumerate(series.items()):
        offset = (k - (len(series) - 1) / 2) * width
        axis.bar(places + offset, values, width * 0.92, color=COLOURS[k % len(COLOURS)], label=name)
    axis.set_xticks(places, groups)


def store(figure: Figure, name: str, write: bool) -> None:
    """Store the picture beside its table, if tables are stored."""
    if write:
        figure.savefig(FOLDER / f"{name}.png", dpi=80)
