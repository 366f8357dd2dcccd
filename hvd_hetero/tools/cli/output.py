"""Standard output, whose reader may leave before the end: ``hvd-hetero report run.jsonl | head -1``."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def printer(**options: Any) -> Console:
    """Return a console of rich on standard output, which raises BrokenPipeError instead of ending the process."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Printer(highlight=False, **options)


def reader_left() -> bool:
    """Hand over what was printed, and return True if no reader is left; then Python reports no error for it."""
    looking = select.poll()
    try:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        looking.register(number := sys.stdout.fileno(), 0)
    except (AttributeError, ValueError):  # None, closed, or no file: io.UnsupportedOperation is a ValueError
        return False
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in looking.poll(0)):
        return False
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), number)
    return True


@contextmanager
def status(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on standard error, if that is a terminal, what is being done: ``first``, then what the function is told."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(first) as shown:
        yield lambda text: shown.update(Text(text))
