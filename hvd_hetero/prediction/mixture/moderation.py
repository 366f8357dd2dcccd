"""How much a round counts: fully if it is like the others, less if it is out of all proportion. Not in the papers.

With ``d_t >= 0`` the size of round t (a logarithm) and ``s`` the running mean of the sizes, each counted as
at most ``c s``,

    l = max(c s, l_0)        κ_t = min(1, l / d_t)        s <- s + (min(d_t, l) - s) max(1/t, 1/100)

and whoever learns multiplies its differences by κ, its squared errors by κ². Why: squares of one round that was 1000
times too slow (a suspended machine, a debugger) would outweigh ten thousand ordinary ones, and all learning from
squares be over. A change of scale is taken in all the same: s grows by up to c/100 of itself a round.

Arbitrary: c = 10 (sudden changes of the CPU stay whole), l_0 = 0.1, counted from the first round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_TIMES, _LEAST, _ROUNDS = 10.0, 0.1, 100


class Moderation:
    """The running size of rounds."""

    __slots__ = ("_mean", "_rounds")

    def __init__(self) -> None:
        self._mean, self._rounds = 0.0, 0

    def __call__(self, size: float) -> float:
        """``κ`` for a round of this size, which is counted."""
        limit = max(_TIMES * self._mean, _LEAST)
        self._rounds += 1
        self._mean += (min(size, limit) - self._mean) / min(self._rounds, _ROUNDS)
        return limit / size if size > limit else 1.0

    def state(self) -> list[float]:
        """Plain data."""
        return [self._mean, self._rounds]

    def restore(self, state: Sequence[float]) -> None:
        """Take it back."""
        mean, rounds = float(state[0]), int(state[1])
        if not (math.isfinite(mean) and mean >= 0.0 and rounds >= 0):
            raise ValueError(f"state: moderation must be a size and a number of rounds, neither below 0, got {state!r}")
        self._mean, self._rounds = mean, rounds
