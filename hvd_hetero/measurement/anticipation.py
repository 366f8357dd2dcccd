r"""When the first rank will be done, so that the others need not keep it waiting.

In a round that ends with the first rank, the others finish their current micro-batch, and the first waits for them. On
a rank of a third of the speed, half a micro-batch is a good part of a round. Rank i can foresee this. Let the first
rank have been at work for L in the last round, and this one for t in this round (both without waiting for others). Of t
the update and the wait for the first samples take t_0. With k micro-batches done, another one lasts d = (t - t_0) / k:

    t + d <= L         it is done in time
    t < L < t + d      the first rank waits t + d - L for it, or this one idles for L - t: it is begun if t + d/2 <= L

If L is equally likely at every position, the first rank waits d/8 on average instead of d/2, and this one
idles for d/8.
Differences from the paper (non-blocking-sgd, Algorithm 1): there, only the signal stops a rank.
"""

from __future__ import annotations

import math
from typing import Any

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.rounds import FinishedRound


class Anticipation(Kept):
    """One rank's forecast of the end of a round."""

    __slots__ = ("_length_s",)
    KEPT = (Figure("_length_s", unknown=math.nan),)

    def __init__(self) -> None:
        self._length_s = math.nan  # L

    def learn(self, finished: FinishedRound) -> None:
        """Learn from a finished round, for which all ranks' times are known."""
        table = finished.table
        done = zip(table.busy_s.tolist(), table.figures("samples"), finished.plan.samples, strict=True)
        # If no rank was done in the last round (all had expected the end too early), the next one has no forecast.
        self._length_s = min((busy_s for busy_s, x, full in done if x >= full > 0), default=math.nan)

    def ends_before(self, busy_s: Any, once_s: Any, done: Any) -> Any:
        """Return whether the round ends before the middle of another micro-batch, after ``done``; ``once_s`` is t_0.

        Takes numbers, or arrays that go together, and answers element by element.
        """
        return busy_s + 0.5 * (busy_s - once_s) / done > self._length_s
