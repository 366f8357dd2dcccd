"""The two drivers of a rank's speed: how much CPU and memory is available to it (lb-bsp sections 3.2.1 and 4.1).

With ``A`` the number of cores that this process may run on (its affinity within its cpuset),

    cpu    = min( A - o,  min over quotas l of (q_l - o_l) ) / A                                  in [0, 1]
    memory = min over limits l of (limit_l - used_l)  /  min over limits l of limit_l             in [0, 1]

- ``o``: cores' worth of time that others used on those ``A`` cores (stolen time included) in the last half a second:
  the busy time of the cores in ``/proc/stat`` minus this process's own time, per second.
- ``q_l``: quota / period of each control group that holds this process, in cores; ``o_l``: cores' worth used by the
  other members of that group, where its account can be read.
- limits: the machine (MemTotal, of which MemAvailable is left) and the ``memory`` limit of each enclosing control
  group, whose use counts without the inactive file cache.

If this process used at least 0.75 of what it was allowed over the window, or there are no two readings yet,
``o = o_l = 0``.

Differences from the paper: it takes "CPU/memory usage" from psutil, which sees the machine. In a container its quota
slows a rank, not the machine's use. And what is *available* is reported: a rank that computes uses all it gets, so its
use shows little of what it could get.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hvd_hetero.measurement import kernel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resources:
    """One reading of the drivers: fractions in [0, 1], or NaN where not known."""

    cpu: float
    memory: float


@dataclass(frozen=True, slots=True)
class _Used:
    """Counters of CPU time, in seconds since some fixed moment."""

    at_s: float
    cores: dict[int, float]  # busy time of each core
    own: float
    groups: dict[Path, float]  # of every control group with a quota
    allowed: float  # cores by affinity and quotas, from this reading to the next


class ResourceMeter:
    """Reads the drivers. Call it in every step: it looks at most every ``interval_s``, and else repeats itself.

    ``clock`` is monotonic, in seconds. ``proc`` and ``cgroup`` are the roots of the two file systems; ``affinity``
    returns the cores that the process may use (those of its affinity unless given).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        interval_s: float = 0.1,
        proc: str | Path = "/proc",
        cgroup: str | Path = "/sys/fs/cgroup",
        affinity: Callable[[], Collection[int]] = kernel.own_cores,
    ) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._proc = Path(proc)
        self._affinity = affinity
        self._used, self._warned_of = deque[_Used](), set[str]()
        self._read_at_s = -math.inf
        self._latest = Resources(math.nan, math.nan)
        self._niced = os.getpriority(os.PRIO_PROCESS, 0) > 0
        # Looked up once: a process that is moved to another group needs a new meter.
        groups = kernel.ControlGroups(self._proc / "self", Path(cgroup))
        self._quotas = [*groups.levels("cpu"), *groups.levels("")]
        self._accounts = groups.beside("cpu", "cpuacct")
        self._limits = [*groups.levels("memory"), *groups.levels("")]
        self._cpusets = [*groups.levels("cpuset")[:1], *groups.levels("")[:1]]

    def read(self) -> Resources:
        """Return the drivers now, or as they were less than ``interval_s`` ago. Never raises for a file."""
        now_s = self._clock()
        if now_s - self._read_at_s >= self._interval_s:
            self._read_at_s = now_s
            cpu = self._known("cpu", lambda: self._cpu(now_s))
            self._latest = Resources(cpu, self._known("memory", self._memory))
        return self._latest

    def _known(self, name: str, measure: Callable[[], float]) -> float:
        # A limit's file that is absent is no limit. One that cannot be read or understood leaves the driver unknown.
        try:
            return measure()
        except kernel.UNREADABLE as error:
            if name not in self._warned_of:
                self._warned_of.add(name)
                log.warning("the %s driver is not known, prediction goes on without it: %r", name, error)
            return math.nan

    def _cpu(self, now_s: float) -> float:
        cores = self._cores()
        quotas = {group: allowed for group in self._quotas if (allowed := kernel.quota(group)) < math.inf}
        free = [float(len(cores)), *quotas.values()]
        accounts = {path: self._group_s(path) for path in quotas}
        new = _Used(now_s, self._busy_s(), kernel.own_s(self._proc), accounts, min(free))
        old = self._remember(new)
        span_s, own_s = now_s - old.at_s, new.own - old.own
        allowed_s = sum(a.allowed * (b.at_s - a.at_s) for a, b in pairwise(self._used))
        # Others may use what a rank at its quota must leave idle, and take nothing from it. The limit is 0.75, and not
        # nearly 1, because quotas are enforced, and times counted, in clock ticks.
        if span_s > 0 and own_s < 0.75 * allowed_s:
            # Processes that this one started, as data loaders, count as others: to find them means to walk /proc. A
            # rank that waits long for others has its idle time filled, too, and reads too low.
            shared = [sum(new.cores[c] - old.cores.get(c, new.cores[c]) for c in cores)]
            shared += [new.groups[path] - old.groups.get(path, new.groups[path]) for path in quotas]
            free = [f - max(0.0, s - own_s) / span_s for f, s in zip(free, shared, strict=True)]
        return min(1.0, max(0.0, min(free) / len(cores)))

    def _remember(self, new: _Used) -> _Used:
        """Append a reading, drop those no longer needed, and return the one that opens the window."""
        self._used.append(new)
        # Half a second: times come in ticks of 10 ms, so a rate is exact to about 2 % of a core. Arbitrary: a shorter
        # window is noisier, a longer one later; quotas and memory have no such delay.
        while len(self._used) > 2 and new.at_s - self._used[1].at_s >= 0.5:
            self._used.popleft()
        return self._used[0]

    def _cores(self) -> Collection[int]:
        cores = set(self._affinity())
        for group in self._cpusets:
            # The kernel keeps the affinity inside the cpuset; this matters where the affinity comes from elsewhere.
            names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
            if text := next(filter(None, (kernel.text_of(group / name) for name in names)), ""):
                cores &= _core_list(text)
        if not cores:
            raise ValueError("affinity and cpuset have no core in common")
        return cores

    def _busy_s(self) -> dict[int, float]:
        each = kernel.core_ticks(self._proc).items()
        # Niced processes give way, unless this one is niced itself.
        return {
            core: (user + system + sum(others) + nice * self._niced) * kernel.TICK_S
            for core, (user, nice, system, _idle, _iowait, *others) in each
        }

    def _group_s(self, path: Path) -> float:
        usage_ns = kernel.text_of(self._accounts[path] / "cpuacct.usage") if path in self._accounts else ""
        if usage_ns:
            return int(usage_ns) * 1e-9
        stat = kernel.text_of(path / "cpu.stat").split()
        return int(stat[stat.index("usage_usec") + 1]) * 1e-6 if "usage_usec" in stat else 0.0

    def _memory(self) -> float:
        machine = {line.split(":")[0]: line for line in (self._proc / "meminfo").read_text().splitlines()[:3]}
        limit, free = (float(machine[key].split()[1]) * 1024 for key in ("MemTotal", "MemAvailable"))
        machine_bytes = limit
        for group in self._limits:
            # A limit of the machine's size or above holds no rank back.
            allowed, used = kernel.memory(group, machine_bytes)
            limit, free = min(limit, allowed), min(free, allowed - used)
        return min(1.0, max(0.0, free / limit)) if limit > 0 else 0.0


def _core_list(text: str) -> set[int]:
    """Return ``{0, 1, 2, 5}`` for ``"0-2,5"``."""
    spans = (span.partition("-") for span in text.split(","))
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
