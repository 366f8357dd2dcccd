"""Open files that users name; a path that is no file or never ends is an error, not a wait."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO


def named(path: str | Path) -> str:
    """Return a path as errors show it, on one line."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading: a device has no end, and a pipe may have no writer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{named(path)} is no file; name a file")
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{named(path)} cannot be read: {error.strerror or error}; check the path") from None


def read_text(path: Path, most_bytes: int) -> str:
    """Return the content of a text file of at most ``most_bytes``."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1)  # some files do not show their size
    if len(content) > most_bytes:
        raise ValueError(
            f"{named(path)} holds more than {most_bytes} bytes, which is the limit; is it the file you mean?"
        )
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{named(path)} is no text: {error.reason} at byte {error.start}; save it as UTF-8") from None
