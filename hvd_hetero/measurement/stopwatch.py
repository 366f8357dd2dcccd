"""The interface of a clock for work that runs behind the host, on a processor with a queue."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Lap(NamedTuple):
    """Seconds of one round, on the device; NaN: not known."""

    work_s: float
    waiting_s: float
    """Seconds of waiting for others."""
    paused_s: float
    """Seconds between, without work that counts."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of the whole round, from the end of the one before."""
        return sum(self)


class Stopwatch(Protocol):
    """Takes the times of work that is queued, a round at a time, behind the host that queues it."""

    def start(self, *, waited: bool = False) -> None:
        """Count what is queued from now on. ``waited``: what came since the last `stop` was waiting for others."""

    def stop(self) -> None:
        """Stop counting what is queued from now on."""

    def forward_done(self, samples: int) -> None:
        """Note that a forward pass is queued; until the next `start`, what counts is its backward pass."""

    def keep(self) -> None:
        """Note that one of several rounds of a lap is queued to its end, which `forget` leaves."""

    def lap(self) -> None:
        """Note that a round is queued to its end. What came since the last `stop` was waiting for others."""

    def read(self) -> Lap:
        """Return the seconds of the last lap, once it is done; NaN if there was none."""

    def forget(self) -> None:
        """Forget what was queued since the last lap, or since `keep`."""

    def catch_up(self) -> None:
        """Return when all that is queued is done."""
