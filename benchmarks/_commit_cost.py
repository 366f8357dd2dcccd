"""Common parts of the ranks of `benchmarks/commit_cost.py`: the size of the model, and the clocks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

WARM_UP, LAYERS = 4, 10
ROUNDS = 160
"""Of a training that chooses by itself when to commit: it takes 1, 2, 4 ... rounds from one to the next until then."""


def width_of(parameters: int) -> int:
    """Return the inputs and outputs of each layer."""
    return int((parameters / LAYERS) ** 0.5)


class Timed:
    """Rounds of a training, and commits of its state, whose methods this replaces; ``held`` gives what to copy."""

    def __init__(self, state: Any, held: Callable[[], list[Any]]) -> None:
        self._commit, self._ask, self._held = state.commit, state.check_host_updates, held
        state.commit, state.check_host_updates = self._timed_commit, self._timed_question
        self._together_s: list[float] = []
        self._rounds: list[tuple[float, float]] = []
        self._commits: list[tuple[float, float]] = []
        self._after: list[int] = []
        self._copies_s: list[float] = []
        self.copies = False

    def begin(self) -> None:
        """Begin a round."""
        self._begin_s = time.perf_counter()

    def end(self) -> None:
        """End a round."""
        self._rounds.append((self._begin_s, time.perf_counter()))

    def _timed_question(self) -> None:
        begin_s = time.perf_counter()
        self._ask()
        self._together_s.append(time.perf_counter() - begin_s)

    def _timed_commit(self) -> None:
        begin_s = time.perf_counter()
        self._commit()
        end_s = time.perf_counter()
        self._commits.append((begin_s, end_s))
        self._after.append(len(self._rounds))
        if self.copies:
            held = copy.deepcopy(self._held())
            self._copies_s.append(time.perf_counter() - end_s)
            del held

    def told(self) -> dict[str, Any]:
        """Return seconds, in order, and the rounds that were over at each commit."""
        return {
            "rounds_s": [end_s - begin_s for begin_s, end_s in self._rounds],
            "commits_s": [end_s - begin_s for begin_s, end_s in self._commits],
            "together_s": self._together_s,
            "commits_at_s": [begin_s for begin_s, _ in self._commits],
            "commits_after": self._after,
            "copies_s": self._copies_s,
        }
