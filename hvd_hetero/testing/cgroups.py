"""Find the kernel's ``cpu`` controller, and make, use and remove a group under it.

The two layouts differ only in file names and in who may have children::

    v1   <mount of the cpu controller>/<own group>/<new group>/cpu.cfs_{period,quota}_us
    v2   <the one mount>/<a group with "cpu" in cgroup.subtree_control>/<new group>/cpu.max

In v2 a group other than the root that holds processes may not hand controllers to its children. So the new group
goes below our own group if that works already or can be switched on, and else beside it, below our group's parent.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_hetero.measurement.kernel import memberships, text_of

PREFIX = "hvd-hetero"
_MIN_QUOTA_US = 1_000  # the kernel refuses less, for period and quota alike
_MAX_PERIOD_US = 1_000_000
_serial = itertools.count()


class QuotaUnavailableError(OSError):
    """Processor time may not be limited by a control group here; the message says why."""


@dataclass(frozen=True, slots=True)
class CpuController:
    """The ``cpu`` controller as seen by this process: its version and the groups below which a new one may be made."""

    version: int
    mount: Path
    parents: tuple[Path, ...]  # in order of preference
    root: str = "/"  # the part of the hierarchy that is mounted; a container may see less than all of it
    proc: Path = Path("/proc")

    def create(self) -> Path:
        """Make a new group, named after this process so that it can be recognised once its owner is dead."""
        name = f"{PREFIX}.{os.getpid()}.{_start_ticks(self.proc, os.getpid())}.{next(_serial)}"
        refusals = []
        for parent in self.parents:
            group = parent / name
            try:
                if self.version == 2:
                    _switch_on_cpu(parent)
                group.mkdir()
            except OSError as error:
                refusals.append(f"{parent}: {error.strerror}")
                continue
            if self._limit_file(group).exists():
                return group
            group.rmdir()
            refusals.append(f"{parent}: a new group gets no {self._limit_file(group).name}")
        raise QuotaUnavailableError(f"no control group can be made ({'; '.join(refusals) or 'none is mounted'})")

    def limit(self, group: Path, cores: float | None, period_us: int) -> None:
        """Let ``group`` run for ``cores`` x ``period_us`` in every ``period_us``; ``None`` lifts the limit."""
        if cores is None:
            quota_us = -1
        else:
            # The kernel refuses quotas under 1 ms, so small shares lengthen the period.
            period_us = min(max(period_us, round(_MIN_QUOTA_US / cores)), _MAX_PERIOD_US)
            quota_us = max(round(cores * period_us), _MIN_QUOTA_US)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us if quota_us > 0 else 'max'} {period_us}")
            return
        # Unlimited first: the kernel checks every single write, and the old quota may not go with the new period.
        for name, value in (("quota", -1), ("period", period_us), ("quota", quota_us)):
            (group / f"cpu.cfs_{name}_us").write_text(str(value))

    def group_of(self, pid: int) -> Path:
        """Return the group that ``pid`` is in now."""
        return _group_of(self.proc, pid, self.version, self.mount, self.root)

    def remove(self, group: Path, back_to: Path, patience_s: float = 1.0) -> bool:
        """Move all processes of ``group`` to ``back_to`` and remove it; return False if the kernel held on to it."""
        # A group stays busy for a moment after its last process has ended.
        deadline_s = time.monotonic() + patience_s
        while group.exists():
            for pid in members(group):
                # 0 stands for a process that we cannot name; writing it would move ourselves.
                if pid:
                    _move(pid, back_to)
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(0.005)
        return True

    def remove_stale(self) -> list[Path]:
        """Remove the groups of this package's processes that were killed before they could; return those removed.

        Groups that still hold a process are left alone: their owner may live in a pid namespace that is not ours, or a
        child of it may still run; a later call will find them empty.
        """
        removed = []
        for group in self._marked_groups():
            owner, start_ticks = group.name.split(".")[1:3]
            if _start_ticks(self.proc, int(owner)) == int(start_ticks) or members(group):
                continue
            try:
                group.rmdir()
            except OSError:  # removed by another process, or entered just now: not ours to remove
                continue
            removed.append(group)
        return removed

    def _marked_groups(self) -> Iterator[Path]:
        for parent in self.parents:
            for group in parent.glob(f"{PREFIX}.*.*.*"):
                if group.is_dir() and all(part.isdigit() for part in group.name.split(".")[1:3]):
                    yield group

    def _limit_file(self, group: Path) -> Path:
        return group / ("cpu.max" if self.version == 2 else "cpu.cfs_quota_us")


def find_controller(proc: Path = Path("/proc")) -> CpuController:
    """Return this machine's controller, from the mount table; v1 first, because a hybrid machine has ``cpu`` there."""
    v2: CpuController | None = None
    for line in text_of(proc / "self/mountinfo").splitlines():
        fields = line.split()
        root, mount = fields[3], Path(fields[4])
        kind, _, options = fields[fields.index("-") + 1 : fields.index("-") + 4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(1, mount, (_group_of(proc, os.getpid(), 1, mount, root),), root, proc)
        if kind == "cgroup2" and "cpu" in text_of(mount / "cgroup.controllers").split():
            own = _group_of(proc, os.getpid(), 2, mount, root)
            # Its parent, too: moving our group's processes elsewhere to make room, as container runtimes do at their
            # start, is not possible, because those processes are not ours.
            v2 = CpuController(2, mount, (own,) if own == mount else (own, own.parent), root, proc)
    if v2 is None:
        raise QuotaUnavailableError("no cpu controller is mounted, neither cgroup v1 nor v2")
    return v2


def members(group: Path) -> list[int]:
    """Return the processes in ``group``; 0 stands for one that this pid namespace cannot name."""
    return [int(pid) for pid in text_of(group / "cgroup.procs").split()]


def enter(pid: int, group: Path) -> None:
    """Put ``pid``, all its threads and all its future children into ``group``."""
    (group / "cgroup.procs").write_text(str(pid))


def _move(pid: int, group: Path) -> None:
    try:
        enter(pid, group)
    except ProcessLookupError:  # it ended meanwhile, which serves as well
        return


def _switch_on_cpu(parent: Path) -> None:
    """Enable ``cpu`` for the children of ``parent``."""
    # Left on afterwards: off would lift the limits of other ranks.
    control = parent / "cgroup.subtree_control"
    if "cpu" not in text_of(control).split():
        control.write_text("+cpu")


def _group_of(proc: Path, pid: int, version: int, mount: Path, root: str) -> Path:
    """Return the directory of the group of ``pid``: its path in the hierarchy, less what the mount leaves out."""
    path = memberships(proc / str(pid)).get("cpu" if version == 1 else "")
    if path is None:
        return mount
    relative = os.path.relpath(path, root)
    return mount if relative == "." or relative.startswith("..") else mount / relative


def _start_ticks(proc: Path, pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot (field 22 of its stat line); None if it is dead."""
    fields = text_of(proc / str(pid) / "stat").rpartition(")")[2].split()  # from field 3, the state, on
    return None if not fields or fields[0] in "ZX" else int(fields[19])  # Z: dead, and not yet reaped
