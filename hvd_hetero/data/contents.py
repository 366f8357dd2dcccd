"""Whether ranks hold the same data: a few samples of it, told as numbers that unlike processors round alike.

Of a row x of floating-point numbers that is ``4 |x| + <r, x>`` with r random signs, the same on every rank; of whole
numbers they are what they are. Two ranks hold other data if most of their rows differ: a few may, by a resize or a
decoder that rounds otherwise on another processor, or because a label is the same by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Row", "Shown", "ranks_apart", "show"]

Row: TypeAlias = Callable[[int], ArrayLike]
"""What a data set holds for an index."""
Shown: TypeAlias = tuple[int, dict[str, list[tuple[float, float]]]]
"""The length, and for each name two numbers of each index that was drawn: one to be near, one to be the same."""

_ROWS = 8
_MOST = 2**12  # numbers of a row that are looked at: some ten microseconds
_TOLERANCE = 1e-2
_APART = 3 / 4  # of the rows
_SEED = 21


def show(length: int, columns: Mapping[str, Row]) -> Shown:
    """What a rank tells of its data; no columns where nothing is known of it without running the user's code."""
    indices = np.random.Generator(np.random.PCG64([_SEED, length])).integers(0, length, _ROWS).tolist()
    return length, {name: [_numbers(row(i)) for i in indices] for name, row in columns.items()}


def ranks_apart(told: Sequence[Shown]) -> list[int]:
    """The ranks whose data are not those of rank 0. Lengths that differ are seen by the order, and not here."""
    length, columns = told[0]
    return [rank for rank, (n, others) in enumerate(told) if n == length and _apart(columns, others)]


def _apart(a: Mapping[str, list[tuple[float, float]]], b: Mapping[str, list[tuple[float, float]]]) -> bool:
    differ = np.zeros(_ROWS, dtype=bool)
    for name in a.keys() & b.keys():
        (near_a, exact_a), (near_b, exact_b) = np.transpose(a[name]), np.transpose(b[name])
        differ |= ~np.isclose(near_a, near_b, rtol=_TOLERANCE, atol=0.0, equal_nan=True) | (exact_a != exact_b)
    return bool(differ.sum() >= _APART * _ROWS)


def _numbers(row: ArrayLike) -> tuple[float, float]:
    """What may be near, and what must be exact."""
    row = np.asarray(row).ravel()[:_MOST]
    x = row.astype(np.float64)
    signs = 2.0 * np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, len(x)) - 1.0
    product = float(signs @ x)
    return (0.0, product) if row.dtype.kind in "iub" else (4.0 * float(np.linalg.norm(x)) + product, 0.0)
