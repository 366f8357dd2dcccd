"""The pictures of a report as inline SVG, from numbers alone. Two runs share their scales.

A shape lies in a box of ``WIDE`` x ``HIGH``. The page stretches it to any size (``preserveAspectRatio="none"``). Text
is no part of it: the page sets ticks and names around the box, so letters keep their size on a phone. Colours are
classes, which the page gives a look for light and for dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hvd_hetero.tools.report.attribution import KINDS, kinds_of
from hvd_hetero.tools.report.figures import Curves, Figures
from hvd_hetero.tools.report.words import number, percent, percents

Floats = npt.NDArray[np.float64]
Ticks = tuple[tuple[float, str], ...]
Legend = tuple[tuple[str, str], ...]

WIDE, HIGH = 1000, 400
LEVELS = 8
"""Shades of a heat map."""

# A heat map whose largest cost is less would show mere scatter in its strongest colour.
_FULL_HEAT_FROM = 0.05
# Room above the highest curve.
_HEADROOM = 1.08


class Shapes(str):
    """SVG that this module has made, so that a template need not escape it."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return itself, as templates ask of safe text."""
        return self


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with its title, ticks and legend."""

    title: str
    drawing: Shapes
    note: str = ""
    kind: str = "plot"
    x_ticks: Ticks = ()
    """Share of the width, and text."""
    y_ticks: Ticks = ()
    """Share of the height, from below, and text."""
    legend: Legend = ()
    """Look and name."""


def scale_tops(found: Sequence[Figures]) -> dict[str, float]:
    """Return the largest value of each picture, over all runs shown side by side."""
    # Two runs share their scales, else the eye would compare curves of different units.
    over = [each.over_time for each in found]
    rounds = [Curves(np.stack([o.round_s, o.ideal_s + sum(o.kinds_s.values())]), True) for o in over]
    curves = {"time": rounds, **{name: [getattr(o, name) for o in over] for name in ("batches", "speed", "waiting_s")}}
    heats = [float(np.nanpercentile(o.cost.rows, 99.5)) for o in over]
    return {name: _HEADROOM * max(each.top for each in these) for name, these in curves.items()} | {
        "cost": max(*heats, _FULL_HEAT_FROM)
    }


def pictures(found: Figures, scales: dict[str, float]) -> dict[str, Picture]:
    """Draw a run."""
    over = found.over_time
    return {
        "bar": _bar(found),
        "time": _time(found, scales["time"]),
        "batches": _curves(found, over.batches, scales["batches"], "Batches", "samples of each rank in a round."),
        "speed": _curves(found, over.speed, scales["speed"], "Speed", "samples/s of each rank."),
        "waiting": _curves(
            found, over.waiting_s, scales["waiting_s"], "Waiting", "for others and for the transfer.", seconds=True
        ),
    } | ({"cost": _cost(found, scales["cost"])} if found.workers > 1 else {})


def _bar(found: Figures) -> Picture:
    names = kinds_of(found.workers)
    shares = [found.ideal, *(found.kinds[kind] for kind in names)]
    looks = ["k-ideal", *(f"k-{kind}" for kind in names)]
    description = f"{found.ideal:.0%} ideal, " + ", ".join(
        f"{found.kinds[kind]:.0%} {name}" for kind, name in names.items()
    )
    lines = zip(shares, looks, ["computing (ideal)", *names.values()], percents(shares), strict=True)
    legend = tuple((look, f"{name} {text}") for share, look, name, text in lines if share >= 0.0005)
    return Picture("All of the time", box(_bars(shares, looks), description), kind="bar", legend=legend)


def _time(found: Figures, top: float) -> Picture:
    over, (scale, unit) = found.over_time, _unit(top)
    below, areas = np.zeros_like(over.ideal_s), []
    for look, values in (("ideal", over.ideal_s), *((kind, over.kinds_s[kind]) for kind in KINDS)):
        # Rounding may leave a little below zero, which no area can show.
        above = below + np.maximum(np.nan_to_num(values), 0.0)
        areas.append(_area(below, above, top, f"area k-{look}", steps=True))
        below = above
    description = f"Time of a round over the run, by kind; from 0 to {top * scale:.3g} {unit}"
    note = f"{unit} in a round, over the rounds; colours as above"
    return _over_rounds(found, [*_grid(top * scale), *areas], top * scale, "The time of a round", description, note)


def _curves(found: Figures, shown: Curves, top: float, title: str, note: str, *, seconds: bool = False) -> Picture:
    scale, unit = _unit(top) if seconds else (1.0, "")
    how, legend = "", tuple((f"c{rank}", f"rank {rank}") for rank in range(len(shown.rows)))
    shapes = [line(row, top, f"c{rank}") for rank, row in enumerate(shown.rows)]
    if not shown.by_rank:
        shapes, legend, rows, outer = [], (), shown.rows, len(shown.rows) // 2
        shapes = [_area(rows[i], rows[-1 - i], top, f"band band{outer - i} c0") for i in range(outer)]
        shapes.append(line(rows[outer], top, "c0"))
        how = " Bands: all ranks, four fifths, half of them; the line is the median."
    note, description = f"{unit}{', ' if unit else ''}{note}{how}", f"{title} over the rounds, {note}"
    return _over_rounds(found, [*_grid(top * scale), *shapes], top * scale, title, description, note, legend)


def _over_rounds(
    found: Figures, shapes: list[str], top: float, title: str, description: str, note: str, legend: Legend = ()
) -> Picture:
    marks = tuple((y / top, number(y)) for y in ticks(top)) if top > 0 else ((0.0, "0"),)
    return Picture(title, box(shapes, description), note, "plot", _rounds(found), marks, legend)


def _cost(found: Figures, top: float) -> Picture:
    """Return the heat map of costs: neighbours of one shade are one rectangle, and a shade is one path."""
    rows, first = found.over_time.cost.rows, found.over_time.cost.first_rank
    count, blocks = rows.shape
    title = "Who held all others up, and when"
    note = "Ranks from above, rounds from the left. The stronger the colour, the larger the share of the round."
    if count < found.workers:
        note += f" A row is {found.workers / count:.3g} ranks, and shows the worst of them."
    scaled = np.where(np.isfinite(rows), rows, 0.0) / top * LEVELS
    level = np.clip(scaled.astype(np.int64), 0, LEVELS - 1)
    paths: dict[int, str] = {}
    for y in range(count):
        edges = [0, *(np.flatnonzero(np.diff(level[y])) + 1).tolist(), blocks]
        for begin, end in pairwise(edges):
            shade = int(level[y, begin])
            paths[shade] = paths.get(shade, "") + f"M{begin} {y}h{end - begin}v1h{begin - end}z"
    shapes = [f'<path class="h{shade}" d="{path}"/>' for shade, path in sorted(paths.items()) if shade > 0]
    drawing = box(shapes, f"{title}: ranks from above, rounds from the left", wide=blocks, high=count, kind="heat")
    every = max(-(-count // 8), 1)
    marks = tuple((1.0 - (i + 0.5) / count, str(first[i])) for i in range(0, count, every))
    legend = (("h0", percent(0.0)), ("h2", ""), ("h4", percent(top / 2)), ("h6", ""), ("h7", percent(top)))
    return Picture(title, drawing, note, "heat tall" if count > 16 else "heat", _rounds(found), marks, legend)


def _unit(top_s: float) -> tuple[float, str]:
    return (1e3, "ms") if top_s < 1 else (1.0, "s")


def _grid(top: float) -> list[str]:
    return [f'<path class="grid" d="M0 {HIGH * (1 - y / top):.0f}h{WIDE}"/>' for y in ticks(top)] if top > 0 else []


def _rounds(found: Figures) -> Ticks:
    """Return round numbers of rounds, at most six."""
    edges = found.over_time.edges
    first, last = int(edges[0]), int(edges[-1])
    apart = max(round([*ticks(float(max(last - first, 1))), 1.0][1]), 1)
    marks = range(-(-first // apart) * apart, last, apart)
    places = np.interp([mark + 0.5 for mark in marks], edges.astype(np.float64), np.linspace(0.0, 1.0, len(edges)))
    return tuple((float(place), f"{mark:,}") for place, mark in zip(places, marks, strict=True))


def ticks(top: float, most: int = 5) -> list[float]:
    """Return round numbers from 0 to ``top``: 1, 2 or 5 times a power of ten apart, ``most`` of them above 0."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    apart = next(step * power for step in (1, 2, 5, 10, 20) if step * power * most >= top * (1 - 1e-9))
    return [i * apart for i in range(int(top / apart * (1 + 1e-9)) + 1)]


