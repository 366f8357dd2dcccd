r"""Which ranks do best without samples, for LB-BSP with ``may_rest``.

The least share takes rank r the time t_r = (x_min + β_r) / u_r. No split of a round is sooner than that, while r takes
part. Without it the others take T_r, the best time of a split among them. So r costs more than it gives, and rests, if

    T_r < (1 - ε) max(t_r, T),        T the level at which ranks above their least share end together.

Of the ranks by falling t, so many rest as make the round shortest: leaving out one of several that are equally slow
saves nothing. A rank that rests takes part in the sums, and measures nothing. So it is tried again: it gets its least
share for one round in k, which costs t_r - T_r of it:

    k = max(K, (t_r / T_r - 1) / c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.policies.affine_shares import AffineCosts, Floats

# The reasons give the magnitude of each; the digit is arbitrary.
_GAIN_OF_REST = 0.01  # ε: a smaller gain is not seen in measurements
_ROUNDS_BETWEEN_TRIALS = 20  # K: of a rank, however cheap they are
_TIME_OF_TRIALS = 0.002  # c: of all time, a fifth of the gain for which a rank rests


class Resting:
    """The ranks that rest, decided from the tables alike on all ranks."""

    def __init__(self, typical_size: float, least: int, step: int) -> None:
        self._typical_size, self._least, self._step = typical_size, least, step
        self._rounds: dict[int, int] = {}
        """Rounds until the next trial, of each rank that rests."""

    def decide(self, total: int, speeds: Floats, fixed: Floats, measured: npt.NDArray[np.bool_]) -> list[int]:
        """Return the ranks that rest in the round to be planned, by the speeds of all; ``measured``: had samples."""
        self._rounds = {rank: rounds - 1 for rank, rounds in self._rounds.items() if not measured[rank]}
        awake = [rank for rank in range(len(speeds)) if rank not in self._rounds]
        if not ((speeds > 0.0) & (speeds < math.inf))[awake].all():
            return list(self._rounds)
        alone_s = (self._least + fixed) / (speeds * (1.0 + fixed / self._typical_size))
        awake.sort(key=lambda rank: (-float(alone_s[rank]), rank))
        best, least_s = 0, (1.0 - _GAIN_OF_REST) * self._soonest_s(total, speeds[awake], fixed[awake])
        for left_out, slowest in enumerate(awake[:-1], start=1):
            if alone_s[slowest] <= least_s:
                break  # no round is as long as it is for this rank's sake
            without_s = self._soonest_s(total, speeds[awake[left_out:]], fixed[awake[left_out:]])
            if without_s < least_s:
                best, least_s = left_out, without_s
        for rank in awake[:best]:
            # Without β a trial takes longer than forecast, by an unknown factor: then eight times as many rounds.
            rounds = (alone_s[rank] / least_s - 1.0) / _TIME_OF_TRIALS * (1.0 if fixed[rank] else 8.0)
            self._rounds[rank] = max(_ROUNDS_BETWEEN_TRIALS, math.ceil(rounds))
        return list(self._rounds)

    def due(self) -> int | None:
        """Return the rank that is tried in the round to be planned, if one is; again, if that has taught nothing."""
        due = [rank for rank, rounds in self._rounds.items() if rounds <= 0]
        if not due:
            return None
        tried = min(due, key=self._rounds.__getitem__)
        self._rounds[tried] = _ROUNDS_BETWEEN_TRIALS  # its times come some rounds later
        return tried

    def _soonest_s(self, total: int, speeds: Floats, fixed: Floats) -> float:
        return AffineCosts(speeds, fixed, self._typical_size, self._least, self._step).soonest_s(total)

    def state_dict(self) -> dict[str, int]:
        """Return the rounds until each resting rank's next trial, as plain data."""
        return {str(rank): rounds for rank, rounds in self._rounds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` has returned."""
        self._rounds = {int(rank): int(rounds) for rank, rounds in state.items()}
