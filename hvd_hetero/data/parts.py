"""A micro-batch that does not fit in memory, in smaller parts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from hvd_hetero.rounds import MicroBatch, SampleFigures

_FEW = 2  # a batch norm over one sample is an error


class Parts:
    """Hands out the samples of a micro-batch, at most ``most`` at a time, until all are done.

    Right after a failed attempt (``cramped``) the first part is a small one: the names in the user's code still hold
    the graph of that attempt, until the code binds them again, which a small part does before memory runs short again.
    """

    def __init__(self, work: MicroBatch, samples: list[Any], most: int, *, cramped: bool) -> None:
        self._work = work
        self._waiting = deque([samples])
        self._most = most
        self._part: list[Any] = []
        self.cramped = cramped

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> tuple[MicroBatch, list[Any]]:
        """Take the next part: a micro-batch, the last of its round if the whole one was, and its samples."""
        part = self._waiting.popleft()
        size = min(self._most, _FEW) if self.cramped else -(-len(part) // -(-len(part) // self._most))
        if len(part) > size:
            self._waiting.appendleft(part[size:])
            part = part[:size]
        self._part = part
        last = self._work.last and not self._waiting
        work = self._work
        if work.figures is not None:
            of = len(part) / work.samples  # of its parts, nearly
            work = replace(work, figures=SampleFigures(*(figure * of for figure in work.figures)))
        return replace(work, samples=len(part), last=last), part

    def again(self, most: int) -> None:
        """Hand out the part just taken once more, in smaller ones: it did not fit either."""
        self._waiting.appendleft(self._part)
        self._most, self.cramped = most, True
