"""How often to commit: as often as 1 % of the time allows.

A commit that takes c seconds, in every n rounds of r seconds each, takes the fraction c / (c + n r) of a training's
time. It is at most f where

    n  >=  (1 / f - 1) c / r

and what a failure costs grows with n, so the least such n is the best. Both c and r are measured as training goes on. A
large model with small batches commits seldom, a small one in each round. The clock is the host's: copies that a GPU has
only queued count as rounds.

Ranks must commit before the same round. So rank 0 measures, and sends n to the others with each commit, which sends
something anyway.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, SupportsIndex, TypeAlias

from hvd_hetero.checks import integer

COMMIT_FRACTION = 0.01
"""f, the fraction of a training's time that commits may take."""

Every: TypeAlias = int | Literal["auto"]
"""A number of rounds, or as many as ``CommitPace`` says."""


def every(name: str, value: SupportsIndex | str, *, remedy: str) -> Every:
    """Return the user's choice after checking it."""
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(f"{name} must be a number of rounds or 'auto', got {value!r}; {remedy}")
        return "auto"
    return integer(name, value, 1, remedy=f"'auto' keeps to a hundredth of the time, and {remedy}")


class CommitPace:
    """One rank's times of its commits, and rank 0's pace for them. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin a new membership: with other ranks, rounds and commits take another time."""
        self.rounds = 1
        """Rounds between two commits, as rank 0 decided."""
        self._most = 1
        # Of each of the last five commits: what this rank did alone, and what ranks did together.
        self._commits_s: deque[tuple[float, float]] = deque(maxlen=5)
        self._together_s = 0.0
        self._round_s = math.nan
        self._last: tuple[int, float] | None = None

    @contextmanager
    def commit(self, rounds: int) -> Iterator[None]:
        """Time a commit that comes after this many rounds of the training."""
        # At most twice as many from one commit to the next, so that one long round or commit has no lasting effect.
        self._most = 2 * self.rounds
        self._together_s = 0.0
        begin_s = self._clock()
        if self._last is not None and rounds > self._last[0]:
            self._round_s = (begin_s - self._last[1]) / (rounds - self._last[0])
        yield
        end_s = self._clock()
        self._commits_s.append((end_s - begin_s - self._together_s, self._together_s))
        self._last = (rounds, end_s)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Time what ranks do together in a commit, including the wait for late ones."""
        begin_s = self._clock()
        yield
        self._together_s += self._clock() - begin_s

    @property
    def paid_for(self) -> int:
        """Rounds until the next commit, by what this rank has measured; all ranks use rank 0's number."""
        if not self._commits_s or not self._round_s > 0.0:
            return 1
        alone_s, together_s = ([commit_s[part] for commit_s in self._commits_s] for part in (0, 1))
        # Alone, the second longest: one stumble does not count, and few of the others take more. By the median commits
        # took 0.010 to 0.013 of the time, because such times are skewed. Together, the shortest: more was waiting for a
        # late rank, for which the next exchange of gradients would have waited instead. (An average with neighbours
        # would not have: there some waiting is a cost that is left out.)
        commit_s = sorted(alone_s)[-2:][0] + min(together_s)
        least = math.ceil((1.0 / COMMIT_FRACTION - 1.0) * commit_s / self._round_s)
        return min(max(least, 1), self._most)

    def is_due(self, chosen: Every, rounds: int) -> bool:
        """Return whether so many rounds since the last commit are enough."""
        return rounds >= (self.rounds if chosen == "auto" else chosen)
