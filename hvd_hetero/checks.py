"""Checks of arguments and of saved states, with messages of one form.

Shapes: n = workers, one entry per rank in rank order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


def integer(
    name: str,
    value: SupportsIndex,
    least: int,
    below: int = 2**63,
    *,
    remedy: str = "give a whole number, the same on every rank",
) -> int:
    """Return `value` as a Python integer, least <= value < below; an error's message ends with `remedy`.

    Python's booleans are integers; here they are refused, since a flag in the place of a number is a mistake.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}); {remedy}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}; {remedy}")
    if number >= below:
        raise ValueError(f"{name} must be at least {least} and below {below}, got {number}; {remedy}")
    return number


def integers(name: str, values: ArrayLike, workers: int) -> IntArray:
    """Return `values`, one integer or one per worker, as an int64 array of shape (n,) with every entry >= 0."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be an integer or one integer per worker, got {values!r} of type {array.dtype}; write [3, 7]"
        )
    if array.shape not in ((), (workers,)):
        raise ValueError(
            f"{name} must be one integer or one per worker, shape ({workers},), got shape {array.shape}; "
            f"give as many entries as there are ranks"
        )
    largest = np.iinfo(np.int64).max
    if array.size and (array.min() < 0 or array.max() > largest):
        rank = int(np.argmax((array < 0) | (array > largest)))
        where = f"{name}[{rank}]" if array.ndim else name
        raise ValueError(f"{where} must be at least 0 and below 2**63, got {array.flat[rank]}; count from 0")
    whole = np.empty(workers, dtype=np.int64)
    whole[:] = array
    return whole


def floats(name: str, values: ArrayLike, workers: int | None = None) -> FloatArray:
    """Return `values` as float64 of shape (n,), not checked further; if n is given, a single number is repeated."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "USc":  # NumPy would read text, and drop imaginary parts
            raise TypeError
        array = array.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be numbers, one per worker, got {values!r}; leave out text") from None
    if workers is not None and array.ndim == 0:
        array = np.full(workers, array)
    if array.ndim != 1 or array.size == 0 or workers not in (None, array.size):
        raise ValueError(
            f"{name} must hold one number per worker, shape ({workers or 'n >= 1'},), got shape {array.shape}"
        )
    return array


def finite(name: str, values: ArrayLike, workers: int | None = None, *, least: float, remedy: str) -> FloatArray:
    """Return `floats` whose every entry is finite and at least `least`; an error's message ends with `remedy`."""
    array = floats(name, values, workers)
    # A NaN fails every comparison, hence "not all good" and not "any bad".
    if not (array.min() >= least and array.max() < np.inf and array.min() > -np.inf):
        rank = int(np.argmin((array >= least) & (np.abs(array) < np.inf)))
        floor = "" if least == -np.inf else f" and >= {least:g}"
        raise ValueError(f"{name}[{rank}] must be finite{floor}, got {array[rank]}; {remedy}")
    return array


def total_in_units(total: int, multiple_of: int) -> int:
    """Return the number of multiples in `total`, which must be a whole number of them."""
    # Considered: one share that is not a multiple (of a tensor core's tile, of a micro-batch). It would make one rank
    # slow for no visible reason, and the rank would change with the speeds.
    if total % multiple_of:
        below = total - total % multiple_of
        raise ValueError(
            f"total must be a multiple of multiple_of, got total={total} with multiple_of={multiple_of}; "
            f"use total={below} or {below + multiple_of}, or multiple_of=1 for a round that cannot be"
        )
    return total // multiple_of


def require_version(state: Mapping[str, Any], of: str, version: int) -> None:
    """Refuse a state that another version of this program has written."""
    if state.get("version") != version:
        raise ValueError(
            f"the state of {of} has version {state.get('version')}, and this program reads version {version}; resume "
            "with the version of hvd-hetero that saved it, or begin again with the model's parameters alone"
        )
