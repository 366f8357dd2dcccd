r"""How much memory a micro-batch takes on this rank's device, and how large one may be.

The peak of x samples (or of samples that cost as much as x) is a line, as their time is:

    p(x) = p0 + s x,        x_max = (M share - p0 - r) / s.

M is what the process may hold at most, ``share`` of which is used, and r the farthest that a peak was above the line.
The line goes through the largest peaks of the sizes at hand, from half of the largest size on. Before sizes differ
by a quarter, it goes from 0 through the largest one, which is safe: no line with p0 >= 0 is steeper. The planner lets
no size exceed the largest so far by more than a quarter, so a line that bends upwards is seen before memory ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_hetero.checks import FloatArray
from hvd_hetero.kept import Figure, Kept
from hvd_hetero.rounds import MAX_ROUND_SAMPLES

HEADROOM = 0.1
"""How far a limit stays below what failed: what fits once may not fit in fragmented memory (arbitrary)."""
USABLE_SHARE = 1.0 - HEADROOM

GROWTH = 1.25  # of the largest size so far: a line that bends upwards is seen before memory ends (arbitrary)
_SIZES_KEPT = 16  # for the line; the oldest is dropped (arbitrary)
_MICRO_BATCHES_PER_READING = 16  # of a known size: a reading takes a tenth of a millisecond
_MIB = 2.0**20


class CudaGauge:
    """The memory of this process's device, in bytes, by PyTorch's allocator; ``cuda`` is ``torch.cuda``."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def reset(self) -> None:
        """Begin to note the peak."""
        self._cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Return what this process has held at most since ``reset``."""
        return float(self._cuda.max_memory_allocated())

    def available(self) -> float:
        """Return what this process could hold at most: what it has reserved, and what is free."""
        free, total = self._cuda.mem_get_info()
        fraction = getattr(self._cuda, "get_per_process_memory_fraction", lambda: 1.0)()
        return float(min(free + self._cuda.memory_reserved(), fraction * total))


class MemoryMeter(Kept):
    """The bounds of one rank's micro-batches: as said, by the line, and by what has failed."""

    KEPT = (Figure("failed", whole=True), Figure("_by_line", whole=True))

    def __init__(self) -> None:
        self.gauge: CudaGauge | None = None
        self.share = USABLE_SHARE
        self.user_bound = 0
        """0: the user has set none."""
        self.failed = 0
        """The largest size allowed since one did not fit; 0: none has failed."""
        self.base = self.slope = self.peak = 0.0
        """p0, s, and the peak of the largest size, in bytes; 0: not known."""
        self._by_line = 0
        self._peaks: dict[int, float] = {}
        self._warm = False
        self._measures = 0  # the size at hand, if it is measured
        self._unmeasured = 0

    @property
    def learned(self) -> int:
        """The largest size that is known to fit; 0: any."""
        return min(filter(None, (self._by_line, self.failed)), default=0)

    @property
    def bound(self) -> int:
        """The largest size allowed; 0: any."""
        return min(filter(None, (self.user_bound, self.learned)), default=0)

    @property
    def fitted_line(self) -> str:
        """The line in words, and the bound that follows from it; empty if it is not known."""
        if not self.slope:
            return ""
        return f"{self.base / _MIB:.0f} + {self.slope / _MIB:.3g} x MiB on this rank, so {self.learned} fit"

    def begin(self, size: float) -> None:
        """Begin a micro-batch of this size."""
        self._measures = 0
        if self.gauge is None or size < 1.0:
            return
        self._unmeasured += 1
        if not self._warm or round(size) not in self._peaks or self._unmeasured >= _MICRO_BATCHES_PER_READING:
            self._measures, self._unmeasured = round(size), 0
            self.gauge.reset()

    def done(self, *, warm: bool) -> None:
        """End it. ``warm``: the optimizer has its state, which fills memory from the second round on."""
        size, self._measures = self._measures, 0
        if self.gauge is None or not size:
            return
        if warm and not self._warm:
            self._peaks.clear()
        self._warm = warm
        peak = self.gauge.peak()
        if peak > 0.0:  # else the work is elsewhere
            self._peaks[size] = max(peak, self._peaks.pop(size, 0.0))  # the latest size comes last
            self._learn(self.share * self.gauge.available())

    def fail(self, size: int) -> None:
        """Note that a micro-batch of this size did not fit."""
        self.failed, self._measures = max(1, min(int(size * USABLE_SHARE), size - 1, self.failed or size)), 0

    def row(self) -> dict[str, float]:
        """Return the figures for the table."""
        line = {f"memory_{name}_mib": getattr(self, name) / _MIB for name in ("base", "slope", "peak")}
        return {"limit": self.bound, **line}

    def _learn(self, available: float) -> None:
        largest = max(self._peaks)
        while len(self._peaks) > _SIZES_KEPT:
            del self._peaks[next(size for size in self._peaks if size != largest)]
        self.peak = self._peaks[largest]
        if not self._warm:
            return
        sizes, peaks = (np.array([*of], dtype=np.float64) for of in (self._peaks, self._peaks.values()))
        near = 2 * sizes >= largest
        self.base, self.slope, rest = _line(sizes[near], peaks[near])
        fits = (available - self.base - rest) / self.slope
        self._by_line = max(1, int(fits)) if fits < MAX_ROUND_SAMPLES else 0


def _line(sizes: FloatArray, peaks: FloatArray) -> tuple[float, float, float]:
    """Return p0, s and r."""
    if sizes.max() < GROWTH * sizes.min():
        largest = sizes.argmax()
        return 0.0, float(peaks[largest] / sizes[largest]), 0.0
    apart = sizes - sizes.mean()
    # A byte at least, by which the planner sees that the line is known.
    slope = max(float(apart @ peaks / (apart @ apart)), 1.0)
    base = max(float(peaks.mean() - slope * sizes.mean()), 0.0)
    return base, slope, float((peaks - base - slope * sizes).max())
