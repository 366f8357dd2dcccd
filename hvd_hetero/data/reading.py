"""Reads a stream, or a part of one, from front to end: samples have numbers, and marks say where it opens again.

    m_0 … ● … ● … s_c … s_n          ● marks;  c: the first sample that is not done;  n: the sample that is read next

A source yields samples, and between them ``Mark(state)`` wherever it can: it can be opened there again. Three things
always hold, whatever is read ahead, and however many rounds are in flight:

- sample k is the k-th of the source, however often and wherever it was opened again;
- the oldest mark that is kept lies at or before s_c, and only one does: what lies before it is done;
- a state is that mark, and the numbers after it that are done. So to go on reads samples again from the mark on, and
  never one that lies before it; a source without marks is read again from its front.
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
        begin, opened_by = (0, None) if state is None else state["mark"]
        self.number: int = begin
        """The number of the sample that is read next."""
        self.ended = False
        self.marks: deque[tuple[int, Any]] = deque([(begin, opened_by)])
        self._done = set() if state is None else set(state["done"])

    def numbers(self, count: int) -> list[int]:
        """Pass over so many samples that are not done, and return their numbers."""
        found: list[int] = []
        while len(found) < count:
            if self.number not in self._done:
                found.append(self.number)
            self.number += 1
        return found

    def forget(self, first: int) -> None:
        """Forget the marks that are not needed any more: all samples before ``first`` are done."""
        while len(self.marks) > 1 and self.marks[1][0] <= first:
            self.marks.popleft()

    def state_dict(self, unfinished: Collection[int]) -> dict[str, Any]:
        """Return where to go on, as plain data; ``unfinished`` are the samples that were read and are not done."""
        self.forget(min(unfinished, default=self.number))
        begin, _ = self.marks[0]
        left = set(unfinished)
        done = [number for number in range(begin, self.number) if number not in left]
        return {"mark": list(self.marks[0]), "done": done + sorted(n for n in self._done if n >= self.number)}


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
                self._require_all()
            elif isinstance(item, Mark):
                self.marks.append((self.number, item.state))
            else:
                if self.number not in self._done:
                    found.append((self.number, item))
                self.number += 1
        return found

    def _require_all(self) -> None:
        if self._done and max(self._done) >= self.number:
            raise ValueError(
                f"the state is of a stream with at least {max(self._done) + 1} samples, this one has {self.number}; "
                "resume with the same data"
            )


_END = object()
