"""Read tables of settings strictly: each key is declared with its type and bounds, and any other one is an error."""

from __future__ import annotations

import difflib
import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Bounds of described figures: far above any real job, so that no sum of times loses the small ones.
# A mixture of predictors takes tens of kilobytes for each worker.
MAX_WORKERS = 10_000
# A round takes 30 to 130 microseconds a worker (``benchmarks/papers/scale.py``).
MAX_ROUNDS = 10**6
# The order of an epoch is held as eight bytes a sample.
MAX_EPOCH_SAMPLES = 5 * 10**7
# Twelve days, for any event within a round.
LONGEST_S = 1e6
# Samples per second; its inverse is the slowest speed.
MAX_SPEED = 1e12
# By so much a worker may be slower or faster than itself; its inverse is the smallest availability.
MAX_RATIO = 1e6

REQUIRED: Any = object()
_NAMES = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    tuple: "a list of numbers",
    dict: "a table",
}
# Comparing words takes time by their length squared, and a longer one is no slip of the pen.
_HINTS_UP_TO_LETTERS = 100

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """What the value of a key may be."""

    kind: type
    """A ``float`` may be an integer, and true is no integer; ``tuple`` is a list of numbers; ``object`` is anything."""
    default: Any = REQUIRED
    least: float = -math.inf
    most: float = math.inf
    of: str = ""
    """What the number is, as an error says it after "it is"."""
    known: Collection[str] = ()
    """The words that it may be; empty: any."""


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, and short, whatever it holds."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    unprintable = isinstance(value, str) and len(value) <= 60 and not value.isprintable()
    return ascii(value) if unprintable else _short.repr(value)


def read(table: Any, settings: Mapping[str, Setting], where: str, *, more: bool = False) -> dict[str, Any]:
    """Return the value of each setting, or its default; ``more``: the table may hold other keys, too.

    An error names ``where`` the table stands, the key, the rule and the value.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table of settings, got {shown(table)}")
    unknown = [] if more else [key for key in table if key not in settings]
    for key, setting in settings.items():
        if setting.default is REQUIRED and key not in table:
            kind, hint = _NAMES[setting.kind], _hint(key, unknown)
            raise ValueError(f"{where} needs {key} ({kind}), and has none{hint}; add {key} = …")
    if unknown:
        known = ", ".join(sorted(settings)) or "none"
        hint = _hint(unknown[0], settings)
        raise ValueError(f"{where} has no setting {shown(unknown[0])}{hint}; known are {known}")
    return {
        key: checked(f"{where}: {key}", table[key], setting) if key in table else setting.default
        for key, setting in settings.items()
    }


def checked(name: str, value: Any, setting: Setting) -> Any:
    """Return a value if it is what the setting asks for; a number as a float where that is its type."""
    kind: Any = setting.kind
    if kind is tuple and isinstance(value, list | tuple):
        each = Setting(float, least=setting.least, most=setting.most, of=setting.of)
        return tuple(checked(f"{name}[{i}]", number, each) for i, number in enumerate(value))
    numeric = kind in (int, float)
    if not isinstance(value, int | float if kind is float else kind) or (numeric and isinstance(value, bool)):
        remedy = f"; it is {setting.of}" if setting.of else ""
        raise ValueError(f"{name} must be {_NAMES[kind]}, got {shown(value)}{remedy}")
    if setting.known and value not in setting.known:
        known = ", ".join(sorted(setting.known))
        raise ValueError(f"{name} must be one of {known}; got {shown(value)}{_hint(str(value), setting.known)}")
    if not numeric:
        return value
    if not setting.least <= value <= setting.most:
        end = f" and at most {setting.most:.15g}" if setting.most < math.inf else ""
        raise ValueError(f"{name} must be at least {setting.least:.15g}{end}, got {shown(value)}; it is {setting.of}")
    return value if kind is int else float(min(value, sys.float_info.max))  # an integer has no end


def check(fields: object, settings: Mapping[str, Setting]) -> None:
    """Raise if a field of a data class is not what its setting asks for."""
    for name, setting in settings.items():
        if (value := getattr(fields, name)) is not None or setting.default is not None:
            checked(name, value, setting)


def _hint(word: str, known: Collection[str]) -> str:
    if len(word) > _HINTS_UP_TO_LETTERS:
        return ""
    near = difflib.get_close_matches(word, [each for each in known if len(each) <= _HINTS_UP_TO_LETTERS], n=1)
    return f" (did you mean {shown(near[0])}?)" if near else ""
