"""The files of one run. ``Telemetry(rotate_bytes=…)`` begins another one whenever a file has grown to a size.

Each file names the run and counts its part of it, from 0. The latest part has the name that the user gave; when the
next one begins, it takes the first free number, ``run.1.jsonl`` and so on. Other runs may have taken numbers between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_hetero.telemetry.files import named, open_file

__all__ = ["Parts", "parts_of"]

_LONGEST_HEADER = 10_000  # bytes; headers take some hundred


@dataclass(frozen=True, slots=True)
class Parts:
    """The files of a run that are there, in order, and how many are not."""

    paths: list[Path]
    missing: int = 0


def parts_of(path: Path, schema: str) -> Parts:
    """Find all files of the run that a file belongs to; the file alone if it does not say that there are others."""
    run = _header(path, schema).get("run")
    if not isinstance(run, str):
        return Parts([path])
    found: dict[int, Path] = {}
    for other in _siblings(path):
        try:
            header = _header(other, schema)
        except (OSError, ValueError):  # it says of no run that it is a part of it, and may be anybody's
            continue
        part = header.get("part")
        if header.get("run") != run or type(part) is not int or part < 0:
            continue
        if part in found:
            raise ValueError(
                f"{named(other)} and {named(found[part])} are the same part of one run; move one of them elsewhere"
            )
        found[part] = other
    return Parts([found[part] for part in sorted(found)], max(found, default=-1) + 1 - len(found))


def _siblings(path: Path) -> Iterator[Path]:
    """The number at the end of a name may be that of a part, or belong to the name that the user gave."""
    stems = {path.stem, re.sub(r"\.\d+$", "", path.stem)}
    name = re.compile(f"({'|'.join(map(re.escape, stems))})" + r"(\.\d+)?" + re.escape(path.suffix))
    return (other for other in sorted(path.parent.iterdir()) if name.fullmatch(other.name) and other.is_file())


def _header(path: Path, schema: str) -> dict[str, Any]:
    """The first line; empty if it is not one of telemetry, which the reader of all lines then says."""
    with open_file(path) as file:
        line = file.readline(_LONGEST_HEADER)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) and header.get("schema") == schema else {}
