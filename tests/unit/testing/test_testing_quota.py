"""Processor quotas: their real effect where control groups may be written, and both layouts on a tree of our own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_hetero.testing import CpuQuota, QuotaUnavailableError, cgroups, quota, quota_available, remove_stale_groups

needs_quota = pytest.mark.skipif(not quota_available(), reason=f"control groups: {quota_available().why}")
PYTHON_ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def busy_share(seconds):
    """CPU seconds per wall second of a busy loop."""
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin_s < seconds:
        pass
    return (time.process_time() - cpu_s) / (time.perf_counter() - begin_s)


@needs_quota
def test_a_busy_loop_gets_the_share_it_was_given_and_a_new_one_while_it_runs():
    """Only the upper bounds are the quota's own; the lower ones are loose, for the machine may be busy with others."""
    with CpuQuota(0.5) as held:
        half = busy_share(1.0)
        assert 0.05 < half < 0.7
        held.share = 0.1  # needs a period longer than 5 ms, for the kernel's least quota is 1 ms
        tenth = busy_share(1.0)
        assert 0.01 < tenth < min(half, 0.3)
        held.share = None
        assert (held.group / "cpu.stat").read_text().split("nr_throttled ")[1][0] != "0"


@needs_quota
def test_another_process_is_held_with_its_children_and_both_come_back():
    """The child is started after the quota, so it is in the group; closing moves both out."""
    controller = cgroups.find_controller()
    with subprocess.Popen(["sh", "-c", "read line; sleep 100 & wait"], stdin=subprocess.PIPE) as shell:
        held = CpuQuota(0.9, pid=shell.pid).start()
        shell.stdin.write(b"go\n")
        shell.stdin.flush()
        deadline_s = time.monotonic() + 15
        while len(cgroups.members(held.group)) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.005)
        pids = cgroups.members(held.group)
        assert len(pids) == 2
        assert shell.pid in pids
        origin = controller.group_of(os.getpid())
        held.close()
        assert [controller.group_of(pid) for pid in pids] == [origin, origin]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@needs_quota
def test_the_group_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not():
    code = "from hvd_hetero.testing import CpuQuota; print(CpuQuota(0.9).start().group, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=PYTHON_ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        group = Path(holder.stdout.readline().strip())
        assert group not in remove_stale_groups()
        assert group.exists()
        holder.kill()
    deadline_s = time.monotonic() + 15
    while group not in remove_stale_groups() and group.exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert not group.exists(), "removed here, or by another test of this machine that has looked first"


class FakeKernel:
    """A mount table and a tree of groups in a folder, in which new groups get their files, as in the real one."""

    def __init__(self, root, monkeypatch):
        self.proc, self.mount, self.groups = root / "proc", root / "cgroup", []
        self.mount.mkdir()
        for pid in (str(os.getpid()), "self"):
            (self.proc / pid).mkdir(parents=True)
        stat = Path(f"/proc/{os.getpid()}/stat").read_text()
        (self.proc / str(os.getpid()) / "stat").write_text(stat)
        real_mkdir, real_rmdir = os.mkdir, os.rmdir

        def mkdir(path, *args, **keywords):
            real_mkdir(path, *args, **keywords)
            if Path(path).is_relative_to(self.mount):
                self._populate(Path(path))

        def rmdir(path, *args, **keywords):
            if Path(path).is_relative_to(self.mount):
                for file in Path(path).iterdir():
                    file.unlink()
            real_rmdir(path, *args, **keywords)

        monkeypatch.setattr(os, "mkdir", mkdir)
        monkeypatch.setattr(os, "rmdir", rmdir)

    def v1(self, path="/", root="/"):
        self.files = ["cgroup.procs", "cpu.cfs_period_us", "cpu.cfs_quota_us"]
        self._mounts(f"31 23 0:28 {root} {self.mount} rw - cgroup cgroup rw,cpuacct,cpu")
        return self._own(f"5:memory:/elsewhere\n3:cpuacct,cpu:{path}\n0::/\n", path, root)

    def v2(self, path="/"):
        self.files = ["cgroup.procs", "cgroup.subtree_control"]
        (self.mount / "cgroup.controllers").write_text("cpuset cpu io memory\n")
        self._mounts(f"31 23 0:28 / {self.mount} rw,relatime shared:9 - cgroup2 cgroup2 rw")
        own = self._own(f"0::{path}\n", path, "/")
        (own / "cgroup.subtree_control").write_text("cpu")
        return own

    def _mounts(self, line):
        (self.proc / "self" / "mountinfo").write_text(f"30 23 0:27 / /tmp rw - tmpfs tmpfs rw\n{line}\n")

    def _own(self, text, path, root):
        (self.proc / str(os.getpid()) / "cgroup").write_text(text)
        own = self.mount / os.path.relpath(path, root)
        own.mkdir(parents=True, exist_ok=True)
        return own

    def _populate(self, group):
        self.groups.append(group)
        for name in self.files:
            (group / name).write_text("")
        control = group.parent / "cgroup.subtree_control"
        if control.exists() and "cpu" in control.read_text():
            (group / "cpu.max").write_text("max 100000")


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return FakeKernel(tmp_path, monkeypatch)


