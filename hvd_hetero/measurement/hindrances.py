r"""Shares of its time in which a rank is kept from its work, from counters that the kernel keeps anyway.

Each reading gives what has happened since the one before, ``t`` seconds ago. The threads of this process ran for ``c``
seconds, and were ready and did not run for ``d`` (``schedstat``, without threads that have ended). They wanted a
processor for ``c + d``, on average ``W = min(A, max(1, (c + d) / t))`` of the A cores that the process may use. Of this
they missed

    D = d / max(t, c + d),

for three reasons: a quota, other processes, and each other, if they are more than the process has cores. Let ``h`` be
the seconds that a control group around this process was held back by its quota (the most of all such groups, summed
over the cores by the kernel). Let other processes run on these cores for ``o``. Then

    throttled = min(D, h / (t W)),
    contended = min(D - throttled, o / (A t)).

If ``d`` cannot be read, ``throttled = min(1, h / t)``, and ``contended`` is 0. Loader workers are other processes, too.

    stolen      the share of the busy time of its cores that the hypervisor took from them
    stalled     the share of time in which a thread waited for memory: of the innermost control group that reports it,
                else of the machine, and then only if this process has read back pages itself
    collecting  the share of time spent in Python's garbage collector

A file that is absent, may not be read or cannot be understood counts as one without events.
"""

from __future__ import annotations

import gc
import math
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hvd_hetero.measurement import kernel
from hvd_hetero.measurement.readings import ResourceMeter

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Hindrances:
    """One reading, of the figures in ``hvd_hetero.columns``. NaN: there has been no interval yet."""

    throttled: float = math.nan
    quota_cores: float = math.nan
    contended: float = math.nan
    stolen: float = math.nan
    stalled: float = math.nan
    faults_per_s: float = math.nan
    collecting: float = math.nan
    clock: float = math.nan
    sent_mb_s: float = math.nan

    def row(self) -> dict[str, float]:
        """Return the figures for the table, to three places."""
        return {name: round(value, 3) for name, value in zip(self.__slots__, astuple(self), strict=True)}


@dataclass(frozen=True, slots=True)
class _Counters:
    at_s: float
    threads: dict[str, tuple[int, int]]  # ns that each ran, and was ready and did not
    throttled_s: dict[Path, float]  # by control group
    cores: int  # that this process may use
    busy_s: float  # of these cores, stolen time included
    stolen_s: float
    processes_s: float  # what all processes ran on these cores
    idle_s: float  # when none did
    own_s: float  # what this one ran
    stalled_s: float
    faults: int
    collecting_s: float
    sent: int


