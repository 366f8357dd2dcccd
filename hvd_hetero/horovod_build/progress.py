"""The progress of a build: a live line on a terminal, one plain line per stage and per tenth elsewhere.

Everything goes to standard error: standard output belongs to what other programs read.
"""

import sys
import time
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["LiveReporter", "PlainReporter", "Reporter", "SilentReporter", "make_reporter"]


class Reporter(Protocol):
    """What a build tells whoever watches it. Entered before the first stage, left when the build ends or fails."""

    def stage(self, name: str) -> None:
        """Begin a stage; the one before is done."""

    def percent(self, value: int) -> None:
        """Report how much of the current stage is done."""

    def note(self, text: str) -> None:
        """Say something that is to stay readable."""

    def __enter__(self) -> "Reporter": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SilentReporter:
    """Says nothing."""

    def stage(self, name: str) -> None:
        """Say nothing."""

    def percent(self, value: int) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def __enter__(self) -> "SilentReporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainReporter(SilentReporter):
    """One line per stage and per tenth of a stage, each with the seconds since the start: for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start_s = time.monotonic()
        self._stage = ""
        self._tenths = 0

    def stage(self, name: str) -> None:
        """Begin a stage with a line of its own."""
        self._stage, self._tenths = name, 0
        self.note(name)

    def percent(self, value: int) -> None:
        """Write a line whenever another tenth is done."""
        if value // 10 > self._tenths:
            self._tenths = value // 10
            self.note(f"{self._stage}: {self._tenths * 10} %")

    def note(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"[{time.monotonic() - self._start_s:5.0f} s] {text}\n")
        self._stream.flush()


class LiveReporter(SilentReporter):
    """A line per stage on a terminal, with a bar while the share that is done is known, and the elapsed time."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def stage(self, name: str) -> None:
        """Finish the line of the stage before and begin another."""
        self._finish()
        self._task = self._progress.add_task(name, total=None)

    def percent(self, value: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, total=100, completed=min(value, 99))

    def note(self, text: str) -> None:
        """Print above the live lines."""
        self._progress.console.print(text, highlight=False)

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=100, completed=100)

    def __enter__(self) -> "LiveReporter":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()


def make_reporter(quiet: bool, stream: TextIO | None = None) -> Reporter:
    """Return the reporter that fits the stream, which is standard error unless given."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentReporter()
    console = Console(file=stream)
    return LiveReporter(console) if console.is_terminal and not console.is_dumb_terminal else PlainReporter(stream)
