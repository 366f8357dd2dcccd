"""Whether ranks hold the same data: a few samples, as numbers that unlike processors round alike.

A row x of floating-point numbers gives ``4 |x| + <r, x>`` with r random signs, the same on every rank; whole
numbers give ``<r, x>``. Two ranks hold other data if most of their rows differ. A few may differ, because a resize or a
decoder rounds otherwise on another processor; or a label is the same by chance.

``contents_of`` makes one number of all samples that a round is cut from. It travels in each rank's row of the table, so
data that differ are found in the round in which they do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Row: TypeAlias = Callable[[int], ArrayLike]
"""What a data set holds for an index."""
Shown: TypeAlias = tuple[int, dict[str, list[tuple[float, float]]]]
"""The length, and for each name two numbers of each index that was drawn: one may be near, one must be the same."""

_ROWS = 8
_MOST = 2**12  # numbers of a row that are looked at: some ten microseconds
_TOLERANCE = 1e-2
_APART = 3 / 4  # of the rows
_SEED = 21
_FEW = 16  # numbers of a sample in its mark; no more than 4 squared, so that no mark is negative
_SIGNS = 2.0 * np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, _FEW) - 1.0
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, less their whole parts, are spread evenly
_LEAST, _LARGEST = 1e-30, 1e30  # what a float32 holds


def show(length: int, columns: Mapping[str, Row]) -> Shown:
    """Return what a rank shows of its data; no columns if they cannot be known without running the user's code."""
    indices = np.random.Generator(np.random.PCG64([_SEED, length])).integers(0, length, _ROWS).tolist()
    return length, {name: [_numbers(row(i)) for i in indices] for name, row in columns.items()}


def ranks_apart(told: Sequence[Shown]) -> list[int]:
    """Return the ranks whose data differ from rank 0's. The order finds lengths that differ; this does not."""
    length, columns = told[0]
    return [rank for rank, (n, others) in enumerate(told) if n == length and _apart(columns, others)]


def _apart(a: Mapping[str, list[tuple[float, float]]], b: Mapping[str, list[tuple[float, float]]]) -> bool:
    differ = np.zeros(_ROWS, dtype=bool)
    for name in a.keys() & b.keys():
        (near_a, exact_a), (near_b, exact_b) = np.transpose(a[name]), np.transpose(b[name])
        differ |= ~np.isclose(near_a, near_b, rtol=_TOLERANCE, atol=0.0, equal_nan=True) | (exact_a != exact_b)
    return bool(differ.sum() >= _APART * _ROWS)


def _numbers(row: ArrayLike) -> tuple[float, float]:
    """Return a number that may be near, and one that must be exact."""
    row = np.asarray(row).ravel()[:_MOST]
    x = row.astype(np.float64)
    signs = 2.0 * np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, len(x)) - 1.0
    product = float(signs @ x)
    return (0.0, product) if row.dtype.kind in "iub" else (4.0 * float(np.linalg.norm(x)) + product, 0.0)


def marks_of(column: NDArray[Any], rows: ArrayLike) -> NDArray[np.float64]:
    """Return a number for each of these rows of a column, made of a few of its numbers (of strings, of their ends)."""
    flat = column.reshape(len(column), -1)
    places = np.arange(flat.shape[1])
    if len(places) > _FEW:  # four at a time: memory that was just written takes most of a microsecond for each place
        begins = (len(places) - 3) * (np.arange(1, 5) * _GOLDEN % 1)
        places = np.add.outer(begins.astype(np.int64), np.arange(4)).ravel()
    few = flat[np.asarray(rows)[:, None], places]
    if few.dtype == object:
        few = np.vectorize(lambda text: zlib.crc32(text[-64:], len(text)), otypes=[np.float64])(few)
    elif few.dtype.kind in "iu" and few.dtype.itemsize > 2:  # such as indices, whose differences are relatively small
        few = few.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    x = np.nan_to_num(few.real.astype(np.float64), posinf=0.0, neginf=0.0)
    marks: NDArray[np.float64] = 4.0 * np.linalg.norm(x, axis=1) + x @ _SIGNS[: x.shape[1]]
    return marks


def contents_of(marks: ArrayLike) -> float:
    """Return one number for samples with these marks, a row each: the geometric mean over columns of a weighted sum."""
    rows = np.asarray(marks, dtype=np.float64)
    weights = 2.0 * (np.arange(1, len(rows) + 1) * _GOLDEN % 1)  # so that their order counts
    return float(np.exp(np.log(np.clip(weights @ rows, _LEAST, _LARGEST)).mean()))