class HindranceMeter:
    """Reads the counters; each `read` covers the time since the one before.

    ``clock`` is monotonic, in seconds. ``proc``, ``cgroup`` and ``cpus`` are where the kernel's files are; ``affinity``
    returns the cores that the process may use (those of its affinity unless given).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        proc: str | Path = "/proc",
        cgroup: str | Path = "/sys/fs/cgroup",
        cpus: str | Path = "/sys/devices/system/cpu",
        affinity: Callable[[], Collection[int]] = kernel.own_cores,
    ) -> None:
        self._clock = clock
        self._proc, self._cpus = Path(proc), Path(cpus)
        self._affinity = affinity
        nowhere: tuple[list[Path], list[Path]] = ([], [])
        first, second = _known(partial(_groups, self._proc / "self", Path(cgroup)), nowhere)
        self._limiting = [*first, *second]
        pressures = (group / "memory.pressure" for group in second)
        self._pressure = next((path for path in pressures if _known(partial(kernel.text_of, path), "")), None)
        self._before = self._count()

    def read(self) -> Hindrances:
        """Return what has hindered this rank since the last reading. Never raises for a file."""
        old, new = self._before, self._count()
        t = new.at_s - old.at_s
        if not t > 0:
            return Hindrances()
        self._before = new
        held_s = max((s - old.throttled_s.get(group, s) for group, s in new.throttled_s.items()), default=0.0)
        allowed = min(filter(math.isfinite, self._quotas()), default=0.0)
        throttled, contended = _share(held_s, t), 0.0
        if new.threads:
            ran_s, ready_s = _since(old.threads, new.threads)
            wanted_s = max(t, ran_s + ready_s)
            at_once_s = min(max(new.cores, 1) * t, wanted_s)
            missed, by_quota = _share(ready_s, wanted_s), _share(held_s, at_once_s)
            # Others may use what a process at its quota must leave idle. They take nothing from it, but the kernel then
            # counts less of h. Nine tenths, because a quota is enforced by the slice, a few milliseconds.
            if held_s > 0.0 and allowed > 0.0 and ran_s >= 0.9 * allowed * t:
                by_quota = max(by_quota, 1.0 - allowed * t / at_once_s)
            throttled = min(missed, by_quota)
            # The smaller one of two figures: most kernels look at each tick which process runs, and a quota's period is
            # some ticks. They then see this process at each, and count it as running all the time. Idle time they
            # measure.
            spent_s = min(new.processes_s - old.processes_s, new.cores * t - (new.idle_s - old.idle_s))
            others_s = spent_s - (new.own_s - old.own_s)
            # Neither figure is enough alone. A thread that waits for another one of its process is ready as well, and
            # others take nothing from a process that does not want their core.
            contended = min(missed - throttled, _share(others_s, new.cores * t))
        faults = max(new.faults - old.faults, 0)
        mine = self._pressure is not None or faults > 0
        return Hindrances(
            throttled=throttled,
            quota_cores=allowed,
            contended=contended,
            stolen=_share(new.stolen_s - old.stolen_s, new.busy_s - old.busy_s),
            stalled=_share(new.stalled_s - old.stalled_s, t) if mine else 0.0,
            faults_per_s=faults / t,
            collecting=_share(new.collecting_s - old.collecting_s, t),
            clock=_known(self._frequency, 0.0),
            sent_mb_s=max(new.sent - old.sent, 0) / t / 1e6,
        )

    def _count(self) -> _Counters:
        cores, busy_s, stolen_s, processes_s, idle_s = _known(self._cores, (0, 0.0, 0.0, 0.0, 0.0))
        return _Counters(
            self._clock(),
            _known(self._threads, {}),
            {group: _known(partial(_throttled_s, group), 0.0) for group in self._limiting},
            cores,
            busy_s,
            stolen_s,
            processes_s,
            idle_s,
            _known(partial(kernel.own_s, self._proc), 0.0),
            _known(self._stalled_s, 0.0),
            _known(lambda: int(kernel.own_stat(self._proc)[9]), 0),
            collecting_s(),
            _known(self._sent, 0),
        )

    def _threads(self) -> dict[str, tuple[int, int]]:
        found = {}
        folder = str(self._proc / "self" / "task")
        for thread in os.listdir(folder):
            ran, ready, *_ = kernel.text_of(f"{folder}/{thread}/schedstat").split() or (0, 0)
            found[thread] = (int(ran), int(ready))
        return found if any(map(any, found.values())) else {}

    def _quotas(self) -> list[float]:
        return [_known(partial(kernel.quota, group), math.inf) for group in self._limiting]

    def _cores(self) -> tuple[int, float, float, float, float]:
        """Return how many cores this process may use, and how long they were busy, stolen, used by processes, idle."""
        cores, each = set(self._affinity()), kernel.core_ticks(self._proc)
        mine = zip(*(each[core] for core in cores & each.keys()), strict=True)
        user, nice, system, idle, iowait, irq, softirq, stolen = (ticks * kernel.TICK_S for ticks in map(sum, mine))
        processes_s = user + nice + system
        return len(cores), processes_s + irq + softirq + stolen, stolen, processes_s, idle + iowait

    def _stalled_s(self) -> float:
        text = kernel.text_of(self._pressure or self._proc / "pressure" / "memory")
        found = re.search(r"^some .*total=(\d+)", text, re.MULTILINE)
        return int(found[1]) * 1e-6 if found else 0.0

    def _frequency(self) -> float:
        core = int(kernel.own_stat(self._proc)[36])  # where it ran last
        folder = self._cpus / f"cpu{core}" / "cpufreq"
        now, highest = (int(kernel.text_of(folder / name)) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
        return _share(now, highest)

    def _sent(self) -> int:
        lines = kernel.text_of(self._proc / "self" / "net" / "dev").splitlines()[2:]
        interfaces = (line.partition(":") for line in lines)
        return sum(int(counts.split()[8]) for name, _, counts in interfaces if name.strip() != "lo")  # what leaves it


class Surroundings:
    """The latest readings of one rank, of what its speed goes with and what hinders it; not known without a meter."""

    def __init__(self, drivers: ResourceMeter | None, hindrances: HindranceMeter | None, now: float) -> None:
        self._drivers, self._hindrances = drivers, hindrances
        self._hindered = {} if hindrances is None else Hindrances().row()
        self._read_at = now
        self.cpu = self.memory = math.nan
        self.read_drivers()

    def read_drivers(self) -> None:
        """Read the CPU and memory that are available."""
        if self._drivers is not None:
            reading = self._drivers.read()
            self.cpu, self.memory = reading.cpu, reading.memory

    def read_at_leisure(self, now: float, *, drivers: bool) -> None:
        """Read the figures that serve only the report, at most once a second."""
        # Arbitrary: no plan goes by these figures.
        if now - self._read_at > 1.0:
            self._read_at = now
            if drivers:
                self.read_drivers()
            if self._hindrances is not None:
                self._hindered = self._hindrances.read().row()

    def row(self) -> dict[str, float]:
        """Return the figures for the table."""
        return {"cpu": self.cpu, "memory": self.memory, **self._hindered}


def _known(measure: Callable[[], _Value], otherwise: _Value) -> _Value:
    try:
        return measure()
    except kernel.UNREADABLE:
        return otherwise


def _groups(process: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """Return the groups that may limit a process, of version 1 and of version 2."""
    groups = kernel.ControlGroups(process, root)
    return groups.levels("cpu"), groups.levels("")


def _throttled_s(group: Path) -> float:
    """Return for how long a group's processes have been held back, by either version's file."""
    stat = kernel.text_of(group / "cpu.stat").split()
    name, unit_s = ("throttled_usec", 1e-6) if "throttled_usec" in stat else ("throttled_time", 1e-9)
    return int(stat[stat.index(name) + 1]) * unit_s


def _since(old: dict[str, tuple[int, int]], new: dict[str, tuple[int, int]]) -> tuple[float, float]:
    """Return the seconds that threads ran, and that they were ready and did not."""
    ran = ready = 0
    for thread, (ran_ns, ready_ns) in new.items():
        before = old.get(thread, (0, 0))
        ran += max(ran_ns - before[0], 0)
        ready += max(ready_ns - before[1], 0)
    return ran * 1e-9, ready * 1e-9


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


class _Collections:
    """The time that this process has spent in Python's garbage collector.

    The interpreter calls back before and after each collection, in whatever thread it happens. Collections do not
    overlap, so one beginning is kept. The callbacks stay for the life of the process; a pair of them costs about a
    microsecond.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Take the time of a collection; ``phase`` is "start" or "stop"."""
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self.total_s += now_s - self._began_s


_collections = _Collections()


def collecting_s() -> float:
    """Return the seconds of all collections since the first call."""
    if _collections not in gc.callbacks:
        gc.callbacks.append(_collections)
    return _collections.total_s
