"""Reads a stream, or a part of one, from front to end: samples have numbers, and marks say where it opens again.

    m_0 … ● … ● … s_c … s_n          ● marks;  c: the first sample that is not done;  n: the sample that is read next

A source yields samples, and between them ``Mark(state)`` wherever it can: it can be opened there again. Three things
always hold, whatever is read ahead, and however many rounds are in flight:

- sample k is the k-th of the source, however often and wherever it was opened again;
- the oldest mark that is kept lies at or before s_c, and only one does: what lies before it is done;
- a state is that mark, how far samples are done, and the numbers before that which are not. So to go on reads samples
  again from the mark on, and never one that lies before it; a source without marks is read again from its front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """Stands between two samples of a source, which can be opened there again by this state."""

    state: Any


class Place:
    """How far a stream is read, as all ranks know it."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or place_after(0)
        begin, opened_by = state["mark"]
        self.number: int = begin
        """The number of the sample that is read next."""
        self.count = 0
        """The samples that it has passed, but for those that were done before."""
        self.ended = False
        self.begun_again = False
        """Whether somebody reads the stream from its front again already."""
        self.marks: deque[tuple[int, Any]] = deque([(begin, opened_by)])
        self._until: int = state["until"]  # samples before this one are done,
        self._left = set(state["left"])  # but for these

    def step(self) -> int | None:
        """Pass over the next sample, and return its number; None if it is done."""
        self.number += 1
        number = self.number - 1
        if number < self._until and number not in self._left:
            return None
        self.count += 1
        return number

    def numbers(self, count: int) -> list[int]:
        """Pass over so many samples that are not done, and return their numbers."""
        found: list[int] = []
        while len(found) < count:
            if (number := self.step()) is not None:
                found.append(number)
        return found

    def forget(self, first: int) -> None:
        """Forget the marks that are not needed any more: all samples before ``first`` are done."""
        while len(self.marks) > 1 and self.marks[1][0] <= first:
            self.marks.popleft()

    def state_dict(self, unfinished: Collection[int]) -> dict[str, Any]:
        """Return where to go on, as plain data; ``unfinished`` are the samples that were read and are not done."""
        self.forget(min(unfinished, default=self.number))
        left = sorted([*unfinished, *(number for number in self._left if number >= self.number)])
        return {"mark": list(self.marks[0]), "until": max(self.number, self._until), "left": left}


def place_after(samples: int) -> dict[str, Any]:
    """Return the state of a place after the first samples of a stream, which is opened at its front."""
    return {"mark": [0, None], "until": samples, "left": []}


class Reader(Place):
    """A stream, of which ``source`` gives the samples from a mark on; None: from its front."""

    def __init__(self, source: Callable[[Any], Iterable[Any]], state: Mapping[str, Any] | None = None) -> None:
        super().__init__(state)
        self._open = source
        self._source: Iterator[Any] | None = None

    def read(self, count: int) -> list[tuple[int, Any]]:
        """Return the next samples with their numbers: so many that are not done, or all that there are."""
        found: list[tuple[int, Any]] = []
        while len(found) < count and not self.ended:
            if self._source is None:
                self._source = iter(self._open(self.marks[-1][1]))
            item = next(self._source, _END)
            if item is _END:
                self.ended = True
                if self.number < self._until:
                    raise ValueError(
                        f"the state is of a stream with at least {self._until} samples, this one has {self.number}; "
                        "resume with the same data"
                    )
            elif isinstance(item, Mark):
                self.marks.append((self.number, item.state))
            elif (number := self.step()) is not None:
                found.append((number, item))
        return found


_END = object()
