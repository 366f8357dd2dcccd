"""The files of one run. ``Telemetry(rotate_bytes=…)`` begins another one whenever a file has grown to a size.

Each file names the run and counts its part of it, from 0. The latest part has the name that the user gave; when the
next one begins, it takes the first free number, ``run.1.jsonl`` and so on. Other runs may have taken numbers between.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.files import named, open_file
from hvd_hetero.telemetry.reader import Part

__all__ = ["RunFiles", "joined", "parts_of"]

_LONGEST_HEADER = 10_000  # bytes; headers take some hundred


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run that are there, in order, and how many are not."""

    paths: list[Path]
    missing: int = 0
    run: str | None = None
    numbers: tuple[int, ...] = ()
    """The number of each file's part, when it was looked at; empty for a file that is a run by itself."""

    def still(self, headers: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether files that were read later begin with these headers: meanwhile another part may have begun."""
        seen = [(header.get("run"), header.get("part")) for header in headers]
        return not self.numbers or seen == [(self.run, number) for number in self.numbers]


def parts_of(path: Path, schema: str) -> RunFiles:
    """Find all files of the run that a file belongs to; the file alone if it does not say that there are others.

    A run that was killed when a part was to begin leaves no file of its name, or one without a line; its others are
    found all the same.
    """
    run = _header(path, schema).get("run") if _has_line(path) else _latest_run(path, schema)
    if not isinstance(run, str):
        return RunFiles([path])
    found: dict[int, Path] = {}
    for other in _siblings(path, {path.stem, re.sub(r"\.\d+$", "", path.stem)}):
        header = _header_if_any(other, schema)
        part = header.get("part")
        if header.get("run") != run or type(part) is not int or part < 0:
            continue
        if part in found:
            raise ValueError(
                f"{named(other)} and {named(found[part])} are the same part of one run; move one of them elsewhere"
            )
        found[part] = other
    numbers = tuple(sorted(found))
    return RunFiles([found[part] for part in numbers], max(found, default=-1) + 1 - len(found), run, numbers)


def joined(paths: Sequence[Path], read: Sequence[Part]) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and columns of a run that was read in parts, which must agree and follow each other."""
    header, before = read[-1].header, -1
    for path, part in zip(paths, read, strict=True):
        for name in ("policy", "workers", "global_batch", "every"):
            if part.header[name] != header[name]:
                raise ValueError(
                    f"{named(path)}, line 1: {name} must be {header[name]!r}, as in the other files of this run, got "
                    f"{part.header[name]!r}; move that file elsewhere"
                )
        rounds = part.columns["round"].tolist()
        if rounds and rounds[0] <= before:
            raise ValueError(
                f"{named(path)}, line 2: round must be larger than {before}, the last one of the part before, got "
                f"{rounds[0]}; move that file elsewhere"
            )
        before = rounds[-1] if rounds else before
    if len(read) == 1:
        return header, read[0].columns
    return header, {name: np.concatenate([part.columns[name] for part in read]) for name in read[-1].columns}


def _latest_run(path: Path, schema: str) -> str | None:
    """Return the run that was last written under this name."""
    headed = [(other, _header_if_any(other, schema).get("run")) for other in _siblings(path, {path.stem})]
    runs = [(other.stat().st_mtime_ns, run) for other, run in headed if isinstance(run, str)]
    return max(runs)[1] if runs else None


def _siblings(path: Path, stems: Collection[str]) -> Iterator[Path]:
    """Yield files of these names: the number at the end may be a part's, or belong to the name that the user gave."""
    name = re.compile(f"({'|'.join(map(re.escape, stems))})" + r"(\.\d+)?" + re.escape(path.suffix))
    if not path.parent.is_dir():
        return iter(())
    return (other for other in sorted(path.parent.iterdir()) if name.fullmatch(other.name) and other.is_file())


def _has_line(path: Path) -> bool:
    """Return whether the file is there and its first line is whole, or longer than any header."""
    return os.path.exists(path) and ((line := _first_line(path)).endswith(b"\n") or len(line) == _LONGEST_HEADER)


def _first_line(path: Path) -> bytes:
    with open_file(path) as file:
        return file.readline(_LONGEST_HEADER)


def _header_if_any(path: Path, schema: str) -> dict[str, Any]:
    try:
        return _header(path, schema)
    except (OSError, ValueError):  # it names no run, and may be any file
        return {}


def _header(path: Path, schema: str) -> dict[str, Any]:
    """Return the first line; empty if it is not telemetry, for which the reader of all lines raises."""
    line = _first_line(path)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) and header.get("schema") == schema else {}
