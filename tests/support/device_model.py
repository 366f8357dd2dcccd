"""Make a process behave like a device that saturates and runs out of memory, such as a GPU.

A batch of x samples takes

    Γ(x) = m max(x, x_s) + b seconds,

if the host needs less, and more than x_o samples do not fit (``allocation.Gamma``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_hetero.allocation import Gamma


class DeviceModel:
    """A model of a device with this Γ.

        device = DeviceModel(1e-3, 5e-3, saturation=8, out_of_memory=40, error=torch.OutOfMemoryError)
        with device.step(len(x)):
            ...

    For a host that only queues the work: ``enqueue(len(x))``, and ``wait()`` when it asks for a result.

    Parameters
    ----------
    slope_s, intercept_s, saturation, out_of_memory
        m, b, x_s and x_o; x_s need not be whole. With ``out_of_memory=None`` every batch fits.
    error
        Exception of a batch that does not fit, made from its message: the framework's, or MemoryError.
    clock, sleep
        Functions of seconds, for tests of this class.
    """

    def __init__(
        self,
        slope_s: float,
        intercept_s: float,
        saturation: float = 1,
        out_of_memory: int | None = None,
        *,
        error: Callable[[str], BaseException] = MemoryError,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.gamma = Gamma(slope_s, intercept_s, saturation, out_of_memory)
        self.late_s = 0.0
        """Seconds by which all steps took longer than modelled, because the host is slower than the device it plays."""
        self.factor = 1.0
        """Factor by which the device has become slower."""
        self._error = error
        self._clock = clock
        self.sleep = sleep
        """The function that passes the time."""
        self._empty_at = -math.inf  # when all that is queued will be done

    def allocate(self, batch: int) -> None:
        """Raise the error if a batch of this size does not fit."""
        limit = self.gamma.out_of_memory
        if limit is not None and batch > limit:
            raise self._error(f"out of memory: {batch} samples, {limit} fit (a model of a device)")

    @contextmanager
    def step(self, batch: int) -> Iterator[None]:
        """Run the body, the real work on a batch; then sleep until the modelled time is over."""
        begin_s = self._clock()
        self.allocate(batch)
        yield
        rest_s = begin_s + self.factor * self.gamma.seconds(batch) - self._clock()
        if rest_s > 0:
            self.sleep(rest_s)
        else:
            self.late_s -= rest_s

    def enqueue(self, batch: int) -> None:
        """Queue a step on a batch, behind what is queued already, and return at once, as a GPU lets its host do."""
        self.allocate(batch)
        self._empty_at = max(self._clock(), self._empty_at) + self.factor * self.gamma.seconds(batch)

    @property
    def busy(self) -> bool:
        """True while some queued work is not done."""
        return self._clock() < self._empty_at

    def wait(self) -> None:
        """Sleep until all that was queued is done."""
        if self.busy:
            self.sleep(self._empty_at - self._clock())
