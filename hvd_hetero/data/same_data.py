"""Whether ranks hold the same data: a few samples, as numbers that unlike processors round alike.

A row x of floating-point numbers gives ``4 |x| + <r, x>`` with r random signs, the same on every rank; whole
numbers give ``<r, x>``. Two ranks hold other data if most of their rows differ.

``contents_of`` makes one number of all samples that a round is cut from. It travels in each rank's row of the table, so
data that differ are found in the round in which they do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_hetero.consistency import PIECE, SIGNS

Rows: TypeAlias = Mapping[str, Sequence[ArrayLike]]
"""What a data set holds at some indices, by the names of its columns."""
DrawnRows: TypeAlias = tuple[int, dict[str, list[tuple[float, float]]]]
"""The length, and for each name two numbers of each index that was drawn: one may be near, one must be the same."""

# So few that reading them does not delay the start; most of them must differ (arbitrary).
_ROWS_COMPARED = 8
# The golden ratio's, because the fractional parts of its multiples are spread evenly.
_SPREAD = (5**0.5 - 1) / 2


def drawn_rows(length: int, rows_at: Callable[[Sequence[int]], Rows]) -> DrawnRows:
    """Return what a rank shows of its data; no columns if they cannot be known without running the user's code."""
    indices = np.random.Generator(np.random.PCG64(length)).integers(0, length, _ROWS_COMPARED).tolist()
    return length, {name: list(map(_numbers, rows)) for name, rows in rows_at(indices).items()}


def ranks_with_other_data(shown: Sequence[DrawnRows]) -> list[int]:
    """Return the ranks whose data differ from rank 0's; the order of samples finds lengths that differ."""
    length, columns = shown[0]
    return [rank for rank, (n, others) in enumerate(shown) if n == length and _apart(columns, others)]


def _apart(a: Mapping[str, list[tuple[float, float]]], b: Mapping[str, list[tuple[float, float]]]) -> bool:
    differ = np.zeros(_ROWS_COMPARED, dtype=bool)
    for name in a.keys() & b.keys():
        (near_a, exact_a), (near_b, exact_b) = np.transpose(a[name]), np.transpose(b[name])
        # A resize or a decoder rounds otherwise on another processor, mostly by less than 1 %.
        differ |= ~np.isclose(near_a, near_b, rtol=1e-2, atol=0.0, equal_nan=True) | (exact_a != exact_b)
    # Not all rows of other data differ: a label may be the same by chance. Of equal data a few may.
    return bool(differ.sum() >= 3 / 4 * _ROWS_COMPARED)


def _numbers(row: ArrayLike) -> tuple[float, float]:
    """Return a number that may be near, and one that must be exact."""
    row = np.asarray(row).ravel()[:PIECE]
    x = row.astype(np.float64)
    product = float(SIGNS[: len(x)] @ x)
    return (0.0, product) if row.dtype.kind in "iub" else (4.0 * float(np.linalg.norm(x)) + product, 0.0)


def marks_of(column: NDArray[Any], rows: ArrayLike) -> NDArray[np.float64]:
    """Return a number for each of these rows of a column, made of a few of its numbers (of strings, of their ends)."""
    flat = column.reshape(len(column), -1)
    places = np.arange(flat.shape[1])
    # At most 16 numbers, since 4 |x| is at least <r, x> for as many: so no mark is negative.
    if len(places) > 16:
        # Four at a time: memory that was just written takes most of a microsecond for each place.
        begins = (len(places) - 3) * (np.arange(1, 5) * _SPREAD % 1)
        places = np.add.outer(begins.astype(np.int64), np.arange(4)).ravel()
    few = flat[np.asarray(rows)[:, None], places]
    if few.dtype == object:
        few = np.vectorize(lambda text: zlib.crc32(text[-64:], len(text)), otypes=[np.float64])(few)
    elif few.dtype.kind in "iu" and few.dtype.itemsize > 2:
        # Multiplicative hashing, because large integers, such as indices, differ relatively little.
        few = few.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    x = np.nan_to_num(few.real.astype(np.float64), posinf=0.0, neginf=0.0)
    marks: NDArray[np.float64] = 4.0 * np.linalg.norm(x, axis=1) + x @ SIGNS[: x.shape[1]]
    return marks


def contents_of(marks: ArrayLike) -> float:
    """Return one number for samples with these marks, a row each: the geometric mean over columns of a weighted sum."""
    rows = np.asarray(marks, dtype=np.float64)
    # Unequal weights, so that the order of the samples counts.
    weights = 2.0 * (np.arange(1, len(rows) + 1) * _SPREAD % 1)
    travels = np.finfo(np.float32)
    return float(np.exp(np.log(np.clip(weights @ rows, travels.tiny, travels.max)).mean()))
