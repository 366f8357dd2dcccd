"""Read a table of settings strictly: every key is asked for by name and type, and what nobody asked for is an error."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, overload

__all__ = ["Settings"]

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


class Settings:
    """One table of a file; ``where`` is how errors call it."""

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
        """The value of a key, of this type; an integer is a number as well, and true is no integer."""
        self._asked.add(key)
        if key not in self._values:
            if default is _REQUIRED:
                hint = self._hint(key, self._values)
                raise ValueError(f"{self.where} needs {key} ({_NAMES[kind]}), and has none{hint}; add {key} = …")
            return default
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.where}: {key} must be {_NAMES[kind]}, got {value!r}")
        return value

    def table(self, key: str) -> Settings | None:
        """A table in this one, if it is there."""
        values = self.take(key, dict, None)
        return None if values is None else Settings(values, f"{self.where}.{key}")

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """One of the known names."""
        value = self.take(key, str, default) if default is not None else self.take(key, str)
        if value not in known:
            raise ValueError(
                f"{self.where}: {key} must be one of {', '.join(sorted(known))}; "
                f"got {value!r}{self._hint(value, known)}"
            )
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def know(self, *keys: str) -> None:
        """Keys that somebody else reads."""
        self._asked.update(keys)

    def rest(self) -> dict[str, Any]:
        """What has not been asked for yet, which counts as asked for now."""
        rest = {key: value for key, value in self._values.items() if key not in self._asked}
        self._asked |= set(rest)
        return rest

    def finish(self) -> None:
        """Raise if anything was not asked for."""
        unknown = [key for key in self._values if key not in self._asked]
        if unknown:
            raise ValueError(
                f"{self.where} has no setting {unknown[0]!r}{self._hint(unknown[0], self._asked)}; known are "
                f"{', '.join(sorted(self._asked))}"
            )

    @staticmethod
    def _hint(word: str, known: Collection[str]) -> str:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
        return f" (did you mean {near[0]!r}?)" if near else ""
