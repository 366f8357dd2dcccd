"""The pieces of its parameters that a rank shows in each round, and a checksum of the kernels it computes with.

To look at all parameters would take as long as an update. So every round looks at a piece of one parameter, the next
round at a piece of the next, and after the last at another piece of the first. With N parameters, a change of one of
them alone is seen after N rounds at the most.

Of a piece x two numbers are shown: a checksum of its bits, which sees the last bit of any number, and its size,
``4 |x| + <r, x>`` with random signs r. The norm alone would not see numbers that were swapped, negated or drawn again.
The scalar product alone may be near zero, where a relative tolerance means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_hetero.rounds import checksum

PIECE = 2**13
"""Numbers in a piece: some ten microseconds."""
_LEAST = 1e-6  # zero would say that a rank has nothing to show
_SIGNS = 2.0 * np.random.Generator(np.random.PCG64(20)).integers(0, 2, PIECE) - 1.0
_CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")


class WatchedParameter(NamedTuple):
    """A parameter that has its turns."""

    name: str
    numbers: int
    width: int
    """Bytes of a number."""


def piece_of(round: int, watched: Sequence[WatchedParameter]) -> tuple[int, slice]:
    """Return which of the parameters has its turn in a round, and which of its numbers are looked at."""
    turn, which = divmod(round, len(watched))
    begin = turn % -(-watched[which].numbers // PIECE) * PIECE
    return which, slice(begin, begin + PIECE)


def shown(numbers: npt.NDArray[Any], memory: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Return the size of a piece, and the checksum of its bits: ``numbers`` as they lie in ``memory``."""
    exact = numbers.astype(np.float64)
    size = _LEAST + 4.0 * math.sqrt(exact @ exact) + float(exact @ _SIGNS[: len(exact)])
    return size, float(checksum(memory.data))


def kernels(*framework: object) -> float:
    """Return a checksum of the processor and the kernels that the framework names: equal ones round alike."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text(errors="replace").partition("\n\n")[0] if cpuinfo.exists() else ""
    processor = [line for line in first.splitlines() if line.startswith(_CPU)]
    return float(checksum(repr((processor, framework)).encode()))
