"""Gamma of one device for a user's step: time it over a ladder of batch sizes, find where memory ends, fit the curve.

Sizes rise by a factor, a quarter as a rule, from the smallest on, until a step takes too long, does not fit, or the
largest is reached. Every size is tried ``warm_up`` times untimed, for buffers, kernels and their tuning, then
``repeats`` times; the fit takes the medians (``allocation.fit_gamma``). Bisection brings the first size that does not
fit and the last that does together, to 1 %.

    (1 + log_g(x_max / x_min) + log_2(x_o / 100)) sizes,   g = 1.25
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from hvd_hetero.allocation.gamma import Gamma, fit_gamma
from hvd_hetero.measurement.memory import MemoryMeter
from hvd_hetero.measurement.memory_errors import is_out_of_memory


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch size. Without times, it did not fit in memory."""

    batch: int
    seconds: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """True if a step with this batch ran."""
        return bool(self.seconds)

    @property
    def median_s(self) -> float:
        """The median of its times; infinite if it did not fit."""
        return median(self.seconds) if self.seconds else float("inf")


@dataclass(frozen=True, slots=True)
class DeviceCurve:
    """What was measured, in order of size, and the curve through it."""

    measured: tuple[Measured, ...]
    gamma: Gamma | None
    """None if the times follow no curve, for the reason in ``why``."""
    why: str = ""

    @property
    def largest(self) -> int:
        """The largest batch that ran; 0 if none did."""
        return max((m.batch for m in self.measured if m.fits), default=0)

    @property
    def smallest_failure(self) -> int | None:
        """The smallest batch that did not fit, if any did not."""
        return min((m.batch for m in self.measured if not m.fits), default=None)


def profile_step(
    step: Callable[[int], object],
    *,
    smallest: int = 1,
    largest: int = 65536,
    longest_s: float = 2.0,
    repeats: int = 5,
    warm_up: int = 2,
    done: Callable[[], object] = lambda: None,
    release: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[Measured], object] = lambda measured: None,
    memory: MemoryMeter | None = None,
) -> DeviceCurve:
    """Profile ``step(batch)``: forward, backward and update with that many samples.

    Args:
        step: Does the work; raises its framework's out-of-memory error if it does not fit.
        smallest: The first size.
        largest: No larger one is tried.
        longest_s: No size after one that takes longer than this.
        repeats: Times taken of each size.
        warm_up: Untimed steps before.
        done: Waits until the device has finished the step's queued work.
        release: Frees what a failed step has left.
        clock: Monotonic seconds.
        progress: Called with every size measured.
        memory: Learns the line of memory, if it has a gauge.
    """
    for name, value in (("smallest", smallest), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; leave it out for the default")
    if not longest_s > 0:
        raise ValueError(f"longest_s must be positive, got {longest_s}; give the seconds of the longest step to time")
    if largest < smallest:
        raise ValueError(f"largest must not be below smallest={smallest}, got {largest}; raise largest")

    memory = MemoryMeter() if memory is None else memory

    def measure(batch: int) -> Measured:
        seconds: list[float] = []
        memory.begin(batch)
        try:
            for i in range(warm_up + repeats):
                begin_s = clock()
                step(batch)
                done()
                if i >= warm_up:
                    seconds.append(clock() - begin_s)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            seconds.clear()
            memory.fail(batch)
        else:
            memory.done(warm=True)
        if not seconds:
            release()  # after the handler, whose traceback holds what the step had
        measured = Measured(batch, tuple(seconds))
        progress(measured)
        return measured

    found = []
    for batch in _sizes(smallest, largest):
        found.append(measure(batch))
        if not found[-1].fits or found[-1].median_s > longest_s:
            break
    if not found[-1].fits:
        low, high = found[-2].batch if len(found) > 1 else 0, found[-1].batch
        # To 1 % of the size.
        while high - low > max(1, low // 100):
            found.append(measure((low + high) // 2))
            low, high = (found[-1].batch, high) if found[-1].fits else (low, found[-1].batch)
    found.sort(key=lambda m: m.batch)
    points = [(m.batch, s) for m in found for s in (m.seconds or (float("inf"),))]
    try:
        gamma = fit_gamma([batch for batch, _ in points], [seconds for _, seconds in points])
    except ValueError as error:
        return DeviceCurve(tuple(found), None, str(error))
    return DeviceCurve(tuple(found), gamma)


def _sizes(smallest: int, largest: int) -> Iterator[int]:
    batch = smallest
    while batch < largest:
        yield batch
        batch = max(batch + 1, round(batch * 1.25))
    yield largest
