r"""The speed process in time: which share of its full pace a worker has.

Worker i has the share a_i(t) > 0 at time t, piecewise constant. Work of w seconds at full pace, begun at t, ends at the
τ with

    ∫_t^τ a_i(u) du = w        i.e.        τ = A_i^{-1}(A_i(t) + w),    A_i(t) = ∫_0^t a_i

so if a share changes in the middle of a batch, only the rest of that batch is slower. A depends on simulated time only:
every policy finds the same machine at the same moment. The same holds for the bandwidth of a link.

Shapes: n workers, L pieces of the longest process. Cost: O(n log L).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_hetero.tools.simulation.settings import MAX_RATIO, MAX_SPEED, REQUIRED, Setting, check

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Availability:
    """Shares: ``share[j]`` from ``at_s[j]`` on, the first from 0. They repeat after ``period_s``, or the last stays."""

    settings: ClassVar = {
        "at_s": Setting(tuple, (0.0,), 0, MAX_SPEED, "the seconds of a change"),
        "share": Setting(
            tuple, REQUIRED, 1 / MAX_RATIO, MAX_RATIO,
            "a share; a worker that stops for good would never finish: use a small one",
        ),
        "period_s": Setting(float, None, 1 / MAX_RATIO, MAX_SPEED, "seconds"),
    }  # fmt: skip
    at_s: tuple[float, ...] = (0.0,)
    share: tuple[float, ...] = (1.0,)
    period_s: float | None = None

    def __post_init__(self) -> None:
        check(self, self.settings)
        if len(self.at_s) != len(self.share) or not self.at_s:
            raise ValueError(
                f"share must hold one number for each of at_s, got {len(self.share)} for {len(self.at_s)} moments"
            )
        if self.at_s[0] != 0 or any(b <= a for a, b in zip(self.at_s, self.at_s[1:], strict=False)):
            raise ValueError(f"at_s must begin with 0 and increase, got {self.at_s}; give the seconds of each change")
        if self.period_s is not None and not self.period_s > self.at_s[-1]:
            raise ValueError(f"period_s must be above the last of at_s, {self.at_s[-1]}, got {self.period_s}")

    @classmethod
    def series(cls, shares: ArrayLike, step_s: float, *, repeat: bool = True) -> Availability:
        """Return one share after the other, ``step_s`` seconds each: a trace."""
        values = np.asarray(shares, dtype=np.float64)
        if not step_s > 0:
            raise ValueError(f"step_s must be positive, got {step_s}; it is the seconds between two values")
        at_s = tuple((np.arange(values.size) * step_s).tolist())
        return cls(at_s, tuple(values.tolist()), values.size * step_s if repeat else None)


ALWAYS = Availability()


class Availabilities:
    """The processes of all workers at once."""

    def __init__(self, processes: Sequence[Availability]) -> None:
        n, longest = len(processes), max(len(p.at_s) for p in processes)
        self._at = np.full((n, longest), np.inf)
        self._share = np.ones((n, longest))
        for i, process in enumerate(processes):
            pieces = len(process.at_s)
            self._at[i, :pieces] = process.at_s
            self._share[i, :pieces] = process.share
            self._share[i, pieces:] = process.share[-1]
        self._period = np.array([np.inf if p.period_s is None else p.period_s for p in processes])
        # Work done up to each moment; inf if there is none.
        gaps = np.full((n, longest - 1), np.inf)
        known = np.isfinite(self._at[:, 1:])
        gaps[known] = (self._at[:, 1:] - np.where(np.isfinite(self._at[:, :-1]), self._at[:, :-1], 0.0))[known]
        work = np.cumsum(gaps * self._share[:, :-1], axis=1)
        self._work = np.concatenate([np.zeros((n, 1)), work], axis=1)
        last = np.isfinite(self._at).sum(axis=1) - 1
        rows = np.arange(n)
        with np.errstate(invalid="ignore"):  # an infinite period, which is no period
            self._per_period = self._work[rows, last] + (self._period - self._at[rows, last]) * self._share[rows, last]
        self._cyclic = np.isfinite(self._period)
        self._rows = rows
        self.constant = longest == 1

    def at(self, time_s: ArrayLike) -> Floats:
        """Return each worker's share at its own moment; before 0 it is the share at 0."""
        if self.constant:
            return self._share[:, 0]
        t = np.broadcast_to(np.asarray(time_s, dtype=np.float64), self._rows.shape)
        _, within = self._fold(np.maximum(t, 0.0), self._period)
        return self._share[self._rows, self._piece(self._at, within)]

    def work_between(self, begin_s: ArrayLike, end_s: ArrayLike) -> Floats:
        """Return the seconds of full pace that each worker has between two moments."""
        if self.constant:
            return np.asarray((np.asarray(end_s) - begin_s) * self._share[:, 0])
        return self._until(end_s) - self._until(begin_s)

    def finish(self, begin_s: ArrayLike, work_s: Floats) -> Floats:
        """Return when work that is begun at ``begin_s`` ends."""
        if self.constant:
            return np.asarray(np.asarray(begin_s) + work_s / self._share[:, 0])
        cycles, target = self._fold(self._until(begin_s) + work_s, self._per_period)
        piece = self._piece(self._work, target)
        within = self._at[self._rows, piece] + (target - self._work[self._rows, piece]) / self._share[self._rows, piece]
        return np.asarray(within + self._whole(cycles, self._period))

    def _until(self, time_s: ArrayLike) -> Floats:
        t = np.broadcast_to(np.asarray(time_s, dtype=np.float64), self._rows.shape)
        cycles, within = self._fold(t, self._period)
        piece = self._piece(self._at, within)
        done = self._work[self._rows, piece] + (within - self._at[self._rows, piece]) * self._share[self._rows, piece]
        return np.asarray(done + self._whole(cycles, self._per_period))

    def _fold(self, value: Floats, period: Floats) -> tuple[Floats, Floats]:
        """Return the whole periods in each value, and the rest; no period, no fold."""
        if not self._cyclic.any():
            return np.zeros_like(value), value
        cycles = np.where(self._cyclic, np.floor(value / period), 0.0)
        return cycles, np.maximum(value - self._whole(cycles, period), 0.0)

    def _whole(self, cycles: Floats, period: Floats) -> Floats:
        return np.where(cycles > 0, cycles, 0.0) * np.where(self._cyclic, period, 0.0)

    def _piece(self, starts: Floats, value: Floats) -> NDArray[np.int64]:
        """Return the last piece that begins by then, and the first one before: by bisection, in all rows at once."""
        low, width = np.zeros(len(value), dtype=np.int64), starts.shape[1]
        for step in reversed(range((width - 1).bit_length())):
            middle = np.minimum(low + (1 << step), width - 1)
            low = np.where(starts[self._rows, middle] <= value, middle, low)
        return low
