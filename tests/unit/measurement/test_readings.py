"""The drivers on fake /proc and control-group trees of both versions, and on this machine."""

import math
import os
import subprocess
import sys
import time

import pytest

from hvd_hetero.measurement.readings import ResourceMeter, Resources
from hvd_hetero.testing import quota_available

TICKS = os.sysconf("SC_CLK_TCK")
GIB = 1 << 30


class Machine:
    """A fake machine with four cores and 16 GiB: counters that tests move on, and group files that they write."""

    def __init__(self, root, membership="0::/\n"):
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.now, self.cores, self.own, self.nice, self.cpus = 0.0, [0.0] * 4, 0.0, 0.0, (0, 1, 2, 3)
        self.memory(16 * GIB, 12 * GIB)
        (self.proc / "self" / "cgroup").write_text(membership)
        self.write()

    def memory(self, total, available):
        text = f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\nBuffers: 1 kB\n"
        (self.proc / "meminfo").write_text(text)

    def write(self):
        lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
        lines += [
            f"cpu{k} {round(s * TICKS)} {round(self.nice * TICKS)} 0 999 9 0 0 0 0 0" for k, s in enumerate(self.cores)
        ]
        (self.proc / "stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]) + "\n")
        ticks = round(self.own * TICKS)
        # A process name with brackets and blanks, which naive splitting falls over.
        (self.proc / "self" / "stat").write_text(f"7 (my (odd) name) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1\n")

    def put(self, path, text):
        file = self.cgroup / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def run(self, seconds, own=0.0, others=0.0, core=0, nice=0.0):
        """Let time pass: seconds of own and others' work on one core, ``nice`` seconds of niced work on each."""
        self.now += seconds
        self.own += own
        self.nice += nice
        self.cores[core] += own + others
        self.write()

    def meter(self, **options):
        options = {"interval_s": 0.0, "affinity": lambda: self.cpus, **options}
        return ResourceMeter(lambda: self.now, proc=self.proc, cgroup=self.cgroup, **options)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_an_idle_machine_gives_all_its_cores_and_its_free_memory(machine):
    meter = machine.meter()
    assert meter.read() == Resources(cpu=1.0, memory=0.75)
    machine.run(1.0)
    assert meter.read().cpu == 1.0


def test_own_use_does_not_lower_cpu_but_that_of_others_does(machine):
    meter = machine.meter()
    meter.read()
    machine.run(1.0, own=1.0)
    assert meter.read().cpu == 1.0
    machine.run(1.0, own=0.5, others=0.8)
    assert meter.read().cpu == pytest.approx(1 - 0.8 / 4)


def test_others_on_cores_that_this_process_may_not_use_do_not_count(machine):
    machine.cpus = (2, 3)
    meter = machine.meter()
    meter.read()
    machine.run(1.0, others=1.0, core=0)
    assert meter.read().cpu == 1.0
    machine.run(1.0, others=1.0, core=2)
    assert meter.read().cpu == 0.5


def test_niced_work_of_others_gives_way_and_does_not_count(machine, monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    meter = machine.meter()
    meter.read()
    machine.run(1.0, nice=0.9)
    assert meter.read().cpu == 1.0


def test_niced_work_counts_where_this_process_is_niced_too(machine, monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: 10)
    meter = machine.meter()
    meter.read()
    machine.run(1.0, nice=0.5)
    assert meter.read().cpu == pytest.approx(0.5)


def test_the_rate_is_taken_over_the_window_and_forgets_what_is_older(machine):
    meter = machine.meter()
    meter.read()
    machine.run(0.25, others=0.25)
    assert meter.read().cpu == pytest.approx(0.75)
    machine.run(0.25)
    assert meter.read().cpu == pytest.approx(1 - 0.5 / 4)
    machine.run(0.25)
    assert meter.read().cpu == 1.0


def test_between_intervals_nothing_is_read(machine):
    meter = machine.meter(interval_s=0.1)
    first = meter.read()
    machine.memory(16 * GIB, 4 * GIB)
    machine.now = 0.09
    assert meter.read() is first
    machine.now = 0.11
    assert meter.read().memory == 0.25


QUOTA_V1 = {"cpu.cfs_quota_us": "{quota}", "cpu.cfs_period_us": "5000"}
QUOTA_V2 = {"cpu.max": "{quota} 5000"}


def group(machine, version, path, quota):
    prefix = "cpu,cpuacct" if version == 1 else "."
    if version == 2:
        machine.put("cgroup.controllers", "cpu memory")
    for name, text in (QUOTA_V1 if version == 1 else QUOTA_V2).items():
        machine.put(f"{prefix}/{path}/{name}", text.format(quota=quota))


MEMBER = {1: "4:cpu,cpuacct:/a/b\n3:memory:/a/b\n", 2: "0::/a/b\n"}


@pytest.mark.parametrize("version", [1, 2])
def test_a_stricter_quota_lowers_cpu_at_once(tmp_path, version):
    machine = Machine(tmp_path, MEMBER[version])
    group(machine, version, "a/b", 10_000)
    meter = machine.meter()
    assert meter.read().cpu == pytest.approx(2 / 4)
    seen = []
    for quota in (7_500, 5_000, 2_500, 1_000):
        group(machine, version, "a/b", quota)
        seen.append(meter.read().cpu)
    assert seen == pytest.approx([1.5 / 4, 1 / 4, 0.5 / 4, 0.2 / 4])


@pytest.mark.parametrize("version", [1, 2])
def test_others_in_the_same_group_use_up_its_quota(tmp_path, version):
    machine = Machine(tmp_path, MEMBER[version])
    group(machine, version, "a/b", 10_000)

    def account(seconds):
        if version == 1:
            machine.put("cpu,cpuacct/a/b/cpuacct.usage", int(seconds * 1e9))
        else:
            machine.put("a/b/cpu.stat", f"usage_usec {int(seconds * 1e6)}\nuser_usec 1\nthrottled_usec 0")

    account(5.0)
    meter = machine.meter()
    meter.read()
    account(6.5)  # one second of ours, half a second of a neighbour's
    machine.run(1.0, own=1.0, others=0.5)
    assert meter.read().cpu == pytest.approx((2.0 - 0.5) / 4)


def test_the_account_of_another_group_is_not_taken_for_this_one(tmp_path):
    """Version 1 with the controllers apart and the process in different groups of each."""
    machine = Machine(tmp_path, "2:cpuacct:/\n1:cpu:/x\n")
    machine.put("cpu/x/cpu.cfs_quota_us", "10000")
    machine.put("cpu/x/cpu.cfs_period_us", "5000")
    machine.put("cpuacct/cpuacct.usage", "0")
    meter = machine.meter()
    meter.read()
    machine.put("cpuacct/cpuacct.usage", int(3e9))
    machine.run(1.0, own=1.0)
    assert meter.read().cpu == pytest.approx(0.5)


def test_quota_and_load_do_not_add_up(tmp_path):
    """Others use one of four cores, the quota gives two: the quota is what binds."""
    machine = Machine(tmp_path, MEMBER[2])
    group(machine, 2, "a/b", 10_000)
    meter = machine.meter()
    meter.read()
    machine.run(1.0, others=1.0)
    assert meter.read().cpu == pytest.approx(0.5)


def test_others_that_fill_what_the_quota_leaves_do_not_count(tmp_path):
    """A rank on one core uses up its quota of 0.4, others the rest; then the quota rises, and is seen at once."""
    machine = Machine(tmp_path, MEMBER[2])
    machine.cpus = (0,)
    group(machine, 2, "a/b", 2_000)
    meter = machine.meter()
    for _ in range(6):
        assert meter.read().cpu == pytest.approx(0.4)
        machine.run(0.25, own=0.1, others=0.15)
    group(machine, 2, "a/b", 4_000)
    assert meter.read().cpu == pytest.approx(0.8)
    machine.run(0.5, own=0.25, others=0.25)  # now they do hold it back
    assert meter.read().cpu == pytest.approx(0.5)


def test_others_beyond_all_cores_give_zero_and_not_less(machine):
    machine.cpus = (0,)
    meter = machine.meter()
    meter.read()
    machine.run(1.0, others=1.5)
    assert meter.read().cpu == 0.0


def test_a_cpuset_without_any_of_the_cores_makes_cpu_unknown(tmp_path, caplog):
    machine = Machine(tmp_path, MEMBER[2])
    machine.put("cgroup.controllers", "cpu")
    machine.put("a/b/cpuset.cpus.effective", "7")
    assert math.isnan(machine.meter().read().cpu)
    assert "no core in common" in caplog.text


V1, V2 = "4:cpu,cpuacct:/a/b\n3:memory:/a/b\n5:cpuset:/a/b\n", "0::/a/b\n"
CPUS_V1 = {"cpu,cpuacct/a/b/cpu.cfs_quota_us": 2_500, "cpu,cpuacct/a/b/cpu.cfs_period_us": 5_000}
STAT = f"anon 1\ninactive_file {GIB}\nactive_file 3"
STAT_V1 = f"cache 1\ninactive_file 5\ntotal_inactive_file {GIB}"
GROUPS = {  # membership, files of the groups, and what is told: cpu, memory
    "of nested groups the strictest counts": (V2, {"a/cpu.max": "15000 5000", "a/b/cpu.max": "5000 5000"}, 0.25, 0.75),
    "which may be the outer one": (V2, {"a/cpu.max": "5000 5000", "a/b/cpu.max": "15000 5000"}, 0.25, 0.75),
    "no quota is no limit": (V2, {"a/b/cpu.max": "max 5000"}, 1.0, 0.75),
    "nor in version 1": (V1, CPUS_V1 | {"cpu,cpuacct/a/b/cpu.cfs_quota_us": -1}, 1.0, 0.75),
    "a cpuset": (V2, {"a/b/cpu.max": "2500 5000", "a/b/cpuset.cpus.effective": "0,2-3"}, 0.5 / 3, 0.75),
    "a cpuset of version 1": (V1, CPUS_V1 | {"cpuset/a/b/cpuset.effective_cpus": "0,2-3"}, 0.5 / 3, 0.75),
    "and of its first kernels": (V1, CPUS_V1 | {"cpuset/a/b/cpuset.cpus": "0,2-3"}, 0.5 / 3, 0.75),
    "memory that is left, cache not counted": (
        V2, {"a/memory.max": 8 * GIB, "a/memory.current": 5 * GIB, "a/memory.stat": STAT, "a/b/memory.max": "max"},
        1.0, (8 - 5 + 1) / 8,
    ),
    "the same in version 1": (
        V1, {"memory/a/memory.limit_in_bytes": 8 * GIB, "memory/a/memory.usage_in_bytes": 5 * GIB,
             "memory/a/memory.stat": STAT_V1, "memory/a/b/memory.limit_in_bytes": 9223372036854771712},
        1.0, (8 - 5 + 1) / 8,
    ),
    "the host is shorter of memory": (V2, {"a/b/memory.max": 13 * GIB, "a/b/memory.current": 0}, 1.0, 12 / 13),
    "a group over its limit": (V2, {"a/b/memory.max": GIB, "a/b/memory.current": 2 * GIB}, 1.0, 0.0),
    "a group of no memory": (V2, {"a/b/memory.max": 0, "a/b/memory.current": 2 * GIB}, 1.0, 0.0),
    "version 2 beside version 1": (
        "4:cpu:/x\n0::/y\n", {"unified/cgroup.controllers": "memory", "unified/y/memory.max": 4 * GIB,
                              "unified/y/memory.current": GIB, "cpu/x/cpu.cfs_quota_us": 5000,
                              "cpu/x/cpu.cfs_period_us": 5000},
        0.25, 0.75,
    ),
    **{f"a container whose mount begins further in than {told}": (f"0::{told}\n", {"cpu.max": "5000 5000"}, 0.25, 0.75)
       for told in ("/docker/abc", "/../../docker/abc", "/host/slice/docker/abc")},
    **{f"groups that are not mounted: {told!r}": (told, {}, 1.0, 0.75) for told in ("", "nonsense\n", "4:cpu:/x\n")},
}  # fmt: skip


@pytest.mark.parametrize(("membership", "files", "cpu", "memory"), GROUPS.values(), ids=GROUPS)
def test_what_a_process_may_use_in_its_groups(tmp_path, membership, files, cpu, memory):
    machine = Machine(tmp_path, membership)
    if membership.startswith("0::") and files:
        machine.put("cgroup.controllers", "cpu memory")
    for path, text in files.items():
        machine.put(path, text)
    assert machine.meter().read() == Resources(pytest.approx(cpu), pytest.approx(memory))


@pytest.mark.parametrize(
    ("file", "cpu_known", "memory_known"),
    [("stat", False, True), ("self/stat", False, True), ("meminfo", True, False)],
)
@pytest.mark.parametrize("how", ["absent", "garbage", "directory"])
def test_what_cannot_be_read_becomes_nan_and_is_told_once(machine, caplog, file, cpu_known, memory_known, how):
    path = machine.proc / file
    path.unlink()
    if how == "garbage":
        path.write_text("cpu\ncpu0 what is this\n")
    if how == "directory":
        path.mkdir()
    meter = machine.meter()
    for k in range(5):
        machine.now = float(k)
        reading = meter.read()
        assert (not math.isnan(reading.cpu), not math.isnan(reading.memory)) == (cpu_known, memory_known)
    assert len(caplog.records) == 1
    assert ("cpu" if memory_known else "memory") in caplog.records[0].getMessage()


@pytest.mark.parametrize("text", ["many 5000", "5000", "5000 0x"])
def test_a_quota_that_is_no_number_makes_cpu_unknown_and_leaves_memory(tmp_path, text, caplog):
    machine = Machine(tmp_path, MEMBER[2])
    machine.put("cgroup.controllers", "cpu")
    machine.put("a/b/cpu.max", text)
    reading = machine.meter().read()
    assert math.isnan(reading.cpu)
    assert reading.memory == 0.75
    assert "cpu driver is not known" in caplog.text


def test_a_driver_comes_back_when_its_file_does(machine):
    text = (machine.proc / "meminfo").read_text()
    (machine.proc / "meminfo").unlink()
    meter = machine.meter()
    assert math.isnan(meter.read().memory)
    (machine.proc / "meminfo").write_text(text)
    machine.now = 1.0
    assert meter.read().memory == 0.75


def test_this_machine_can_be_read():
    reading = ResourceMeter(time.monotonic, interval_s=0.0).read()
    assert 0.0 <= reading.cpu <= 1.0
    assert 0.0 < reading.memory <= 1.0


UNDER_A_QUOTA = """
import os, time
from hvd_hetero.measurement.readings import ResourceMeter
from hvd_hetero.testing import CpuQuota

with CpuQuota(0.5):
    print(ResourceMeter(time.monotonic).read().cpu, len(os.sched_getaffinity(0)))
"""


def test_a_real_quota_is_seen():
    if not (support := quota_available()):
        pytest.skip(f"no quota can be set here: {support.why}")
    done = subprocess.run([sys.executable, "-c", UNDER_A_QUOTA], capture_output=True, text=True, timeout=60, check=True)
    cpu, cores = map(float, done.stdout.split())
    assert cpu == pytest.approx(0.5 / cores)
