"""Standard output, whose reader may leave before the end: ``hvd-hetero report run.jsonl | head -1``."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

READER_LEFT = 141
"""The exit code of a program that SIGPIPE ends, as shells report it: 128 + 13."""


def printer(**options: Any) -> Console:
    """Return a console of rich on standard output, which raises BrokenPipeError instead of ending the process."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Printer(highlight=False, **options)


def reader_left() -> bool:
    """Hand over what was printed, and return True if no reader is left; then Python reports no error for it."""
    if sys.stdout is None or sys.stdout.closed:
        return False
    try:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        number = sys.stdout.fileno()
    except io.UnsupportedOperation:  # it is no file
        return False
    looking = select.poll()
    looking.register(number, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in looking.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    return True
