"""Pictures of simulated schemes. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_hetero.telemetry.files import named
from hvd_hetero.tools.simulation.compare import Outcome
from hvd_hetero.tools.simulation.engine import Simulated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for readers who confuse red and green, and two greys.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888", "#B8B800")
_STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (8, 4)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "---")  # as many; with the colours, 63 looks for 64 schemes
_WIDEST, _NARROWEST = 5.0, 1.4  # of lines: each next one is narrower, so lines that coincide show as a band of colours
_WINDOWS = 60  # points of the curve of throughput


def check_picture(path: Path) -> None:
    """Raise if no picture could be written there; called before the simulation, which may take minutes."""
    figure = _figure((1.0, 1.0))
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(known))}, got {named(path)}; write FILE.png")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(
            f"--plot must name a file that can be written, got {named(path)}; make its folder, or name another"
        )


def _figure(inches: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    return Figure(figsize=inches, layout="constrained")


def comparison_figure(found: Sequence[tuple[Outcome, Simulated]], title: str = "") -> Figure:
    """Draw samples per second of each scheme on the left, and over time on the right."""
    figure = _figure((12.5, 0.45 * len(found) + 3.0))
    bars, curves = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    heights = np.arange(len(found))[::-1]
    rates = [o.between.get("samples_per_s", (0.0, o.samples_per_s))[1] for o, _ in found]
    widths = np.linspace(_WIDEST, _NARROWEST, len(found)).tolist()
    for i, (outcome, result) in enumerate(found):
        colour, kind = _COLOURS[i % len(_COLOURS)], i // len(_COLOURS) % len(_STYLES)
        bars.barh(heights[i], rates[i], color=colour, height=0.65, hatch=_HATCHES[kind], edgecolor="white", linewidth=0)
        if "samples_per_s" in outcome.between:  # pale: not certain
            least = outcome.between["samples_per_s"][0]
            bars.barh(heights[i], rates[i] - least, left=least, color="white", alpha=0.6, height=0.65)
        text = f"  {outcome.shown('samples_per_s', ',.0f')}   {outcome.shown('times_bsp', '.2f')} times BSP, "
        text += f"waits {outcome.shown('waiting_share', '.0%')}"
        bars.text(rates[i], heights[i], text, va="center", fontsize=9)
        end_s = np.cumsum(result.elapsed_s)
        edges = np.linspace(0, end_s[-1], min(_WINDOWS, len(end_s)) + 1)
        done = np.interp(edges, np.concatenate([[0.0], end_s]), np.concatenate([[0], np.cumsum(result.samples)]))
        style: dict[str, Any] = {"color": colour, "label": outcome.scheme, "linewidth": widths[i]}
        style["linestyle"] = _STYLES[kind]
        curves.plot(0.5 * (edges[1:] + edges[:-1]), np.diff(done) / np.diff(edges), **style)
    bars.set_yticks(heights, [outcome.scheme for outcome, _ in found], parse_math=False)  # a label may hold a dollar
    bars.set(xlim=(0, 1.75 * max(rates)), xlabel="samples per second", axisbelow=True)
    curves.set(xlabel="simulated seconds", ylabel="samples per second")
    curves.set_ylim(bottom=0)
    for name in figure.legend(fontsize=8, loc="outside right upper").get_texts():  # beside the data, never on it
        name.set_parse_math(False)
    for axis, lines in ((bars, "x"), (curves, "both")):
        axis.grid(alpha=0.3, axis=lines)
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure
