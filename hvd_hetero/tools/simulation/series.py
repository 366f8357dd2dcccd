"""Columns of CSV files as numbers: traces of availability, or recorded factors."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hvd_hetero.telemetry.files import open_file
from hvd_hetero.tools.simulation.limits import MOST_BYTES_OF_SERIES, MOST_VALUES
from hvd_hetero.tools.simulation.settings import Range, Settings, shown

__all__ = ["Series"]

_LONGEST_LINE = 2**16  # below what Python's csv takes as one field


class Series:
    """The columns that a description names, all together within limits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._characters = self._values = 0  # read so far

    def column(self, settings: Settings, within: Range, *, unknown: bool = False) -> list[float]:
        """Return the numbers of one column, gzipped or not; of one series if the file holds several.

        ``file``, ``column``, ``where`` and ``equals`` are settings. Each number is within a range; with ``unknown`` it
        may be NaN.
        """
        name, column = settings.take("file", str), settings.take("column", str)
        only, value = settings.take("where", str, None), settings.take("equals", str, None)
        if (only is None) != (value is None):
            raise ValueError(
                f"{settings.where}: where and equals go together (a column and its text); give both or none"
            )
        source = f"{settings.where}: {shown(name)}"
        try:
            numbers = list(self._numbers(self._folder / name, column, (only, value), source))
        except (csv.Error, EOFError, zlib.error, OSError, ValueError) as error:
            raise ValueError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
        if not numbers:
            where = "" if only is None else f" where {shown(only)} is {shown(value)}"
            raise ValueError(f"{source} has no rows{where}; name a column that has numbers")
        known = [number for number in numbers if not (unknown and math.isnan(number))]
        if beyond := [number for number in known if not within.least <= number <= within.most]:
            raise ValueError(
                f"{source}: {shown(column)} must hold numbers of at least {within.least:g} and at most "
                f"{within.most:g}, got {beyond[0]:g}; mend or leave out that row"
            )
        return numbers

    def _numbers(self, path: Path, column: str, chosen: tuple[str | None, str | None], source: str) -> Iterator[float]:
        raw = open_file(path)
        unpacked = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        with raw, io.TextIOWrapper(unpacked, encoding="utf-8", newline="") as text:
            rows = csv.DictReader(self._lines(text, source))
            names = list(rows.fieldnames or ())
            for name in (column, chosen[0]):
                if names and name is not None and name not in names:
                    raise ValueError(
                        f"{source} has no column {shown(name)}; it has {', '.join(map(shown, names[:20]))}"
                    )
            for row in rows:
                if chosen[0] is not None and row[chosen[0]] != chosen[1]:
                    continue
                self._values += 1
                if self._values > MOST_VALUES:
                    raise ValueError(f"{source}: all series together hold more than {MOST_VALUES} values; take parts")
                try:
                    yield float(row[column] or "")
                except ValueError:
                    raise ValueError(
                        f"{source}, line {rows.line_num}: {shown(column)} must be a number, got {shown(row[column])}; "
                        "mend or leave out that row"
                    ) from None

    def _lines(self, file: TextIO, source: str) -> Iterator[str]:
        """Yield lines; raise if one, or all files together, are longer than any that are meant."""
        while line := file.readline(_LONGEST_LINE):
            self._characters += len(line)
            if self._characters > MOST_BYTES_OF_SERIES or (len(line) == _LONGEST_LINE and not line.endswith("\n")):
                raise ValueError(
                    f"{source}: all series together hold more than {MOST_BYTES_OF_SERIES} characters, or one line more "
                    f"than {_LONGEST_LINE}; take parts"
                )
            yield line
