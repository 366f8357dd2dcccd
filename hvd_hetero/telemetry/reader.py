"""Read the lines of a run strictly: a file is a run, or one error that names the line and the key.

Columns are gathered as plain machine numbers, so reading takes no more memory than the resulting arrays. What remains
is mostly the parsing of numbers; orjson, where it is installed, does that in a seventh of the time.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.files import named, open_file

LONGEST_LINE = 2**24
"""Most bytes of a line; a round of ten thousand ranks takes two million."""

MOST_FIGURES = 2**24
"""Most rounds times ranks; each takes some 150 bytes."""

_Parser: TypeAlias = Callable[[bytes], Any]

_RULES = {
    (True, False): "a whole number, 0 or more",
    (True, True): "whole numbers, 0 or more",
    (False, False): "a number",
    (False, True): "numbers, or null for an unknown one",
}
_LARGEST = 2**53  # beyond, JSON's numbers are not exact everywhere


class Lines(NamedTuple):
    """The content of a file."""

    header: dict[str, Any]
    columns: dict[str, npt.NDArray[Any]]
    """(rounds,) of each key of a round, (rounds, ranks) of each key of the ranks."""
    cut_short: bool
    """The file ends within a line, which is left out."""


def read_lines(
    path: str | Path,
    schema: str,
    version: int,
    per_round: Mapping[str, type],
    per_rank: Mapping[str, type],
    optional: frozenset[str],
) -> Lines:
    """Read a file. A missing ``optional`` key counts as 0; ``round`` must rise from line to line.

    A line of several ``rounds`` has their means, and counts as that many lines. A last line cut short, as a killed run
    leaves it, is ignored.
    """
    lines, path = _lines(Path(path)), named(path)
    parse = _parser()
    first = next(lines, b"")
    if not first.endswith(b"\n"):
        raise ValueError(f"{path} holds no telemetry: it has no complete line; name the file of a run")
    header = _header(first, parse, path, schema, version)
    workers: int = header["workers"]
    columns = {n: array("q" if t is np.int64 else "d") for n, t in {**per_round, **per_rank}.items()}
    each: list[int] = []  # rounds of each line
    before, total, cut_short = -1, 0, False
    for at, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):
            cut_short = True
            break
        source = f"{path}, line {at}"
        row = _object(line, parse, source)
        each.append(_number(row.get("rounds", 1), np.int64, f"{source}: rounds", null=False))
        total += each[-1]
        if total * workers > MOST_FIGURES:
            raise ValueError(f"{source}: rounds times ranks must be at most {MOST_FIGURES}; take a part of the file")
        for name, kind in per_round.items():
            value = 0.0 if name in optional and name not in row else row.get(name)
            columns[name].append(_number(value, kind, f"{source}: {name}", null=False))
        if columns["round"][-1] <= before:
            raise ValueError(
                f"{source}: round must be larger than {before}, that of the line before, got {columns['round'][-1]}; "
                "where a training went back to an earlier state, cut the file in two before that line, each part with "
                "the first line; remove lines that are there twice"
            )
        if not 1 <= each[-1] <= columns["round"][-1] - before:
            _refuse(f"{source}: rounds", f"a whole number from 1 to {columns['round'][-1] - before}", each[-1])
        before = columns["round"][-1]
        for name, kind in per_rank.items():
            if name not in row and name in optional:
                columns[name].frombytes(bytes(8 * workers))
                continue
            values = row.get(name)
            if not isinstance(values, list) or len(values) != workers:
                _refuse(f"{source}: {name}", f"a list of {workers} numbers, one for each rank", values)
            plain = _plain(values, kind)
            if plain is not None:
                columns[name].frombytes(plain.tobytes())
                continue
            columns[name].extend(_number(value, kind, f"{source}: {name}", null=True) for value in values)
    arrays = {n: np.frombuffer(c, dtype=c.typecode) if c else np.empty(0, c.typecode) for n, c in columns.items()}
    shaped = {n: a.reshape(len(each), workers) if n in per_rank else a for n, a in arrays.items()}
    if total > len(each):
        counts = np.array(each)
        shaped = {name: np.repeat(column, counts, axis=0) for name, column in shaped.items()}
        shaped["round"] -= np.repeat(counts.cumsum(), counts) - 1 - np.arange(total)
    return Lines(header, shaped, cut_short)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines, of which the last one may lack its end."""
    with open_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                raise ValueError(f"{named(path)} has a line of more than {LONGEST_LINE} bytes, as no telemetry has")
            yield line


