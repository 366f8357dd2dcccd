"""Shapes as inline SVG, from numbers alone: lines, bands, stacks, bars, heat maps.

A shape lies in a box of ``WIDE`` x ``HIGH``. The page stretches it to any size (``preserveAspectRatio="none"``). Text
is no part of it: the page sets ticks and names around the box, so letters keep their size on a phone. Colours are
classes, which the page gives a look for light and for dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WIDE, HIGH = 1000, 400
LEVELS = 8
"""Shades of a heat map."""


class Shapes(str):
    """SVG that this module has made, so that a template need not escape it."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return itself, as templates ask of safe text."""
        return self


def box(shapes: Iterable[str], told: str, *, wide: int = WIDE, high: int = HIGH, kind: str = "") -> Shapes:
    """Return the element that holds shapes; ``told`` describes it to people who do not see it."""
    return Shapes(
        f'<svg viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" class="{html.escape(kind)}">'
        f"<title>{html.escape(told)}</title>{''.join(shapes)}</svg>"
    )


def line(values: Floats, top: float, look: str) -> str:
    """Return a line over equally long blocks; it breaks where a value is not known. A value between breaks is a dot."""
    x, y = _across(len(values)), _up(values, top)
    known = np.concatenate([[False], np.isfinite(values), [False]])
    parts, dots = [], []
    for i in range(len(values)):
        if not known[i + 1]:
            continue
        if not known[i] and not known[i + 2]:
            dots.append(f"M{x[i]:.0f} {y[i]:.0f}h.1")
        else:
            parts.append(f"{'' if known[i] else 'M'}{x[i]:.0f} {y[i]:.0f}")
    shapes = ((f"line {look}", " ".join(parts)), (f"line dot {look}", "".join(dots)))
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in shapes if path)


def bands(rows: Floats, top: float, look: str) -> list[str]:
    """Return quantiles (an odd number of rows) as bands, the outermost palest, and the middle one as a line."""
    outer = len(rows) // 2
    return [
        *(_area(rows[i], rows[-1 - i], top, f"band band{outer - i} {look}") for i in range(outer)),
        line(rows[outer], top, look),
    ]


def stack(layers: Sequence[tuple[Floats, str]], top: float) -> list[str]:
    """Return areas one on the other; what is below zero counts as nothing."""
    below = np.zeros_like(layers[0][0])
    found = []
    for values, look in layers:
        above = below + np.maximum(np.nan_to_num(values), 0.0)
        found.append(_area(below, above, top, f"area {look}", steps=True))
        below = above
    return found


def bars(parts: Sequence[tuple[float, str]], total: float) -> list[str]:
    """Return one bar across the box, in parts."""
    found, at = [], 0.0
    for value, look in parts:
        if (share := max(value, 0.0) / total) > 0:
            found.append(f'<rect class="area {look}" x="{at * WIDE:.1f}" width="{share * WIDE:.1f}" height="{HIGH}"/>')
        at += max(value, 0.0) / total
    return found


def heat_map(rows: Floats, low: float, high: float, told: str) -> Shapes:
    """Return a heat map of (rows, blocks): neighbours of one shade are one rectangle, and a shade is one path."""
    count, blocks = rows.shape
    known = np.isfinite(rows)
    scaled = (np.where(known, rows, low) - low) / (high - low if high > low else 1.0)
    level = np.where(known, np.clip((scaled * LEVELS).astype(np.int64), 0, LEVELS - 1), -1)
    paths: dict[int, list[str]] = {}
    for y in range(count):
        ends = np.append(np.flatnonzero(np.diff(level[y])) + 1, blocks)
        begin = 0
        for end in ends.tolist():
            paths.setdefault(int(level[y, begin]), []).append(f"M{begin} {y}h{end - begin}v1h{begin - end}z")
            begin = end
    shapes = [f'<path class="h{shade}" d="{"".join(parts)}"/>' for shade, parts in sorted(paths.items()) if shade > 0]
    return box(shapes, told, wide=blocks, high=count, kind="heat")


def _area(low: Floats, high: Floats, top: float, look: str, *, steps: bool = False) -> str:
    known = np.isfinite(low) & np.isfinite(high)
    if not known.any():
        return ""
    if steps:
        edges = np.linspace(0, WIDE, len(low) + 1)
        x = np.repeat(edges, 2)[1:-1]
        low, high = np.repeat(low, 2), np.repeat(high, 2)
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


def ticks(top: float, most: int = 5) -> list[float]:
    """Return round numbers from 0 to ``top``: 1, 2 or 5 times a power of ten apart, ``most`` of them above 0."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    apart = next(step * power for step in (1, 2, 5, 10, 20) if step * power * most >= top * (1 - 1e-9))
    return [i * apart for i in range(int(top / apart * (1 + 1e-9)) + 1)]


def whole_ticks(first: int, last: int, most: int = 5) -> list[int]:
    """Return round whole numbers from ``first`` to below ``last``, at most ``most`` + 1."""
    length = max(last - first, 1)
    apart = max(round(ticks(float(length), most)[1]) if len(ticks(float(length), most)) > 1 else 1, 1)
    begin = -(-first // apart) * apart
    return list(range(begin, last, apart))
