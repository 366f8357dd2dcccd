"""Read the lines of a run strictly: a file is a run, or one error that names the line and the key.

Columns are gathered as plain machine numbers, so reading takes no more memory than the resulting arrays. What remains
is mostly the parsing of numbers; orjson, where it is installed, does that in a seventh of the time.
"""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.files import named, open_file


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


try:
    from orjson import loads
except ImportError:
    loads = functools.partial(json.loads, parse_constant=_no_number)

_EXACT_BELOW = 2**53  # from here on, JSON's numbers are not exact everywhere
_NUMBERS = {int, float, type(None)}


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
    path, kinds = Path(path), {**per_round, **per_rank}
    columns = {name: array("q" if kind is np.int64 else "d") for name, kind in kinds.items()}
    counts: list[int] = []  # rounds of each line
    before, cut_short = -1, False
    with open_file(path) as file:
        header = header_of(file.readline(), named(path), schema, version)
        workers: int = header["workers"]
        for at, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                cut_short = True
                break
            source = f"{named(path)}, line {at}"
            row = object_of(line, source)
            if "ledger" in row:  # a line of another kind (``ledger_reader``)
                continue
            for name, kind in kinds.items():
                if name not in row and name in optional:
                    columns[name].frombytes(bytes(8 if name in per_round else 8 * workers))
                    continue
                values = row.get(name)
                if name in per_round:
                    values = [values]
                elif not isinstance(values, list) or len(values) != workers:
                    _refuse(f"{source}: {name}", f"a list of {workers} numbers, one for each rank", values)
                numbers = _numbers(values, kind, f"{source}: {name}", null=name in per_rank)
                columns[name].frombytes(numbers.tobytes())
            number = columns["round"][-1]
            if number <= before:
                raise ValueError(
                    f"{source}: round must be larger than {before}, that of the line before, got {number}; where a "
                    "training went back to an earlier state, cut the file in two before that line, each part with the "
                    "first line; remove lines that are there twice"
                )
            counts.append(row.get("rounds", 1))
            if type(counts[-1]) is not int or not 1 <= counts[-1] <= number - before:
                _refuse(f"{source}: rounds", f"a whole number from 1 to {number - before}", counts[-1])
            before = number
    arrays = {n: np.frombuffer(c, dtype=c.typecode) if c else np.empty(0, c.typecode) for n, c in columns.items()}
    each = np.array(counts, dtype=np.int64)
    read = {
        name: np.repeat(column.reshape(len(counts), workers) if name in per_rank else column, each, axis=0)
        for name, column in arrays.items()
    }
    read["round"] -= np.repeat(each.cumsum(), each) - 1 - np.arange(each.sum())
    return Lines(header, read, cut_short)


def header_of(line: bytes, path: str, schema: str, version: int) -> dict[str, Any]:
    """Return what the first line of a file says of the run; ``path`` is for errors."""
    if not line.endswith(b"\n"):
        raise ValueError(f"{path} holds no telemetry: it has no complete line; name the file of a run")
    try:
        header = object_of(line, "")
    except ValueError:
        header = {}
    if header.get("schema") != schema:
        raise ValueError(
            f"{path} is not telemetry of hvd-hetero: its first line does not name the schema {schema!r}; name the file "
            "that LoadBalance(telemetry=…) has written"
        )
    if header.get("version") != version:
        raise ValueError(
            f"{path} has telemetry version {header.get('version')!r:.60}, this program reads version {version}; "
            "read it with the release that wrote it"
        )
    header.setdefault("every", 1)  # absent in older runs
    for name in ("workers", "global_batch", "every"):
        if type(value := header.get(name)) is not int or not 1 <= value < _EXACT_BELOW:
            _refuse(f"{path}, line 1: {name}", "a whole number of at least 1", value)
    if not isinstance(policy := header.get("policy"), str) or not policy.isprintable():
        _refuse(f"{path}, line 1: policy", "the name of a policy", policy)
    return header


def object_of(line: bytes, source: str) -> dict[str, Any]:
    """Return the object of a line; ``source`` is for errors."""
    try:
        found = loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is no JSON: {error}; cut the file before that line, or remove it") from None
    if not isinstance(found, dict):
        _refuse(source, "a JSON object", found)
    return found


def _numbers(values: list[Any], kind: type, source: str, *, null: bool) -> npt.NDArray[Any]:
    """Return a line's figures: whole ones (``kind`` is int64), or floats, with ``null`` NaN for an unknown one."""
    whole = kind is np.int64
    if set(map(type, values)) <= _NUMBERS:
        try:
            numbers: npt.NDArray[Any] = np.array(values, dtype=np.float64)
        except OverflowError:  # too large for a float
            numbers = np.array([np.inf])
        good = np.abs(numbers) < _EXACT_BELOW
        if whole:
            good &= (numbers >= 0) & (np.trunc(numbers) == numbers)
        elif null:
            good |= np.isnan(numbers)
        if good.all():
            return numbers.astype(kind)
    rule = "whole numbers, 0 or more" if whole else "numbers, or null for an unknown one" if null else "a number"
    return _refuse(source, rule, values)


def _refuse(source: str, rule: str, value: Any) -> NoReturn:
    """Raise, with the rule and the value that broke it."""
    got = "nothing" if value is None else f"{value!a:.60}"
    raise ValueError(f"{source} must hold {rule}, got {got}; mend that line, or cut the file before it")
