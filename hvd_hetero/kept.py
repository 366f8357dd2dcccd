"""Learned figures as plain data, and back: the `state_dict` and `load_state_dict` of classes that learn.

A class names its attributes once, in ``KEPT``. What an attribute holds when a state is loaded decides its shape and
type: an array with a number for each rank, a list, a named tuple, a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

NOT_KNOWN = -1.0
"""Stands in plain data for what is not known, since JSON has neither NaN nor infinity."""


class Figure(NamedTuple):
    """Numbers that an attribute holds, and what they must be besides finite."""

    name: str
    """Name of the attribute; without its leading underscore, the key in the state."""
    least: float = 0.0
    most: float = math.inf
    positive: bool = False
    whole: bool = False
    unknown: float | None = None
    """NaN or infinity, by which the attribute says that a number >= 0 is not known; None: all are known."""
    any_length: bool = False
    """Whether a list may have another length than now."""

    @property
    def key(self) -> str:
        """The name in plain data."""
        return self.name.lstrip("_")

    def plain(self, now: Any) -> Any:
        """Return an attribute's value as plain data."""
        array = np.asarray(now, dtype=np.float64)
        if self.unknown is not None:
            array = np.where(np.isfinite(array), array, NOT_KNOWN)
        return array.astype(np.int64 if self.whole else np.float64).tolist()

    def read(self, state: Mapping[str, Any], now: Any, of: str) -> Any:
        """Return the attribute's value from plain data; ``now`` is its present value, ``of`` whose it is."""
        try:
            array = np.asarray(state[self.key], dtype=np.float64)
        except (KeyError, TypeError, ValueError):
            array = np.full(np.shape(now), math.nan)
        missing = (array == NOT_KNOWN) & (self.unknown is not None)
        allowed = (array >= self.least) & (array <= self.most) & np.isfinite(array) & ~(self.positive & (array == 0.0))
        allowed &= ~(self.whole & (np.floor(array) != array))
        shape = array.shape if self.any_length and array.ndim == 1 else np.shape(now)
        if array.shape != shape or not (allowed | missing).all():
            least = f"{'above' if self.positive else 'at least'} {self.least:g}"
            kind = f"{'whole' if self.whole else 'finite'}, of {'any length' if self.any_length else f'shape {shape}'}"
            raise ValueError(
                f"the state of {of}: {self.key!r} must be {kind}, {least} and at most {self.most:g}, got "
                f"{state.get(self.key, 'nothing')}; resume from a whole state, with as many ranks as saved it"
            )
        array = np.where(missing, self.unknown or 0.0, array).astype(np.int64 if self.whole else np.float64)
        if isinstance(now, np.ndarray):
            return array.astype(now.dtype)
        if shape:
            return getattr(type(now), "_make", type(now))(array.tolist())
        return bool(array) if isinstance(now, bool) else array.item()


class Kept:
    """Base of what learns: its figures, and its parts that keep a state themselves (or are None)."""

    __slots__ = ()
    KEPT: ClassVar[tuple[Figure, ...]] = ()
    PARTS: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain data."""
        parts = {name.lstrip("_"): getattr(self, name) for name in self.PARTS}
        state = {figure.key: figure.plain(getattr(self, figure.name)) for figure in self.KEPT}
        return state | {key: None if part is None else part.state_dict() for key, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` has returned; a part that only one of both has stays as it is."""
        of = type(self).__name__
        # All figures are read before any is set: a state that does not fit must leave the object as it was.
        for name, value in [(f.name, f.read(state, getattr(self, f.name), of)) for f in self.KEPT]:
            setattr(self, name, value)
        for name in self.PARTS:
            if (part := getattr(self, name)) is not None and (kept := state[name.lstrip("_")]) is not None:
                part.load_state_dict(kept)