def box(shapes: Iterable[str], description: str, *, wide: int = WIDE, high: int = HIGH, kind: str = "") -> Shapes:
    """Return the element that holds shapes; ``description`` describes it to people who do not see it."""
    return Shapes(
        f'<svg viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" class="{html.escape(kind)}">'
        f"<title>{html.escape(description)}</title>{''.join(shapes)}</svg>"
    )


def line(values: Floats, top: float, look: str) -> str:
    """Return a line over equally long blocks; it breaks where a value is not known. A value between breaks is a dot."""
    x, y = _across(len(values)), _up(values, top)
    known = np.concatenate([[False], np.isfinite(values), [False]])
    parts, dots = [], []
    for i in np.flatnonzero(known[1:-1]).tolist():
        if not known[i] and not known[i + 2]:
            dots.append(f"M{x[i]:.0f} {y[i]:.0f}h.1")
        else:
            parts.append(f"{'' if known[i] else 'M'}{x[i]:.0f} {y[i]:.0f}")
    shapes = ((f"line {look}", " ".join(parts)), (f"line dot {look}", "".join(dots)))
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in shapes if path)


def _bars(shares: Sequence[float], looks: Sequence[str]) -> list[str]:
    """Return one bar across the box, in parts."""
    parts = np.maximum(shares, 0.0) / np.maximum(shares, 0.0).sum()
    return [
        f'<rect class="area {look}" x="{at * WIDE:.1f}" width="{part * WIDE:.1f}" height="{HIGH}"/>'
        for look, part, at in zip(looks, parts, np.cumsum(parts) - parts, strict=True)
        if part > 0
    ]


def _area(low: Floats, high: Floats, top: float, look: str, *, steps: bool = False) -> str:
    known = np.isfinite(low) & np.isfinite(high)
    if not known.any():
        return ""
    if steps:
        x, low, high = np.repeat(np.linspace(0, WIDE, len(low) + 1), 2)[1:-1], np.repeat(low, 2), np.repeat(high, 2)
    else:
        x, low, high = _across(len(low))[known], low[known], high[known]
        if len(x) == 1:
            x, low, high = np.array([0, WIDE]), np.repeat(low, 2), np.repeat(high, 2)
    there = [f"{a:.0f} {b:.0f}" for a, b in zip(x, _up(high, top), strict=True)]
    back = [f"{a:.0f} {b:.0f}" for a, b in zip(x[::-1], _up(low, top)[::-1], strict=True)]
    return f'<path class="{look}" d="M{" ".join(there + back)}z"/>'


def _across(count: int) -> Floats:
    return np.asarray((np.arange(count) + 0.5) * (WIDE / max(count, 1)))


def _up(values: Floats, top: float) -> Floats:
    return np.asarray(HIGH - np.clip(values / (top if top > 0 else 1.0), -0.02, 1.02) * HIGH)
