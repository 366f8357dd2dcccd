"""A processor share by the kernel, the realistic way to slow a process, if control groups may be written.

A group with quota ``q`` and period ``p`` runs for at most ``q`` of every ``p`` microseconds, over all its threads. With
p = 5 ms a share of 1/2 doubles the median step and its 95th percentile alike.

The share is of one core, over all threads: a share of k/f slows a process that keeps k cores busy by f. It slows
everything the process does, including communication, as a slower machine would.
"""

from __future__ import annotations

import atexit
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hvd_hetero.testing.cgroups import CpuController, QuotaUnavailableError, enter, find_controller

__all__ = ["CpuQuota", "QuotaSupport", "QuotaUnavailableError", "quota_available", "remove_stale_groups"]


@dataclass(frozen=True, slots=True)
class QuotaSupport:
    """Answer to whether this process may limit processor time by control groups; usable in an ``if``."""

    available: bool
    """True if a quota works here."""
    why: str
    """Layout of control groups that will be used, or the obstacle."""

    def __bool__(self) -> bool:
        return self.available


def quota_available() -> QuotaSupport:
    """Try to make a group with a quota, because permissions alone do not show it (read-only mounts, v2 rules)."""
    try:
        controller = find_controller()
        group = controller.create()
        try:
            controller.limit(group, 0.5, 5_000)
        finally:
            controller.remove(group, back_to=group.parent)
    except OSError as error:
        return QuotaSupport(False, str(error))
    return QuotaSupport(True, f"cgroup v{controller.version}")


def remove_stale_groups() -> list[Path]:
    """Remove the groups of processes killed while they held a `CpuQuota`, and return them."""
    try:
        return find_controller().remove_stale()
    except QuotaUnavailableError:
        return []


class CpuQuota:
    """Hold a process, its threads and its future children to ``share`` of one core, until closed.

    Write ``with CpuQuota(0.5): ...``, or ``quota = CpuQuota(0.5).start()`` and ``quota.close()``. It closes at the exit
    of the interpreter at the latest; then everything in the group returns to the group that the process came from. A
    killed process leaves an empty group, which the next `CpuQuota` or `remove_stale_groups` of any process removes.

    ``share`` may be set at any time; ``None`` means no limit. Children that the process already has are not moved.
    """

    # The kernel's default of 100 ms gives bursts, which look like a straggler that comes and goes.
    def __init__(self, share: float | None, period_us: int = 5_000, pid: int | None = None) -> None:
        if not 1_000 <= period_us <= 1_000_000:
            raise ValueError(f"period_us must be from 1000 to 1000000, the range of the kernel, got {period_us!r}")
        self._share = _checked(share)
        self._period_us = period_us
        self._pid = os.getpid() if pid is None else pid
        self._maker = os.getpid()
        self._held: tuple[CpuController, Path, Path] | None = None  # controller, our group, where the process came from

    @property
    def share(self) -> float | None:
        """Share of one core, or None for no limit; may be set at any time."""
        return self._share

    @share.setter
    def share(self, share: float | None) -> None:
        self._share = _checked(share)
        if self._held is not None:
            controller, group, _ = self._held
            controller.limit(group, self._share, self._period_us)

    @property
    def group(self) -> Path | None:
        """Control group while the quota holds, else None."""
        return self._held[1] if self._held is not None else None

    def start(self) -> CpuQuota:
        """Start to hold the process, unless it is held; raise `QuotaUnavailableError` if that is not allowed."""
        if self._held is not None:
            return self
        controller = find_controller()
        controller.remove_stale()
        origin = controller.group_of(self._pid)
        group = controller.create()
        self._held = (controller, group, origin)
        atexit.register(self.close)
        try:
            controller.limit(group, self._share, self._period_us)
            enter(self._pid, group)
        except OSError as error:
            self.close()
            raise QuotaUnavailableError(
                f"pid {self._pid} cannot be held to a share of {self._share} in {group} ({error}); "
                "a group above it may allow less than that"
            ) from error
        return self

    def close(self) -> None:
        """Give the process its full speed back and remove the group."""
        # A forked child inherits the handle, but must not close.
        if self._held is None or os.getpid() != self._maker:
            return
        controller, group, origin = self._held
        self._held = None
        atexit.unregister(self.close)
        if not controller.remove(group, back_to=origin):
            raise QuotaUnavailableError(f"the control group {group} could not be removed; it is in use by others")

    def __enter__(self) -> CpuQuota:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(share: float | None) -> float | None:
    if share is None:
        return None
    if not (math.isfinite(share) and share >= 1e-3):
        raise ValueError(f"share must be a number of cores of at least 0.001, or None for no limit, got {share!r}")
    return float(share)
