"""The console on standard output, and what is being done on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def printer(**options: Any) -> Console:
    """Return a console of rich on standard output."""
    from rich.console import Console

    return Console(highlight=False, **options)


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
