"""The progress of a build: a live line on a terminal, one plain line per stage and per tenth elsewhere.

Everything goes to standard error: standard output belongs to what other programs read.
"""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TimeElapsedColumn


class Reporter:
    """What a build tells whoever watches it. Entered before the first stage, left when the build ends or fails."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        bar = (BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
        spinner = SpinnerColumn(finished_text="[green]✓")
        self._progress = Progress(spinner, "{task.description}", *bar, console=console, disable=not self._live)
        self._task: TaskID | None = None
        self._stage, self._tenths = "", 0
        self._start_s = time.monotonic()

    def stage(self, name: str) -> None:
        """Begin a stage; the one before is done."""
        self._finish()
        self._stage, self._tenths = name, 0
        self._task = self._progress.add_task(name, total=None)
        if not self._live:
            self.note(name)

    def percent(self, value: int) -> None:
        """Report how much of the current stage is done."""
        if self._task is not None:
            self._progress.update(self._task, total=100, completed=min(value, 99))
        if not self._live and value // 10 > self._tenths:
            self._tenths = value // 10
            self.note(f"{self._stage}: {self._tenths * 10} %")

    def note(self, text: str) -> None:
        """Say something that is to stay readable; above the live lines, or with the seconds since the start."""
        line = text if self._live else f"[{time.monotonic() - self._start_s:5.0f} s] {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=100, completed=100)

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()