def _header(line: bytes, parse: _Parser, path: str, schema: str, version: int) -> dict[str, Any]:
    try:
        header = _object(line, parse, "")
    except ValueError:
        header = {}
    if header.get("schema") != schema:
        raise ValueError(
            f"{path} is not telemetry of hvd-hetero: its first line does not name the schema {schema!r}; name the file "
            "that LoadBalance(telemetry=…) has written"
        )
    if header.get("version") != version:
        raise ValueError(
            f"{path} has telemetry version {_short(header.get('version'))}, this program reads version {version}; "
            "read it with the release that wrote it"
        )
    for name in ("workers", "global_batch"):
        value = header.get(name)
        if type(value) is not int or not 1 <= value <= MOST_FIGURES:
            _refuse(f"{path}, line 1: {name}", f"a whole number of at least 1 and at most {MOST_FIGURES}", value)
    policy = header.get("policy")
    if not isinstance(policy, str) or not policy.isprintable() or len(policy) > 200:
        _refuse(f"{path}, line 1: policy", "the name of a policy", policy)
    every = header.setdefault("every", 1)  # absent in older runs
    if type(every) is not int or every < 1:
        _refuse(f"{path}, line 1: every", "a whole number of at least 1", every)
    return header


def _object(line: bytes, parse: _Parser, source: str) -> dict[str, Any]:
    try:
        found = parse(line)
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{source} is no JSON: {why}; cut the file before that line, or remove it") from None
    if not isinstance(found, dict):
        _refuse(source, "a JSON object", found)
    return found


def _parser() -> _Parser:
    try:
        from orjson import loads
    except ImportError:
        return lambda line: json.loads(line.decode("utf-8"), parse_constant=_no_number)
    return loads


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _plain(values: list[Any], kind: type) -> npt.NDArray[Any] | None:
    """Return numbers of the usual types all at once, in a tenth of the time; None: look at each."""
    if not set(map(type, values)) <= ({int} if kind is np.int64 else {int, float, type(None)}):
        return None
    try:
        numbers: npt.NDArray[Any] = np.array(values, dtype=kind)
    except (OverflowError, ValueError):
        return None
    if kind is np.int64:
        return numbers if numbers.min() >= 0 and numbers.max() < _LARGEST else None
    usual = int(np.count_nonzero(np.abs(numbers) < _LARGEST))
    return numbers if usual == len(values) or usual + values.count(None) == len(values) else None


def _number(value: Any, kind: type, source: str, *, null: bool) -> Any:
    """Return a whole number (``kind`` is int64) or a float; with ``null``, NaN for an unknown one."""
    whole = kind is np.int64
    if whole and type(value) in (int, float) and 0 <= value < _LARGEST and int(value) == value:
        return int(value)
    if not whole and type(value) in (int, float) and -_LARGEST < value < _LARGEST:
        return value
    if not whole and value is None and null:
        return math.nan
    return _refuse(source, _RULES[whole, null], value)


def _short(value: Any) -> str:
    """Return the beginning of a value that was found, for an error."""
    try:
        return ascii(value)[:60]
    except (ValueError, RecursionError):  # numbers of thousands of digits; lists in lists in lists
        return type(value).__name__


def _refuse(source: str, rule: str, value: Any) -> NoReturn:
    """Raise, with the rule and the value that broke it."""
    got = "nothing" if value is None else _short(value)
    raise ValueError(f"{source} must hold {rule}, got {got}; mend that line, or cut the file before it")
