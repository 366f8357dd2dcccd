"""The drivers on fake /proc and control-group trees of both versions, and on this machine."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_hetero.measurement.readings import ResourceMeter, Resources

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
@pytest.mark.parametrize("strict", ["a", "a/b"])
def test_of_nested_groups_the_strictest_counts(tmp_path, version, strict):
    machine = Machine(tmp_path, MEMBER[version])
    for path in ("a", "a/b"):
        group(machine, version, path, 5_000 if path == strict else 15_000)
    assert machine.meter().read().cpu == pytest.approx(1 / 4)


@pytest.mark.parametrize(("version", "unlimited"), [(1, "-1"), (2, "max")])
def test_no_quota_is_no_limit(tmp_path, version, unlimited):
    machine = Machine(tmp_path, MEMBER[version])
    group(machine, version, "a/b", unlimited)
    assert machine.meter().read().cpu == 1.0


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


@pytest.mark.parametrize(
    ("version", "file"),
    [(2, "a/b/cpuset.cpus.effective"), (1, "cpuset/a/b/cpuset.effective_cpus"), (1, "cpuset/a/b/cpuset.cpus")],
)
def test_the_cpuset_narrows_the_affinity(tmp_path, version, file):
    machine = Machine(tmp_path, MEMBER[version] + "5:cpuset:/a/b\n")
    group(machine, version, "a/b", 2_500)
    machine.put(file, "0,2-3")
    assert machine.meter().read().cpu == pytest.approx(0.5 / 3)


def test_a_cpuset_without_any_of_the_cores_makes_cpu_unknown(tmp_path, caplog):
    machine = Machine(tmp_path, MEMBER[2])
    machine.put("cgroup.controllers", "cpu")
    machine.put("a/b/cpuset.cpus.effective", "7")
    assert math.isnan(machine.meter().read().cpu)
    assert "no core in common" in caplog.text


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_is_left_under_the_groups_limit_cache_not_counted(tmp_path, version):
    machine = Machine(tmp_path, MEMBER[version])
    if version == 1:
        names = ("memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes", "memory/a/memory.stat")
        stat = f"cache 1\ninactive_file 5\ntotal_inactive_file {GIB}"
        machine.put("memory/a/b/memory.limit_in_bytes", 9223372036854771712)
    else:
        names = ("a/memory.max", "a/memory.current", "a/memory.stat")
        stat = f"anon 1\ninactive_file {GIB}\nactive_file 3"
        machine.put("cgroup.controllers", "memory")
        machine.put("a/b/memory.max", "max")
    for name, text in zip(names, (8 * GIB, 5 * GIB, stat), strict=True):
        machine.put(name, text)
    assert machine.meter().read().memory == pytest.approx((8 - 5 + 1) / 8)


def test_the_host_counts_where_it_is_shorter_of_memory_than_the_group(tmp_path):
    machine = Machine(tmp_path, MEMBER[2])
    machine.put("cgroup.controllers", "memory")
    machine.put("a/b/memory.max", 8 * GIB)
    machine.put("a/b/memory.current", 1 * GIB)
    machine.memory(16 * GIB, 2 * GIB)
    assert machine.meter().read().memory == pytest.approx(2 / 8)


def test_a_group_over_its_limit_has_no_memory_left(tmp_path):
    machine = Machine(tmp_path, MEMBER[2])
    machine.put("cgroup.controllers", "memory")
    machine.put("a/b/memory.max", GIB)
    machine.put("a/b/memory.current", 2 * GIB)
    assert machine.meter().read().memory == 0.0
    machine.put("a/b/memory.max", 0)
    assert machine.meter().read().memory == 0.0


def test_a_hybrid_host_has_version_2_beside_version_1(tmp_path):
    machine = Machine(tmp_path, "4:cpu:/x\n0::/y\n")
    machine.put("unified/cgroup.controllers", "memory")
    machine.put("unified/y/memory.max", 4 * GIB)
    machine.put("unified/y/memory.current", 1 * GIB)
    machine.put("cpu/x/cpu.cfs_quota_us", "5000")
    machine.put("cpu/x/cpu.cfs_period_us", "5000")
    assert machine.meter().read() == Resources(cpu=0.25, memory=0.75)


@pytest.mark.parametrize("told", ["/docker/abc", "/../../docker/abc", "/host/slice/docker/abc"])
def test_in_a_container_the_mount_may_begin_further_in_than_the_path_says(tmp_path, told):
    machine = Machine(tmp_path, f"0::{told}\n")
    machine.put("cgroup.controllers", "cpu")
    machine.put("cpu.max", "5000 5000")
    assert machine.meter().read().cpu == 0.25


def test_a_kernel_without_control_groups_has_the_hosts_limits_only(tmp_path):
    machine = Machine(tmp_path)
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.meter().read() == Resources(cpu=1.0, memory=0.75)


@pytest.mark.parametrize("membership", ["", "nonsense\n", "4:cpu:/x\n"])
def test_groups_that_are_named_but_not_mounted_are_no_limit(tmp_path, membership):
    assert Machine(tmp_path, membership).meter().read() == Resources(cpu=1.0, memory=0.75)


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


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_an_interval_that_is_none_is_an_error_that_names_it(value):
    with pytest.raises(ValueError, match="interval_s"):
        ResourceMeter(time.monotonic, interval_s=value)


def test_this_machine_can_be_read_quickly_and_within_bounds():
    """A read takes well under a millisecond of a processor; the bound is generous, because machines differ."""
    meter = ResourceMeter(time.monotonic, interval_s=0.0)
    spent = []
    for _ in range(50):
        began = time.thread_time()
        reading = meter.read()
        spent.append(time.thread_time() - began)
        assert 0.0 <= reading.cpu <= 1.0
        assert 0.0 < reading.memory <= 1.0
    assert statistics.median(spent) < 50e-3
    lazy = ResourceMeter(time.monotonic, interval_s=60.0)
    lazy.read()
    spent = []
    for _ in range(200):
        began = time.thread_time()
        lazy.read()
        spent.append(time.thread_time() - began)
    assert statistics.median(spent) < 50e-6


def test_a_real_quota_is_seen(tmp_path):
    """A process under half a core's quota sees it, where this test may make control groups of version 1."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = {controller: path for _, names, path in lines for controller in names.split(",")}
    home = Path("/sys/fs/cgroup/cpu") / mine.get("cpu", "/").lstrip("/") / f"hvd-hetero-test-{os.getpid()}"
    try:
        home.mkdir()
        (home / "cpu.cfs_period_us").write_text("5000")
        (home / "cpu.cfs_quota_us").write_text("2500")
    except OSError as error:
        pytest.skip(f"no control group may be made here: {error}")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "import os, json, time\n"
        f"open({str(home / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from hvd_hetero.measurement.readings import ResourceMeter\n"
        "r = ResourceMeter(time.monotonic).read()\n"
        "print(json.dumps([r.cpu, len(os.sched_getaffinity(0))]))\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    finally:
        home.rmdir()
    cpu, cores = json.loads(done.stdout)
    assert cpu == pytest.approx(0.5 / cores)
