"""The last line of a terminal, kept for one text. All other output scrolls in the lines above it.

Progress bars move the cursor of the line that they are on, and lines of other ranks may come at any time. So nothing
here depends on where the cursor is: the scrolling region (DECSTBM) leaves out the last line, which is written to with
the cursor saved before and restored afterwards. Each update is a single write, between which and others nothing comes.

A terminal may stop taking what is written (Ctrl-S), and a training must not wait for it. So one that is opened here
never makes a writer wait, and an update that it does not take is dropped.

https://vt100.net/docs/vt510-rm/chapter4.html has the sequences.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable
from typing import Protocol

__all__ = ["BottomLine", "OpenedTerminal", "Terminal", "claimed", "size_of"]

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_DOWN, _UP = "\x1bD", "\x1b[A"  # from the last line, the first one scrolls; both stay in their column
_CLEAR, _WHOLE = "\x1b[2K", "\x1b[r"
_LEAST_ROWS = 3


class Terminal(Protocol):
    """The target of what is written: a text stream, such as standard error, or an `OpenedTerminal`."""

    def write(self, text: str, /) -> object:
        """Write; raise BlockingIOError if that would mean waiting, and the text is dropped."""

    def flush(self) -> object:
        """Hand over what was written."""

    def fileno(self) -> int:
        """Return the open file's number."""


class OpenedTerminal:
    """A terminal opened by its name, which takes a text at once, or not at all.

    If it takes a part of a text, the rest is written before the next one: half a sequence would spoil that.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), "w")
        self._rest = b""
        if not self._file.isatty():
            self._file.close()
            raise ValueError(f"{path!r} is no terminal")

    def write(self, text: str) -> None:
        """Write; raise BlockingIOError if nothing of the text was taken."""
        data = self._rest + text.encode()
        taken = self._file.write(data) or 0
        if taken <= len(self._rest) < len(data):
            self._rest = self._rest[taken:]
            raise BlockingIOError("the terminal takes nothing at present")
        self._rest = data[taken:]

    def flush(self) -> None:
        """Do nothing: no text is held back that the terminal would take."""

    def fileno(self) -> int:
        """Return the open file's number."""
        return self._file.fileno()


def claimed(terminal: Terminal) -> io.FileIO | None:
    """Return a file that holds the terminal for one writer until it is closed, or its process ends.

    Raises BlockingIOError if another one holds it. None: this is no terminal of the system, so nothing is shared.
    """
    try:
        file = io.FileIO(os.open(os.ttyname(terminal.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), "w")
    except OSError:  # io.UnsupportedOperation is one
        return None
    try:
        # Of a separate description: a lock on standard error's would be one of the shell's, too.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def size_of(terminal: Terminal) -> tuple[int, int]:
    """Return columns and rows of a terminal; (0, 0) if it does not report them."""
    try:
        columns, rows = os.get_terminal_size(terminal.fileno())
    except OSError:
        return 0, 0
    return columns, rows


class BottomLine:
    """A text in the last line. ``close()`` gives the line back."""

    def __init__(self, terminal: Terminal, size: Callable[[Terminal], tuple[int, int]] = size_of) -> None:
        self._terminal = terminal
        self._size = size
        self._rows = 0  # of the terminal while the last one is kept; 0: none is

    @property
    def columns(self) -> int:
        """The longest text that fits."""
        return max(self._size(self._terminal)[0] - 1, 0)

    def show(self, text: str) -> None:
        """Replace the text, which may hold colours and must fit."""
        rows = self._size(self._terminal)[1]
        if rows < _LEAST_ROWS:
            return
        begins = ""
        if rows != self._rows:
            begins = self._ends() + f"{_DOWN}{_UP}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"
        if self._write(f"{begins}{_SAVE}\x1b[{rows};1H{_CLEAR}{text}{_RESTORE}"):
            self._rows = rows

    def close(self) -> None:
        """Clear the line and give it back; a second call does nothing, unless the terminal did not take the first."""
        if self._write(self._ends()):
            self._rows = 0

    def _ends(self) -> str:
        return f"{_SAVE}\x1b[{self._rows};1H{_CLEAR}{_WHOLE}{_RESTORE}" if self._rows else ""

    def _write(self, sequence: str) -> bool:
        """Return whether the terminal has taken it."""
        try:
            if sequence:
                self._terminal.write(sequence)
                self._terminal.flush()
        except BlockingIOError:
            return False
        return True
