"""Files of the kernel: those of ``/proc``, and the control groups of a process, in version 1, version 2 and both."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection
from pathlib import Path

import psutil

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
UNREADABLE = (OSError, ValueError, LookupError, ZeroDivisionError, psutil.Error)
"""Errors of a file that cannot be read or understood."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def text_of(path: Path | str) -> str:
    """Return the text of a kernel's file; "" if it is gone, since groups and processes may end between two looks."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fsdecode(file.readall()).strip()  # the name of a group is any bytes
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return ""


def own_cores() -> Collection[int]:
    """Return the cores that this process may use."""
    return psutil.Process().cpu_affinity() or ()


def own_stat(proc: Path) -> list[str]:
    """Return the fields of this process's ``stat``, from the third on, its state."""
    return (proc / "self" / "stat").read_text().rpartition(")")[2].split()


def own_s(proc: Path) -> float:
    """Return the seconds that this process ran."""
    fields = own_stat(proc)
    return (int(fields[11]) + int(fields[12])) * TICK_S


def core_ticks(proc: Path) -> dict[int, list[int]]:
    """Return each core's ticks: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user."""
    lines = itertools.takewhile(lambda line: line.startswith("cpu"), (proc / "stat").read_text().splitlines()[1:])
    return {int(name[3:]): list(map(int, ticks[:8])) for name, *ticks in map(str.split, lines)}


def memberships(process: Path) -> dict[str, str]:
    """Return the groups of a process by controller, from its folder in ``/proc``; "" is version 2."""
    found: dict[str, str] = {}
    lines = text_of(process / "cgroup").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def quota(group: Path) -> float:
    """Return the cores that this group alone allows, by either version's files; infinite if it sets no limit."""
    allowed, _, period = text_of(group / "cpu.max").partition(" ")
    if not allowed:
        allowed, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
    return math.inf if allowed in ("", "max") or int(allowed) < 0 else int(allowed) / int(period)


def memory(group: Path, no_limit: float = 2**60) -> tuple[float, float]:
    """Return the bytes that this group alone allows, by either version's files (infinite for none), and those in use.

    A limit of ``no_limit`` bytes is none: version 1 has no other way to say so.
    """
    # The inactive file cache is not in use: the kernel gives it back first, and reading a data set fills any limit.
    for top, used, cache in _MEMORY_FILES:
        text = text_of(group / top)
        if text in ("", "max") or int(text) >= no_limit:
            continue
        stat = text_of(group / "memory.stat").split()
        cached = int(stat[stat.index(cache) + 1]) if cache in stat else 0
        return float(text), float(int((group / used).read_text()) - cached)
    return math.inf, 0.0


class ControlGroups:
    """The groups of this process below ``root``, where control groups are mounted."""

    def __init__(self, process: Path, root: Path) -> None:
        self._root = root
        self._paths = memberships(process)

    def beside(self, controller: str, other: str) -> dict[Path, Path]:
        """Map groups of one controller to the same groups under another, if the process is in the same one of both."""
        if self._paths.get(controller) != self._paths.get(other):
            return {}
        return dict(zip(self.levels(controller), self.levels(other), strict=False))

    def levels(self, controller: str) -> list[Path]:
        """Return the group and those around it, innermost first; empty if this controller is not mounted."""
        if controller not in self._paths:
            return []
        if controller:
            wanted = [m for m in sorted(self._root.glob("*")) if controller in m.name.split(",")]
        else:
            wanted = [m for m in (self._root, self._root / "unified") if os.path.exists(m / "cgroup.controllers")]
        if not wanted:
            return []
        parts = [p for p in self._paths[controller].split("/") if p and p != ".."]
        while parts and not os.path.isdir(wanted[0].joinpath(*parts)):
            parts = parts[1:]  # in a container the path may be the machine's, and the mount begins further in
        return [wanted[0].joinpath(*parts[:k]) for k in range(len(parts), -1, -1)]
