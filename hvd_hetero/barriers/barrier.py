"""What every barrier search takes, and what it gives back.

Shapes: n workers, R predicted ends of each; ``ends`` is (n, R).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """One chosen end per worker: the set Z of the paper.

    ``index`` (n,) is the chosen column of each worker, so worker p does ``index[p] + 1`` iterations before the barrier;
    ``wait`` is d_Z = max Z - min Z, the time that the fastest worker waits; ``time`` is max Z, when the barrier falls.
    Both are in the unit of the ends.
    """

    index: NDArray[np.intp]
    wait: float
    time: float


def checked_ends(ends: ArrayLike) -> NDArray[Any]:
    """The ends as an (n, R) array of int64 or float64, each row strictly increasing and finite.

    Integers stay integers: ranks that must agree on a barrier can hand in quantised times (whole microseconds, say),
    and no rounding of one processor can then differ from another's.
    """
    array = np.asarray(ends)
    array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float64, copy=False)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"ends must be a matrix (workers, R) with at least one worker and one end, got shape {array.shape}; "
            "predict_ends makes one from recent intervals"
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
    return array
