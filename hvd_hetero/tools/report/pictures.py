"""The pictures of a report: shapes of ``svg`` with their ticks and names. Two runs share their scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_hetero.tools.report.attribution import KINDS, kinds_of
from hvd_hetero.tools.report.figures import Figures
from hvd_hetero.tools.report.over_time import Curves, Heat
from hvd_hetero.tools.report.svg import (
    HIGH,
    WIDE,
    Shapes,
    bands,
    bars,
    box,
    heat_map,
    line,
    stack,
    ticks,
    whole_ticks,
)
from hvd_hetero.tools.report.words import number, percent, percents

IDEAL = "computing: the ideal"
_LEAST_HEAT = 0.05  # the top of a heat map of costs at the least, or scatter would glow
_LEAST_TOP = 1.08  # a little room above the curve


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with its title, ticks and legend."""

    title: str
    drawing: Shapes
    note: str = ""
    kind: str = "plot"
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Share of the width, and text."""
    y_ticks: tuple[tuple[float, str], ...] = ()
    """Share of the height, from below, and text."""
    legend: tuple[tuple[str, str], ...] = ()
    """Look and name."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The largest value of each picture, over all runs shown side by side."""

    round_s: float
    batches: float
    speed: float
    waiting_s: float
    cost: float

    @classmethod
    def of(cls, found: Sequence[Figures]) -> Scales:
        """Return scales that hold all of these."""
        over = [each.over_time for each in found]
        rounds = [Curves(np.stack([o.round_s, o.ideal_s + sum(o.kinds_s.values())]), True).top for o in over]
        costs = [float(np.nanpercentile(o.cost.rows, 99.5)) for o in over]
        return cls(
            _LEAST_TOP * max(rounds),
            _LEAST_TOP * max(o.batches.top for o in over),
            _LEAST_TOP * max(o.speed.top for o in over),
            _LEAST_TOP * max(o.waiting_s.top for o in over),
            max(*costs, _LEAST_HEAT),
        )


def pictures(found: Figures, scales: Scales) -> dict[str, Picture]:
    """Draw a run."""
    over = found.over_time
    drawn = {
        "bar": _bar(found),
        "time": _time(found, scales.round_s),
        "cost": _heat(
            found, over.cost, scales.cost, "Who held all others up, and when",
            "Ranks from above, rounds from the left. The stronger the colour, the larger the share of the round.",
            percent,
        ),
        "batches": _curves(found, over.batches, scales.batches, "Batches", "samples of each rank in a round."),
        "speed": _curves(found, over.speed, scales.speed, "Speed", "samples/s of each rank."),
        "waiting": _curves(found, over.waiting_s, scales.waiting_s, "Waiting", "for others and for the transfer.", 1e3),
    }  # fmt: skip
    if found.workers == 1:
        del drawn["cost"]
    return drawn


def _bar(found: Figures) -> Picture:
    parts = [(found.ideal, "k-ideal"), *((found.kinds[kind], f"k-{kind}") for kind in kinds_of(found.workers))]
    names = kinds_of(found.workers)
    told = f"{found.ideal:.0%} ideal, " + ", ".join(f"{found.kinds[kind]:.0%} {name}" for kind, name in names.items())
    total = sum(max(share, 0.0) for share, _ in parts)
    legend = tuple(
        (look, f"{name} {text}")
        for (share, look), name, text in zip(
            parts, [IDEAL, *names.values()], percents([share for share, _ in parts]), strict=True
        )
        if share >= 0.0005
    )
    return Picture("All of the time", box(bars(parts, total), told), kind="bar", legend=legend)


def _time(found: Figures, top: float) -> Picture:
    over = found.over_time
    layers = [(over.ideal_s, "k-ideal"), *((over.kinds_s[kind], f"k-{kind}") for kind in KINDS)]
    scale, unit = (1e3, "ms") if top < 1 else (1.0, "s")
    told = f"Time of a round over the run, by kind; from 0 to {top * scale:.3g} {unit}"
    drawing = box([*_grid(top * scale), *stack(layers, top)], told)
    return Picture(
        "The time of a round",
        drawing,
        f"{unit} in a round, over the rounds; colours as above",
        "plot",
        _rounds(found),
        _up(top * scale),
    )


def _curves(found: Figures, shown: Curves, top: float, title: str, note: str, scale: float = 1.0) -> Picture:
    unit = ""
    if scale != 1.0:
        scale, unit = (1e3, "ms, ") if top < 1 else (1.0, "s, ")
    drawing = box([*_grid(top * scale), *_rows(shown, top)], f"{title} over the rounds, {note}")
    return Picture(title, drawing, unit + note + _how(shown), "plot", _rounds(found), _up(top * scale), _legend(shown))


def _heat(found: Figures, shown: Heat, top: float, title: str, note: str, form: Callable[[float], str]) -> Picture:
    count = len(shown.first_rank) - 1
    every = max(-(-count // 8), 1)
    marks = tuple((1.0 - (i + 0.5) / count, str(shown.first_rank[i])) for i in range(0, count, every))
    if count < found.workers:
        note += f" A row is {found.workers / count:.3g} ranks, and shows the worst of them."
    legend = (("h0", form(0.0)), ("h2", ""), ("h4", form(top / 2)), ("h6", ""), ("h7", form(top)))
    kind = "heat tall" if count > 16 else "heat"
    drawing = heat_map(shown.rows, 0.0, top, f"{title}: ranks from above, rounds from the left")
    return Picture(title, drawing, note, kind, _rounds(found), marks, legend)


def _rows(shown: Curves, top: float) -> list[str]:
    if shown.by_rank:
        return [line(row, top, f"c{rank}") for rank, row in enumerate(shown.rows)]
    return bands(shown.rows, top, "c0")


def _how(shown: Curves) -> str:
    return "" if shown.by_rank else " Bands: all ranks, four fifths, half of them; the line is the median."


def _legend(shown: Curves) -> tuple[tuple[str, str], ...]:
    if not shown.by_rank:
        return ()
    return tuple((f"c{rank}", f"rank {rank}") for rank in range(len(shown.rows)))


def _grid(top: float) -> list[str]:
    return [f'<path class="grid" d="M0 {HIGH * (1 - y / top):.0f}h{WIDE}"/>' for y in ticks(top)] if top > 0 else []


def _up(top: float) -> tuple[tuple[float, str], ...]:
    return tuple((y / top, number(y)) for y in ticks(top)) if top > 0 else ((0.0, "0"),)


def _rounds(found: Figures) -> tuple[tuple[float, str], ...]:
    edges = found.over_time.edges
    first, last = int(edges[0]), int(edges[-1])
    blocks = len(edges) - 1
    marks = whole_ticks(first, last)
    places = np.interp([mark + 0.5 for mark in marks], edges.astype(np.float64), np.arange(blocks + 1) / blocks)
    return tuple((float(place), f"{mark:,}") for place, mark in zip(places, marks, strict=True))
