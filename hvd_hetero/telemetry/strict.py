"""Figures of a file, read strictly: a number of the right kind, or one error that names its place."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

__all__ = ["LARGEST", "number", "refuse", "short"]

_RULES = {
    (True, False): "a whole number, 0 or more",
    (True, True): "whole numbers, 0 or more",
    (False, False): "a number",
    (False, True): "numbers, or null for an unknown one",
}
LARGEST = 2**53  # beyond, JSON's numbers are not exact everywhere


def number(value: Any, kind: type, source: str, *, null: bool) -> Any:
    """Return a whole number (``kind`` is int64) or a float; with ``null``, NaN for an unknown one."""
    whole = kind is np.int64
    if whole and type(value) in (int, float) and 0 <= value < LARGEST and int(value) == value:
        return int(value)
    if not whole and type(value) in (int, float) and -LARGEST < value < LARGEST:
        return value
    if not whole and value is None and null:
        return math.nan
    return refuse(source, _RULES[whole, null], value)


def short(value: Any) -> str:
    """Return the beginning of a value that was found, for an error."""
    try:
        return ascii(value)[:60]
    except (ValueError, RecursionError):  # numbers of thousands of digits; lists in lists in lists
        return type(value).__name__


def refuse(source: str, rule: str, value: Any) -> NoReturn:
    """Raise, with the rule and the value that broke it."""
    got = "nothing" if value is None else short(value)
    raise ValueError(f"{source} must hold {rule}, got {got}; mend that line, or cut the file before it")
