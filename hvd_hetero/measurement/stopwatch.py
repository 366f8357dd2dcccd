"""What takes the time of work that runs behind the clock, on a processor with a queue."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Stopwatch"]


class Stopwatch(Protocol):
    """Takes the time of work that is queued."""

    def start(self) -> None:
        """What is queued from now on counts."""

    def stop(self) -> None:
        """What is queued from now on does not."""

    def read(self) -> float:
        """The seconds of all that counted since it was read last, now that it is done; NaN where it is not."""
