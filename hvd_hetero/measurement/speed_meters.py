"""The speed meters of n ranks at once, of rounds that are told and not lived: for simulations.

``SpeedMeter`` is the definition; what it does in the rounds of one rank is done here on arrays of n. Left out is what
no simulated rank has: queues and stopwatches, updates of their own, layers that wait for other ranks, drivers that a
predictor goes by, and profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvd_hetero.measurement.fixed_cost import Pace
from hvd_hetero.measurement.memory_limits import limit_after
from hvd_hetero.measurement.speed_meter import _LEISURE_S, _SHORT_S, _WARM_UP_ROUNDS
from hvd_hetero.prediction.bank import Bank

__all__ = ["Figures", "SpeedMeters"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Figures = dict[str, Floats]


class SpeedMeters:
    """The measurements and predictions of n ranks.

    ``read`` gives the drivers, CPU and memory, of the ranks that are flagged; what it says of the others is not used.
    """

    def __init__(self, bank: Bank, pace: Pace[Floats] | None, read: Callable[[Flags], tuple[Floats, Floats]]) -> None:
        ranks = len(bank.expected)
        self.bank = bank
        self.pace = pace
        self._read = read
        self._limit = np.zeros(ranks, dtype=np.int64)
        self._disturbed = np.zeros(ranks, dtype=np.bool_)
        self._cpu, self._memory = read(np.ones(ranks, dtype=np.bool_))
        self._read_at = np.zeros(ranks)
        self._rounds = 0

    def failed(self, rank: int, size: int) -> int:
        """Return how large the parts of a micro-batch may be that did not fit into memory."""
        self._limit[rank] = limit_after(size, int(self._limit[rank]))
        self._disturbed[rank] = True
        return min(int(self._limit[rank]), -(-size // 2))

    def round(
        self, done_s: Floats, compute_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints, *, short: bool
    ) -> Figures:
        """Every rank has done its round, by its own clock at ``done_s``; return the figures for the table."""
        warm, busy_s = ~self._disturbed & (self._rounds >= _WARM_UP_ROUNDS), compute_s + input_s
        self._rounds += 1
        tells = warm & (samples > 0) & (busy_s > 0.0) & (busy_s < math.inf)
        later = tells & (busy_s < _SHORT_S)  # whoever is done so soon learns while it waits, after it has reported
        self._learn(tells & ~later, busy_s, samples, micro_batches, teaches=not short)
        figures = self._figures(warm & (not short), compute_s, input_s, samples, micro_batches)
        self._learn(later, busy_s, samples, micro_batches, teaches=not short)
        self._read_drivers(done_s)
        self._disturbed[:] = False
        return figures

    def _learn(self, which: Flags, busy_s: Floats, samples: Ints, micro_batches: Ints, *, teaches: bool) -> None:
        if not (teaches and which.any()):
            return
        count = np.maximum(micro_batches, 1)
        size, seconds = samples / count, np.where(which, busy_s, np.nan) / count
        if self.pace is None:
            self.bank.update(size / seconds)
            return
        self.pace.size = np.where(which, size, self.pace.size)
        self.bank.update(self.pace.of(size, seconds))

    def _figures(
        self, teaches: Flags, compute_s: Floats, input_s: Floats, samples: Ints, micro_batches: Ints
    ) -> Figures:
        expected, pace = self.bank.expected, self.pace
        return {
            "samples": samples.astype(np.float64),
            "micro_batches": micro_batches.astype(np.float64),
            "compute_s": compute_s,
            "input_s": input_s,
            "samples_per_s": expected.copy() if pace is None else pace.speed(expected),
            "cpu": self._cpu.copy(),
            "memory": self._memory.copy(),
            "limit": self._limit.astype(np.float64),
            "timed_samples": np.where(teaches, samples, 0).astype(np.float64),
            "once_s": np.where(micro_batches > 0, input_s, 0.0),
            "fixed_samples": np.zeros(len(samples)) if pace is None else pace.samples,
        }

    def _read_drivers(self, done_s: Floats) -> None:
        """No predictor uses them: they are for the report, and read now and then."""
        due = done_s - self._read_at > _LEISURE_S
        if due.any():
            self._read_at[due] = done_s[due]
            cpu, memory = self._read(due)
            self._cpu[due], self._memory[due] = cpu[due], memory[due]
