"""Open and write files that users name; a path that is no file or never ends is an error, not a wait.

A file is written whole or not at all: the text goes to another file beside, which takes the name at the end.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

__all__ = ["check_output", "named", "open_file", "read_text", "write_whole"]

_BEGIN = 2048  # bytes by which a file is known

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def named(path: str | Path) -> str:
    """Return a path as errors show it, on one line."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading: a device has no end, and a pipe may have no writer."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(f"{named(path)} is {_KINDS.get(kind, 'no file')}; name a file")
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


def check_output(path: Path, name: str, kind: str, known: Callable[[bytes], bool]) -> None:
    """Raise if ``write_whole`` could not write there, or would overwrite something else; called before the work.

    ``name`` is the parameter that holds the path; ``known`` returns whether a file with this beginning is of ``kind``.
    """
    found = stat.S_IFMT(path.stat().st_mode) if os.path.exists(path) else stat.S_IFREG
    if found != stat.S_IFREG:
        raise ValueError(
            f"{name} must name a file that can be written, and {named(path)} is {_KINDS.get(found, 'no file')}; "
            "name a file, new or of an earlier time"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent):  # root may write to folders that take no file
            pass
    except OSError as error:
        raise ValueError(
            f"{name} must name a file that can be written, got {named(path)}: {error.strerror or error}; name another"
        ) from None
    if os.path.exists(path):
        with open_file(path) as file:
            begin = file.read(_BEGIN)
        if begin and not known(begin):
            raise ValueError(
                f"{name} names {named(path)}, which exists and is no {kind}; name another file, or move it"
            )


@contextmanager
def write_whole(path: Path) -> Iterator[IO[str]]:
    """Give a file to write to, which takes the place of ``path`` if no error comes: a reader never sees half of it."""
    path = path.resolve()  # a link stays one
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=path.suffix, delete=False) as file:
        part = Path(file.name)
        try:
            yield file
            file.close()  # some file systems report a full disk only now
            part.chmod(0o666 & ~_umask())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
