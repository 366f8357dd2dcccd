"""Read a table of settings strictly: each key is read by name and type, and any other one is an error."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

T = TypeVar("T")
_REQUIRED: Any = object()
_NAMES = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
_LONGEST_WORD = 100  # longer ones get no hint at what was meant

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, and short, whatever it holds."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    return (
        ascii(value) if isinstance(value, str) and len(value) <= 60 and not value.isprintable() else _short.repr(value)
    )


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may be, and what they are, as an error says it after "it is"."""

    least: float
    most: float
    of: str


class Settings:
    """One table of a file, which errors call ``where``."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = dict(values), where
        self._asked: set[str] = set()

    @overload
    def take(self, key: str, kind: type[T]) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def take(self, key: str, kind: type[T], default: T) -> T: ...
    def take(self, key: str, kind: type[T], default: Any = _REQUIRED) -> Any:
        """Return the value of a key, of this type; an integer is a number as well, and true is no integer."""
        self._asked.add(key)
        if key not in self._values:
            if default is _REQUIRED:
                hint = self._hint(key, self._values)
                raise ValueError(f"{self.where} needs {key} ({_NAMES[kind]}), and has none{hint}; add {key} = …")
            return default
        value = self._values[key]
        if not _is_a(value, kind):
            raise ValueError(f"{self.where}: {key} must be {_NAMES[kind]}, got {shown(value)}; write {key} = …")
        return _as_float(value) if kind is float else value

    @overload
    def number(self, key: str, within: Range) -> float: ...
    @overload
    def number(self, key: str, within: Range, default: None) -> float | None: ...
    @overload
    def number(self, key: str, within: Range, default: float) -> float: ...
    def number(self, key: str, within: Range, default: Any = _REQUIRED) -> Any:
        """Return the number of a key, in a range; a default is taken as it is."""
        value = self.take(key, float, default)
        return value if key not in self else self._checked(key, value, within)

    @overload
    def whole(self, key: str, within: Range) -> int: ...
    @overload
    def whole(self, key: str, within: Range, default: None) -> int | None: ...
    @overload
    def whole(self, key: str, within: Range, default: int) -> int: ...
    def whole(self, key: str, within: Range, default: Any = _REQUIRED) -> Any:
        """Return the whole number of a key, in a range; a default is taken as it is."""
        value = self.take(key, int, default)
        return value if key not in self else self._checked(key, value, within)

    def numbers(self, key: str, within: Range, default: Any = _REQUIRED) -> tuple[float, ...]:
        """Return a list of numbers, each in a range."""
        values = self.take(key, list, default)
        for position, value in enumerate(values):
            if not _is_a(value, float):
                raise ValueError(
                    f"{self.where}: {key}[{position}] must be a number, got {shown(value)}; it is {within.of}"
                )
            self._checked(f"{key}[{position}]", value, within)
        return tuple(map(_as_float, values))

    def _checked(self, key: str, value: Any, within: Range) -> Any:
        if within.least <= value <= within.most:
            return value
        bounds = f"at least {within.least:.15g}"
        if within.most < math.inf:
            bounds += f" and at most {within.most:.15g}"
        raise ValueError(f"{self.where}: {key} must be {bounds}, got {shown(value)}; it is {within.of}")

    def table(self, key: str) -> Settings | None:
        """Return a table in this one, if it is there."""
        values = self.take(key, dict, None)
        return None if values is None else Settings(values, f"{self.where}.{key}")

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """Return one of the known names."""
        value = self.take(key, str, default) if default is not None else self.take(key, str)
        if value not in known:
            raise ValueError(
                f"{self.where}: {key} must be one of {', '.join(sorted(known))}; "
                f"got {shown(value)}{self._hint(value, known)}"
            )
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def know(self, *keys: str) -> None:
        """Note keys that other code reads."""
        self._asked.update(keys)

    def rest(self) -> dict[str, Any]:
        """Return the settings that were not read yet; they count as read now."""
        rest = {key: value for key, value in self._values.items() if key not in self._asked}
        self._asked |= set(rest)
        return rest

    def misspelt(self, key: str) -> str:
        """Return a hint at the key that was most likely misspelt for this one."""
        near = _nearest(key, [other for other in self._values if other not in self._asked])
        return f"; there is no setting {shown(near)}" if near else ""

    def finish(self) -> None:
        """Raise if some key was not read."""
        unknown = [key for key in self._values if key not in self._asked]
        if unknown:
            raise ValueError(
                f"{self.where} has no setting {shown(unknown[0])}{self._hint(unknown[0], self._asked)}; known are "
                f"{', '.join(sorted(self._asked)) or 'none'}"
            )

    @staticmethod
    def _hint(word: str, known: Collection[str]) -> str:
        near = _nearest(word, known)
        return f" (did you mean {shown(near)}?)" if near else ""


def _nearest(word: str, known: Collection[str]) -> str | None:
    if len(word) > _LONGEST_WORD:
        return None
    return next(iter(difflib.get_close_matches(word, [k for k in known if len(k) <= _LONGEST_WORD], n=1)), None)


def _is_a(value: Any, kind: type) -> bool:
    """Return whether a value is of this type: an integer is a number, and true is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer has no end
        return math.inf if value > 0 else -math.inf
