"""How a report writes figures and names ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_hetero.allocation import proportional

UNKNOWN = "\N{EN DASH}"

# Rounding would show "0.0005 ms", which no clock has measured.
_ZERO_BELOW_S = 5e-7


def percent(share: float) -> str:
    """Return a fraction as a percentage of two or three digits."""
    if not math.isfinite(share):
        return UNKNOWN
    # Adding zero takes the minus from a negative one.
    share = round(share, 4) + 0.0
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"


def percents(shares: Sequence[float]) -> list[str]:
    """Return parts of one whole as percentages with a digit after the point, which sum to 100 after rounding, too."""
    whole = proportional([max(share, 0.0) for share in shares], 1000, minimum=0)
    return [f"{thousandths / 10:.1f}%" for thousandths in whole.tolist()]


def number(value: float) -> str:
    """Return a number with three digits, or whole from 1,000 on; without an exponent."""
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in a suitable unit."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if abs(seconds) < _ZERO_BELOW_S:
        return "0 ms"
    # From two of a unit on: "90 s" and "119 min" are read more easily than "1.5 min" and "1.98 h".
    for least, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if abs(seconds) >= (least if unit == "s" else 2 * least):
            return f"{seconds / least:,.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def named_ranks(ranks: Sequence[int], most: int) -> str:
    """Return "rank 1", "ranks 1, 2 and 3" or, with more than ``most``, "ranks 1, 2 and 7 more"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, most)}"


def listed(some: Sequence[object], most: int) -> str:
    """Return the first ``most`` of some things, and how many more there are."""
    shown = [*some] if len(some) <= most else [*some[:most], f"{len(some) - most} more"]
    *first, last = map(str, shown)
    return f"{', '.join(first)} and {last}" if first else last
