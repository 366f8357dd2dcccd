r"""What a sample costs each rank, averaged for as long as it only seems to change.

In a period (an epoch, say) rank i took c_i seconds per sample, which its K_i rounds tell to a share e_i: their relative
standard deviation over sqrt(K_i). What all ranks have in common moves no share, so periods are compared without it:

    g = median_i c_i / C_i,     u_i = c_i / g
    C_i <- C_i + (u_i - C_i) / m_i,   m_i <- min(m_i + 1, 8)    where |u_i / C_i - 1| <= z e_i sqrt(2 + 1 / m_i)
    C_i <- u_i,                       m_i <- 1                  else: it has moved

So a cost that only scatters is known better with every period, and one that moves is that of its last period. Taking
chance for a move loses the average of that rank and nothing else, and with z = sqrt(2 ln 20 n) happens to one of the n
in a twentieth of the periods at most (if rounds scatter normally; the 2 is for g, which scatters, too). The 20 and the
8 are arbitrary.

Every operation here is correctly rounded, and element by element: the same tables give the same costs everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.rounds import RoundTable

__all__ = ["Costs"]

_SELDOM, _LONGEST = 20.0, 8.0

Floats = npt.NDArray[np.float64]


class Costs:
    """Seconds per sample of every rank, up to a factor that they have in common."""

    def __init__(self, workers: int) -> None:
        self._level = np.zeros(workers)  # C_i; 0: not known
        self._periods = np.zeros(workers)  # m_i
        # Of no more digits than logarithms have in common on all processors.
        self._chance = round(math.sqrt(2.0 * math.log(_SELDOM * max(workers, 1))), 6)  # z
        self._forget_period()

    @property
    def known(self) -> bool:
        """Whether every rank's is."""
        return bool((self._level > 0).all())

    @property
    def per_sample(self) -> Floats:
        """C_i."""
        return self._level

    def take(self, table: RoundTable) -> None:
        """A round is over: the seconds that each rank was at work, where they say something."""
        seconds, samples = table.busy_s, table.column("timed_samples")
        tells = (samples > 0) & np.isfinite(seconds) & (seconds > 0)
        seconds, samples = np.where(tells, seconds, 0.0), np.where(tells, samples, 0.0)
        self._seconds += seconds
        self._squares += seconds * seconds
        self._samples += samples
        self._rounds += tells

    def end_period(self) -> bool:
        """Learn from the period, if every rank was timed in it; else it goes on, and the answer is False."""
        if not self._rounds.all():
            return False
        cost, mean_s = self._seconds / self._samples, self._seconds / self._rounds
        variance = np.maximum(self._squares / self._rounds - mean_s * mean_s, 0.0)
        chance = np.sqrt(variance / self._rounds) / mean_s
        self._forget_period()
        if not self.known:
            self._level, self._periods = cost, np.ones(len(cost))
            return True
        cost = cost / np.median(cost / self._level)
        stays = np.abs(cost / self._level - 1.0) <= self._chance * chance * np.sqrt(2.0 + 1.0 / self._periods)
        self._periods = np.where(stays, np.minimum(self._periods + 1.0, _LONGEST), 1.0)
        self._level = self._level + (cost - self._level) / self._periods
        return True

    def _forget_period(self) -> None:
        self._seconds, self._squares, self._samples, self._rounds = (np.zeros(len(self._level)) for _ in range(4))

    def state(self) -> dict[str, list[float]]:
        """Plain data."""
        return {name: getattr(self, f"_{name}").tolist() for name in _COLUMNS}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        columns = {name: np.array(state[name], dtype=np.float64) for name in _COLUMNS}
        if any(c.shape != self._level.shape or not (np.isfinite(c) & (c >= 0)).all() for c in columns.values()):
            raise ValueError(
                f"state: {', '.join(_COLUMNS)} must each hold {len(self._level)} finite numbers, 0 or more, got {state}"
                "; resume with the number of ranks that saved it"
            )
        for name, column in columns.items():
            setattr(self, f"_{name}", column)


_COLUMNS = ("level", "periods", "seconds", "squares", "samples", "rounds")
