"""Write a long list of figures as JSON, all at once: at 1,000 ranks this is most of what a line of telemetry costs.

With d decimals, so that the largest |x| has seven digits, each |x| becomes a whole number of 10^-d. Its digits come one
after the other, by division of the whole array by ten. All numbers then have the same width, with blanks for leading
zeros, as JSON allows. A figure that is much smaller than the largest keeps fewer digits. A format for each number
takes twice as long.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

__all__ = ["as_json"]

_DIGITS = 7
_MOST_DECIMALS = 9
_POINT, _COMMA, _BLANK, _ZERO = (ord(character) for character in "., 0")
_NULL = np.frombuffer(b"null", np.uint8)


def as_json(values: list[float | None]) -> str:
    """Return a JSON list of numbers, with ``null`` for None."""
    numbers = np.array(values, np.float64)
    known = np.isfinite(numbers)
    largest = float(np.max(numbers, where=known, initial=0.0))
    decimals = _DIGITS - 1 - int(np.floor(np.log10(largest))) if largest > 0 else 0
    if 0 < decimals <= _MOST_DECIMALS and not (numbers < 0).any():
        return _all_at_once(numbers, known, decimals)
    return json.dumps(values, separators=(",", ":"))


def _all_at_once(numbers: npt.NDArray[np.float64], known: npt.NDArray[np.bool_], decimals: int) -> str:
    """Return the list of numbers of at least 0, of which the largest has seven digits with so many decimals."""
    whole = max(_DIGITS + 1 - decimals, 1)  # digits before the point; one more, for what is rounded up
    units = np.rint(np.where(known, numbers, 0.0) * 10.0**decimals).astype(np.uint32)  # at most 10^7
    text = np.empty((whole + decimals + 2, len(numbers)), np.uint8)  # a row for each character
    text[whole], text[-1] = _POINT, _COMMA
    rest = units
    for row in range(whole + decimals, -1, -1):
        if row != whole:
            tenths = rest // 10
            text[row] = rest - 10 * tenths + _ZERO
            rest = tenths
    for row in range(whole - 1):
        text[row, units < 10 ** (whole + decimals - 1 - row)] = _BLANK
    if not known.all():
        text[:-1, ~known] = _BLANK
        text[-1 - len(_NULL) : -1, ~known] = _NULL[:, None]
    return f"[{text.tobytes('F')[:-1].decode('ascii')}]"
