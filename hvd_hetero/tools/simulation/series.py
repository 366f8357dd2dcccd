"""Columns of CSV files as numbers: traces of availability, or recorded factors."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from hvd_hetero.telemetry.files import open_file
from hvd_hetero.tools.simulation.settings import Range, Settings, shown


def column(settings: Settings, folder: Path, within: Range) -> list[float]:
    """Return the numbers of one column, gzipped or not; of one series if the file holds several.

    ``file``, ``column``, ``where`` and ``equals`` are settings. Each number is within a range.
    """
    file, name = settings.take("file", str), settings.take("column", str)
    only, value = settings.take("where", str, None), settings.take("equals", str, None)
    if (only is None) != (value is None):
        raise ValueError(f"{settings.where}: where and equals go together (a column and its text); give both or none")
    try:
        numbers = list(_numbers(folder / file, name, only, value))
        if not numbers:
            raise ValueError("it has no such rows; name a column that has numbers")
        if beyond := [number for number in numbers if not within.least <= number <= within.most]:
            raise ValueError(
                f"{shown(name)} must hold numbers of at least {within.least:g} and at most {within.most:g}, got "
                f"{beyond[0]:g}; mend or leave out that row"
            )
    except (csv.Error, EOFError, zlib.error, OSError, ValueError) as error:
        raise ValueError(f"{settings.where}: {shown(file)}: {error}") from None
    return numbers


def _numbers(path: Path, name: str, only: str | None, value: str | None) -> Iterator[float]:
    raw = open_file(path)
    unpacked = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    with raw, io.TextIOWrapper(unpacked, encoding="utf-8", newline="") as text:
        rows = csv.DictReader(text)
        for needed in (name, only):
            if needed is not None and needed not in (rows.fieldnames or ()):
                known = ", ".join(map(shown, (rows.fieldnames or ())[:20]))
                raise ValueError(f"it has no column {shown(needed)}; it has {known or 'none'}")
        for row in rows:
            if only is not None and row[only] != value:
                continue
            try:
                yield float(row[name] or "")
            except ValueError:
                raise ValueError(
                    f"line {rows.line_num}: {shown(name)} must be a number, got {shown(row[name])}; mend or leave out "
                    "that row"
                ) from None
