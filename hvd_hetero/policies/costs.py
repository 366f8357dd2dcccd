r"""What a sample costs each rank, averaged for as long as it only seems to change.

In a period (an epoch, say) a sample took rank i c_i seconds in the mean of K_i rounds. Its relative error is
e_i = s_i / sqrt(K_i), with s_i² the relative variance of rounds, averaged over eight periods. What all ranks have in
common moves no share, so periods are compared without it:

    C_i <- g C_i,            g = median_i c_i / C_i
    m_i <- min(m_i + 1, 8)   where (c_i / C_i - 1)² <= z² (e_i² (1 + 1 / m_i) + G)
    m_i <- 1                 else: it has moved
    C_i <- C_i + (c_i - C_i) / m_i

with the former m_i in the condition, G = 2 sum_j e_j² / n², about the variance of g, and z = sqrt(2 ln 100 n). So
levels are in the seconds of the latest period, however many there were. A cost that only scatters is known better with
every period, and for one that moves the last period counts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hvd_hetero.kept import Figure, Kept
from hvd_hetero.rounds import RoundTable

# The longest average, and that of the scatter (arbitrary).
_PERIODS_AVERAGED = 8.0

Floats = npt.NDArray[np.float64]


class Costs(Kept):
    """Seconds per sample of every rank; their common factor is the latest period's."""

    KEPT = tuple(map(Figure, ("_level", "_periods", "_variance", "_costs", "_squares", "_rounds", "_ended")))

    def __init__(self, workers: int) -> None:
        self._level = np.zeros(workers)  # C_i; 0: not known
        self._periods = np.zeros(workers)  # m_i
        self._variance = np.zeros(workers)  # s_i²
        self._ended = 0.0  # periods
        # With 100 (arbitrary), chance is taken for a move on one of n ranks in 1 % of the periods at most, if rounds
        # scatter normally. That loses the average of that rank and nothing else. As many digits as the logarithms of
        # all processors have in common; all other operations are correctly rounded, and so the same everywhere.
        self._z = round(math.sqrt(2.0 * math.log(100.0 * max(workers, 1))), 6)
        self._forget_period()

    @property
    def known(self) -> bool:
        """True if every rank's cost is known."""
        return bool((self._level > 0).all())

    @property
    def per_sample(self) -> Floats:
        """Seconds per sample of each rank, C_i."""
        return self._level

    def restart(self) -> None:
        """Forget the costs, which no longer hold, but not how much they scatter."""
        self._level = np.zeros(len(self._level))

    def add_round(self, table: RoundTable) -> None:
        """Add a finished round: the seconds that each rank was at work, where they are credible."""
        seconds, samples = table.busy_s, table.column("timed_samples")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            cost = seconds / samples
        # Within what a float32 holds, so that no sum or square overflows.
        credible = (cost > np.finfo(np.float32).tiny) & (cost < np.finfo(np.float32).max)
        cost = np.where(credible, cost, 0.0)
        self._costs += cost
        self._squares += cost * cost
        self._rounds += credible

    def end_period(self, least: int = 1) -> bool:
        """Learn from the period, if every rank was timed in ``least`` rounds of it, and return whether it has ended."""
        if self._rounds.min() < least:
            return False
        cost = self._costs / self._rounds
        if self._rounds.min() > 1:  # one round does not scatter
            mean_square = self._squares / self._rounds / (cost * cost)
            variance = np.maximum(mean_square - 1.0, 0.0) * self._rounds / (self._rounds - 1.0)
            self._ended += 1.0
            self._variance = self._variance + (variance - self._variance) / min(self._ended, _PERIODS_AVERAGED)
        e2 = self._variance / self._rounds  # e_i²
        self._forget_period()
        if not self.known:
            self._level, self._periods = cost, np.ones(len(cost))
            return True
        # What all have in common moves the level. Were the period divided by it instead, each period would leave its
        # error in a scale that nothing holds, and that drifts without end.
        self._level = self._level * np.median(cost / self._level)
        change = cost / self._level - 1.0
        of_median = 2.0 * math.fsum(e2.tolist()) / len(cost) ** 2
        stays = change * change <= self._z * self._z * (e2 * (1.0 + 1.0 / self._periods) + of_median)
        # Considered: an average without this test. On steady ranks it is as good. Where a rank is half as fast for 60
        # to 200 rounds it makes two to four times the splits, and 2 to 7 % fewer samples per second, in simulations.
        self._periods = np.where(stays, np.minimum(self._periods + 1.0, _PERIODS_AVERAGED), 1.0)
        self._level = self._level + (cost - self._level) / self._periods
        return True

    def _forget_period(self) -> None:
        self._costs, self._squares, self._rounds = (np.zeros(len(self._level)) for _ in range(3))