# The kernel takes no quota below 1 ms, so small shares lengthen the period, to 1 s at most.
LIMITS = {0.5: "2500 5000", 1.5: "7500 5000", None: "max 5000", 0.05: "1000 20000", 0.001: "1000 1000000"}


@pytest.mark.parametrize("version", [1, 2])
def test_quota_and_period_are_those_of_a_group_below_our_own(kernel, version):
    """A container sees its hierarchy from its own root on, which the path in /proc still contains."""
    own = kernel.v1(path="/docker/abc/job", root="/docker/abc") if version == 1 else kernel.v2("/job")
    controller = cgroups.find_controller(kernel.proc)
    group = controller.create()
    assert (controller.version, group.parent) == (version, own)
    for cores, told in LIMITS.items():
        controller.limit(group, cores, 5_000)
        names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if version == 1 else ["cpu.max"]
        assert " ".join((group / name).read_text() for name in names).replace("-1 ", "max ") == told


def test_v2_goes_beside_our_group_where_the_kernel_does_not_let_it_have_children(kernel, monkeypatch):
    """A group that holds processes may not hand controllers down: the kernel says EBUSY."""
    own = kernel.v2("/user/job")
    kernel._own("0::/user/job\n", "/user/job", "/")
    (own.parent / "cgroup.subtree_control").write_text("cpu")

    def busy(parent):
        if parent == own:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(cgroups, "_switch_on_cpu", busy)
    assert cgroups.find_controller(kernel.proc).create().parent == own.parent


def test_stale_groups_are_those_of_the_dead_that_hold_nobody(kernel):
    """A pid that was given to another process since is told apart by its start time."""
    kernel.v2("/")
    controller = cgroups.find_controller(kernel.proc)
    ours = controller.create()
    recycled, dead, held = (
        kernel.mount / f"{cgroups.PREFIX}.{owner}" for owner in (f"{os.getpid()}.1.0", "999999999.5.0", "999999999.5.1")
    )
    other = kernel.mount / "somebody.999999999.5.0"
    for group in (recycled, dead, held, other):
        group.mkdir()
    (held / "cgroup.procs").write_text("0\n")
    assert sorted(controller.remove_stale()) == sorted([recycled, dead])
    assert all(group.exists() for group in (ours, held, other))


def test_a_share_that_the_kernel_refuses_is_an_error_that_says_where_and_leaves_no_group(kernel, monkeypatch):
    own = kernel.v1()
    monkeypatch.setattr(quota, "find_controller", lambda: cgroups.find_controller(kernel.proc))

    def refuse(*args):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(cgroups.CpuController, "limit", refuse)
    with pytest.raises(QuotaUnavailableError, match=r"0\.7.*group above"):
        CpuQuota(0.7).start()
    assert not any(own.glob(f"{cgroups.PREFIX}.*"))
