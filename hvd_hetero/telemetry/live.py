"""Rank 0's view of a training while it runs: ``LoadBalance(progress=True)``.

There is no thread: the view is a listener, and writes at most once a second, when a record comes.
"""

from __future__ import annotations

import io
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvd_hetero.telemetry.bottom_line import BottomLine, OpenedTerminal, Terminal, claimed
from hvd_hetero.telemetry.records import Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["PROGRESS", "LiveView"]

PROGRESS = "HVD_HETERO_PROGRESS"
"""Names the terminal to write to, for launchers that give ranks none: ``HVD_HETERO_PROGRESS=$(tty) horovodrun …``."""

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_KEPT = 0.9  # of the sums, from round to round: figures cover the last ten rounds or so
_SHOWN = 8
"""More ranks than this are not listed one by one."""
_WAITS = 0.1  # a share of waiting from which on the figure is in yellow (arbitrary)


class LiveView:
    """A listener that shows rounds, samples per second, waiting and batches in the terminal's last line."""

    def __init__(
        self,
        line: BottomLine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line = line
        self._looked = line is not None
        self._clock = clock
        self._claim: io.FileIO | None = None
        self._console: Console | None = None
        self._next_s = -math.inf
        self._records = 0
        self._samples = self._elapsed_s = self._known_s = 0.0
        self._wait_s: list[float] = []

    def __call__(self, record: Record) -> None:
        """Take a round into account, and show it if the last time is long enough ago."""
        if not self._looked:
            self._looked = True
            self._line = self._taken(_terminal())
        if self._line is None:
            return
        self._learn(record)
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + _PAUSE_S
            self._line.show(self._rendered(self._text(record), self._line.columns))

    def close(self) -> None:
        """Give the line back to the terminal."""
        if self._line is not None:
            self._line.close()
        if self._claim is not None:
            self._claim.close()

    def _taken(self, terminal: Terminal | None) -> BottomLine | None:
        """Return the terminal's last line; None if there is no terminal, or another view has it."""
        if terminal is None:
            return None
        try:
            self._claim = claimed(terminal)
        except BlockingIOError:
            logger.warning(
                "another live view has this terminal, so this one shows nothing; name another one in %s", PROGRESS
            )
            return None
        return BottomLine(terminal)

    def _rendered(self, text: Text, columns: int) -> str:
        """Return the text with the terminal's colours, cut to so many columns."""
        from rich.console import Console

        if self._console is None:  # making one takes longer than using it
            self._console = Console(file=io.StringIO(), force_terminal=True)
        text.truncate(max(columns, 1), overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(text, end="", no_wrap=True, crop=False, soft_wrap=True)
        return captured.get()

    def _learn(self, record: Record) -> None:
        self._records += 1
        # The first round that is seen pays for the start, and counts only until there is another.
        kept = 0.0 if self._records == 2 else _KEPT
        elapsed_s = record["elapsed_s"]
        self._samples = kept * self._samples + sum(record["samples"])
        self._elapsed_s = kept * self._elapsed_s + elapsed_s
        if record["wait_s"][0] is not None:  # only the last record of a run does not know it
            self._known_s = kept * self._known_s + elapsed_s
            before = self._wait_s or [0.0] * len(record["wait_s"])
            self._wait_s = [kept * old + (new or 0.0) for old, new in zip(before, record["wait_s"], strict=True)]

    def _text(self, record: Record) -> Text:
        from rich.text import Text

        shares = [wait / self._known_s if self._known_s > 0 else 0.0 for wait in self._wait_s] or [0.0]
        waits, most = statistics.fmean(shares), shares.index(max(shares))
        told = Text.assemble(
            (" hvd-hetero ", "reverse"),
            f" round {record['round']:,} of epoch {record['epoch']:,}",
            (" · ", "dim"),
            (f"{self._samples / self._elapsed_s if self._elapsed_s > 0 else 0.0:,.0f} samples/s", "bold"),
            (" · ", "dim"),
            (f"waiting {waits:.0%}", "yellow" if waits >= _WAITS else "green"),
        )
        if len(shares) > 1:
            told.append(f", rank {most} most: {shares[most]:.0%}")
        told.append(" · ", "dim")
        return told.append(f"batches {_batches(record['samples'])}")


def _batches(samples: list[int]) -> str:
    if len(samples) <= _SHOWN:
        return " ".join(map(str, samples))
    return f"{min(samples)} to {max(samples)}, median {statistics.median(samples):g}"


def _terminal() -> Terminal | None:
    """Return the terminal to write to: the one named in the environment, else standard error's, if it is one.

    A name has a slash. Without a terminal, ``$(tty)`` is a few words, which name none.
    """
    if os.environ.get("TERM") == "dumb":
        return None
    if "/" in (path := os.environ.get(PROGRESS, "")):
        try:
            return OpenedTerminal(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            logger.warning(
                "the live view shows nothing: %s must name a terminal, as the command tty does, got %r: %s; "
                "name one, or none",
                *(PROGRESS, path, why),
            )
            return None
    return _of_standard_error()


def _of_standard_error() -> Terminal | None:
    """Return the terminal itself: ``sys.stderr`` may be an object that changes the text, as rich's progress bars do."""
    try:
        number = sys.stderr.fileno() if sys.stderr is not None and sys.stderr.isatty() else -1
        if number < 0 or not os.isatty(number):
            return None
    except (OSError, ValueError, AttributeError):  # no file, a closed one, or a stand-in that only writes
        return None
    try:
        return OpenedTerminal(os.ttyname(number))
    except OSError:  # it has no name in this container
        return open(number, "w", encoding="utf-8", closefd=False)
