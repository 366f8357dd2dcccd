"""Slow a process down by a known factor, to test load balancing.

There are two methods with one interface. A processor quota (`hvd_hetero.testing.quota`) slows all that the process
does, and only the kernel measures. If control groups may not be written, or ranks outnumber cores (a rank that waits
for a core anyway does not notice its quota), the process sleeps in proportion to the measured compute:

    slept_s = (factor - 1) * compute_s,    so that    compute_s + slept_s = factor * compute_s.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal

from hvd_hetero.testing.quota import CpuQuota, QuotaUnavailableError, quota_available

Method = Literal["auto", "quota", "sleep"]


class SlowDown(ABC):
    """A process made ``factor`` times slower. Call ``after_compute`` once a step, with any method."""

    method: str

    def __init__(self, factor: float, why: str = "") -> None:
        self._factor = _checked_factor(factor)
        self._why = why

    @property
    def factor(self) -> float:
        """Factor by which the process is slower; 1 is no change."""
        return self._factor

    def set_factor(self, factor: float) -> None:
        """Make the process ``factor`` times slower from now on."""
        self._factor = _checked_factor(factor)

    @abstractmethod
    def after_compute(self, compute_s: float) -> float:
        """Take note of ``compute_s`` seconds of work just done, and return the seconds slept for it."""

    def close(self) -> None:
        """Return to full speed."""
        self.set_factor(1.0)

    def describe(self) -> str:
        """Return one line for a table."""
        if self._factor == 1:
            return "full speed"
        return f"{self._factor:g} times slower by {self.method}" + (f" ({self._why})" if self._why else "")

    def __enter__(self) -> SlowDown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class QuotaSlowDown(SlowDown):
    """A slow-down by quota: a share of ``cores / factor`` for a process that keeps ``cores`` cores busy."""

    method = "processor quota"

    def __init__(self, factor: float, cores: float = 1.0, why: str = "") -> None:
        super().__init__(factor, why)
        if not (math.isfinite(cores) and cores > 0):
            raise ValueError(f"cores must be positive, the number of cores the process keeps busy, got {cores!r}")
        self._cores = cores
        self._quota = CpuQuota(self._share())
        self._apply()

    def set_factor(self, factor: float) -> None:
        """Change the quota so that the process is ``factor`` times slower from now on."""
        super().set_factor(factor)
        self._apply()

    def after_compute(self, compute_s: float) -> float:
        """Do nothing, because the kernel already slowed the process."""
        return 0.0

    def _share(self) -> float:
        return self._cores / self._factor

    def _apply(self) -> None:
        # At factor 1 the process leaves the group, because a group without a limit still changes how the scheduler
        # weighs the process against others.
        if self._factor == 1:
            self._quota.close()
        else:
            self._quota.share = self._share()
            self._quota.start()


class ProportionalSleep(SlowDown):
    """A slow-down by sleeping ``(factor - 1)`` times the compute; the next sleep corrects the error of the last.

    Unlike a slower processor, it slows neither communication nor the input pipeline.
    """

    method = "proportional sleep"

    def __init__(
        self,
        factor: float,
        why: str = "",
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(factor, why)
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0

    def after_compute(self, compute_s: float) -> float:
        """Sleep for the compute (see `pay`)."""
        return self.pay(compute_s)

    def pay(self, compute_s: float) -> float:
        """Sleep for ``compute_s`` seconds of measured work, and return the seconds slept."""
        if not (math.isfinite(compute_s) and compute_s >= 0):
            raise ValueError(f"compute_s must be finite and not negative, measured by a monotonic clock: {compute_s!r}")
        # In proportion: a fixed sleep would not shrink with the batch, so no batch size could help against it.
        self._owed_s += (self._factor - 1) * compute_s
        if self._factor == 1 or self._owed_s <= 0:
            return 0.0
        begin_s = self._clock()
        self._sleep(self._owed_s)
        slept_s = self._clock() - begin_s
        self._owed_s -= slept_s
        return slept_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the body as compute and pay for it; a body that raises pays nothing."""
        begin_s = self._clock()
        yield
        self.pay(self._clock() - begin_s)


def slow_down(factor: float, method: Method = "auto", cores: float = 1.0, *, fits: bool | None = None) -> SlowDown:
    """Make this process ``factor`` times slower; ``auto`` uses the quota if it works, else the sleep.

    ``cores`` is the number of cores that the process keeps busy at full speed. The quota does not work if control
    groups may not be written, or if this machine has more ranks (``HOROVOD_LOCAL_SIZE``) than cores; `describe` says
    which. If you have pinned the ranks, pass ``fits``: True if the quotas of ranks that share a core leave some of it
    idle. Then each rank gets its share, with any number of ranks.
    """
    if method == "quota":
        return QuotaSlowDown(factor, cores)
    if method == "sleep":
        return ProportionalSleep(factor)
    if method != "auto":
        raise ValueError(f"method must be 'auto', 'quota' or 'sleep', got {method!r}")
    # All cores of the machine count, not this process's affinity mask: a rank pinned to one core does not share it.
    ranks, here = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")), os.cpu_count() or 1
    if fits is None and ranks > here:
        return ProportionalSleep(factor, why=f"{ranks} ranks on {here} cores")
    if fits is False:
        return ProportionalSleep(factor, why="quotas that do not fit into the core that ranks share")
    support = quota_available()
    if not support:
        return ProportionalSleep(factor, why=support.why)
    try:
        return QuotaSlowDown(factor, cores, why=support.why)
    except QuotaUnavailableError as error:
        return ProportionalSleep(factor, why=str(error))


def pin_to_core(index: int) -> int:
    """Pin this process, with all its threads, to the ``index``-th core it may use, and return that core's number.

    ``pin_to_core(hvd.local_rank())`` gives each rank its own core. The cores are in the process's affinity mask
    (a container may allow only some of the machine's), counted from 0.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 0 <= index < len(allowed):
        raise ValueError(
            f"index must be from 0 to {len(allowed) - 1}, as this process may use {len(allowed)} cores ({allowed}), "
            f"got {index!r}; run fewer ranks on this machine or do not pin them"
        )
    # Affinity belongs to threads: without this loop, only the calling thread and its later threads would be pinned.
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), {allowed[index]})
    return allowed[index]


def _checked_factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(f"factor must be finite and at least 1 (1: full speed, 2: half speed), got {factor!r}")
    return float(factor)
