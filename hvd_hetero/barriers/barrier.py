"""The input and the result of every barrier search.

Shapes: n workers, R predicted ends of each; ``ends`` is (n, R).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """A barrier: one chosen end per worker, the paper's set Z.

    ``wait`` and ``time`` are in the unit of the ends.
    """

    index: NDArray[np.intp]
    """Chosen column of each worker, (n,): worker p does ``index[p] + 1`` iterations before the barrier."""
    wait: float
    """Time that the fastest worker waits, d_Z = max Z - min Z."""
    time: float
    """Time of the barrier, max Z."""


def checked_ends(ends: ArrayLike) -> NDArray[Any]:
    """Return the ends as an (n, R) array of int64 or float64, each row strictly increasing and finite.

    Integers stay integers: ranks that must agree on a barrier can pass quantised times, such as whole microseconds, so
    that no two processors round differently.
    """
    try:
        array = np.asarray(ends)
    except ValueError:
        raise ValueError(
            "ends must be a matrix (workers, R), got rows of different lengths; predict as many ends for each worker"
        ) from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"ends must be numbers, got {array.dtype}; integers are to be below 2**63")
    if array.dtype.kind == "u" and array.size and array.max() > _INT64_MAX:
        raise ValueError(f"ends must be below 2**63, got {array.max()}; count from a later instant, or in larger units")
    array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"ends must be a matrix (workers, R) with at least one worker and one end, got shape {array.shape}; "
            "the row of a worker that needs 2 s for each iteration is 2, 4, 6 … 2 R"
        )
    # A NaN compares false with anything, so one comparison finds the NaNs between two ends as well as a wrong order.
    ascending = array[:, 1:] > array[:, :-1]
    if not ascending.all():
        row, column = np.argwhere(~ascending)[0]
        raise ValueError(
            f"ends of one worker must be strictly increasing numbers, got {array[row, column]} and then "
            f"{array[row, column + 1]} at worker {row}, columns {column} and {column + 1}; "
            "every interval between two ends must be positive"
        )
    outer = array[:, [0, -1]]
    if not np.isfinite(outer).all():  # the rest lies between two finite numbers
        row = int(np.argwhere(~np.isfinite(outer))[0, 0])
        raise ValueError(
            f"ends must be finite, got {array[row, 0]} to {array[row, -1]} at worker {row}; "
            "leave out a worker that has no prediction"
        )
    first, last = array[:, 0].min().item(), array[:, -1].max().item()
    if last - first > (_INT64_MAX if array.dtype.kind == "i" else sys.float_info.max):
        raise ValueError(
            f"ends must lie so near to each other that their differences are {array.dtype} numbers, got {first} to "
            f"{last}; count all workers' time from the same instant"
        )
    return array
