"""What keeps a rank from its work, on fake trees of the kernel's files of both versions, and on this machine."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time
from dataclasses import astuple, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.balancer import Balancer
from hvd_hetero.measurement.hindrances import HindranceMeter, Hindrances, collecting_s
from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.testing import quota_available

V1, V2 = "4:cpu:/a/b\n3:memory:/a/b\n", "0::/a/b\n"
TICKS = os.sysconf("SC_CLK_TCK")
SHARES = ("throttled", "contended", "stolen", "stalled", "collecting")


class Kernel:
    """A fake kernel with two cores, whose counters tests move on."""

    def __init__(self, root, membership=V2):
        self.proc, self.cgroup, self.cpus = root / "proc", root / "cgroup", root / "cpus"
        self.now, self.version = 0.0, 1 if "cpu" in membership else 2
        self.threads = {"7": (0, 0)}
        self.put(self.proc / "self/cgroup", membership)
        self.put(self.proc / "self/net/dev", "Inter-|\n face |\n")
        self.stat(0)
        self.ticks(0, 0)
        self.schedule()
        if self.version == 2:
            self.put(self.cgroup / "cgroup.controllers", "cpu memory")

    def put(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def stat(self, faults, core=1, own_s=0.0):
        # A process name with brackets and blanks, which naive splitting falls over.
        fields = ["R", *["0"] * 8, str(faults), "0", str(round(own_s * TICKS)), "0", *["0"] * 23, str(core), "0"]
        self.put(self.proc / "self/stat", f"7 (my (odd) name) {' '.join(fields)}\n")

    def ticks(self, busy, stolen, idle=999):
        core = f"{busy} 0 0 {idle} 9 0 0 {stolen} 0 0"
        self.put(
            self.proc / "stat",
            f"cpu 1 1 1 1 1 1 1 1 1 1\ncpu0 {core}\ncpu1 {core}\ncpu2 9 9 9 9 9 9 9 999 0 0\nintr 5\n",
        )

    def others(self, seconds):
        """Let other processes have run for so long on the cores of this one, which ran as its threads say."""
        own_s = sum(ran_s for ran_s, _ in self.threads.values())
        self.stat(0, own_s=own_s)
        self.ticks(round((own_s + seconds) * TICKS / 2), 0)

    def schedule(self):
        for thread, (ran_s, ready_s) in self.threads.items():
            text = f"{round(ran_s * 1e9)} {round(ready_s * 1e9)} 3\n"
            self.put(self.proc / "self/task" / thread / "schedstat", text)

    def throttle(self, group, seconds, quota=0.5):
        if self.version == 1:
            folder = self.cgroup / "cpu" / group
            self.put(folder / "cpu.stat", f"nr_periods 9\nnr_throttled 3\nthrottled_time {round(seconds * 1e9)}\n")
            self.put(folder / "cpu.cfs_quota_us", f"{round(quota * 5000)}\n")
            self.put(folder / "cpu.cfs_period_us", "5000\n")
        else:
            folder = self.cgroup / group
            self.put(folder / "cpu.stat", f"usage_usec 1\nnr_throttled 3\nthrottled_usec {round(seconds * 1e6)}\n")
            self.put(folder / "cpu.max", f"{round(quota * 5000)} 5000\n")

    def meter(self):
        return HindranceMeter(
            lambda: self.now, proc=self.proc, cgroup=self.cgroup, cpus=self.cpus, affinity=lambda: {0, 1}
        )


@pytest.fixture(params=[V1, V2], ids=["v1", "v2"])
def kernel(request, tmp_path):
    return Kernel(tmp_path, request.param)


def test_nothing_is_known_before_the_first_interval_and_nothing_happened_in_a_quiet_one(kernel):
    assert all(map(math.isnan, astuple(Hindrances())))
    meter = kernel.meter()
    assert all(map(math.isnan, astuple(meter.read()))), "no time has passed"
    kernel.now, kernel.threads = 2.0, {"7": (2.0, 0.0)}
    kernel.schedule()
    reading = meter.read()
    assert [getattr(reading, name) for name in SHARES[:4]] == [0.0] * 4
    assert (reading.quota_cores, reading.faults_per_s, reading.clock, reading.sent_mb_s) == (0.0, 0.0, 0.0, 0.0)


# Seconds that pass; that each thread ran, and was ready and did not; that others ran; the quota before and after, and
# for how long the kernel says that it held the group back; what is told: throttled, contended.
MISSED = {
    "a quota, and processes that run in its place": (2.0, [(0.6, 1.4)], 3.0, (0.5, 0.5), 0.8, (0.8 / 2, 0.6 / 2)),
    # As measured: at a quota of 0.4 beside a process that fills its core, the kernel counted 0.15 s of each second.
    "others that fill what a quota leaves": (1.0, [(0.396, 0.604)], 1.2, (0.4, 0.4), 0.147, (0.6, 0.004)),
    "a quota that has been lifted": (1.0, [(0.4, 0.6)], 0.0, (0.5, -1.0), 0.1, (0.1, 0.0)),
    "a rank that waits half of the time": (4.0, [(1.0, 1.0)], 6.0, None, 0.0, (0.0, 1.0 / 4)),
    "threads that wait for each other": (1.0, [(0.5, 0.5)] * 4, 0.0, None, 0.0, (0.0, 0.0)),
    "others beside one that wants no more": (1.0, [(1.0, 0.0)], 1.0, None, 0.0, (0.0, 0.0)),
    # The kernel counts the time of each of the two cores; threads that share one are ready side by side.
    "a quota, and one thread": (1.0, [(0.4, 0.6)], 0.0, (0.8, 0.8), 0.6, (0.6, 0.0)),
    "a quota, and two threads": (1.0, [(0.4, 0.6)] * 2, 0.0, (0.8, 0.8), 1.2, (0.6, 0.0)),
    "a quota, and four threads": (1.0, [(0.2, 0.8)] * 4, 0.0, (0.8, 0.8), 1.2, (0.6, 0.0)),
}


@pytest.mark.parametrize(("seconds", "threads", "others", "quotas", "held_s", "told"), MISSED.values(), ids=MISSED)
def test_what_threads_miss_is_told_by_its_reason(kernel, seconds, threads, others, quotas, held_s, told):
    if quotas:
        kernel.throttle("a/b", 10.0, quota=quotas[0])
    meter = kernel.meter()
    kernel.now, kernel.threads = seconds, {str(number + 7): times for number, times in enumerate(threads)}
    kernel.schedule()
    kernel.others(others)
    if quotas:
        kernel.throttle("a/b", 10.0 + held_s, quota=quotas[1])
    reading = meter.read()
    assert (reading.throttled, reading.contended) == pytest.approx(told)
    assert reading.quota_cores == (max(quotas[1], 0.0) if quotas else 0.0)


def test_ticks_that_always_meet_this_process_running_are_not_taken_for_those_of_others(kernel):
    """A quota of 0.7 in periods of two ticks: each tick counts as busy, and three tenths of the core are idle."""
    kernel.throttle("a/b", 0.0, quota=0.7)
    meter = kernel.meter()
    kernel.now, kernel.threads = 1.0, {"7": (0.6, 0.1), "8": (0.0, 0.3)}
    kernel.schedule()
    kernel.stat(0, own_s=0.6)
    kernel.ticks(round(1.0 * TICKS), 0, idle=999 + round(0.7 * TICKS))
    kernel.throttle("a/b", 0.1, quota=0.7)
    assert meter.read().contended == pytest.approx(0.0, abs=1e-9)


def test_threads_come_and_go(kernel):
    kernel.threads = {"7": (5.0, 5.0), "8": (9.0, 9.0)}
    kernel.schedule()
    kernel.others(0.0)
    meter = kernel.meter()
    (kernel.proc / "self/task/8/schedstat").unlink()
    (kernel.proc / "self/task/8").rmdir()
    kernel.now, kernel.threads = 1.0, {"7": (5.5, 5.1), "9": (0.1, 0.2)}
    kernel.schedule()
    kernel.stat(0, own_s=14.6)
    kernel.ticks(round(16.6 * TICKS / 2), 0)
    assert meter.read().contended == pytest.approx(0.1 + 0.2)


def test_a_thread_with_the_number_of_one_that_ended_has_no_time_below_zero(kernel):
    kernel.threads = {"7": (5.0, 5.0)}
    kernel.schedule()
    meter = kernel.meter()
    kernel.now, kernel.threads = 1.0, {"7": (0.1, 0.1)}
    kernel.schedule()
    assert meter.read().contended == 0.0


def test_of_nested_groups_the_one_that_held_back_most_counts_and_the_strictest_quota(kernel):
    kernel.throttle("a", 0.0, quota=0.75)
    kernel.throttle("a/b", 0.0, quota=1.5)
    meter = kernel.meter()
    kernel.now, kernel.threads = 1.0, {"7": (0.7, 0.3)}
    kernel.schedule()
    kernel.throttle("a", 0.25, quota=0.75)
    reading = meter.read()
    assert (reading.throttled, reading.quota_cores) == (pytest.approx(0.25), 0.75)


def test_without_the_schedulers_figures_throttling_is_a_share_of_the_time(kernel):
    (kernel.proc / "self/task/7/schedstat").unlink()
    kernel.throttle("a/b", 0.0)
    meter = kernel.meter()
    kernel.now = 2.0
    kernel.throttle("a/b", 0.5)
    reading = meter.read()
    assert (reading.throttled, reading.contended) == (pytest.approx(0.25), 0.0)


def test_stolen_time_counts_on_the_cores_of_this_process_alone(kernel):
    meter = kernel.meter()
    kernel.now = 1.0
    kernel.ticks(60, 20)
    assert meter.read().stolen == pytest.approx(0.25)


def pressure(total_us):
    return f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total_us}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"


def test_the_machines_memory_pressure_counts_where_this_process_reads_back_pages(kernel):
    kernel.put(kernel.proc / "pressure/memory", pressure(0))
    meter = kernel.meter()
    kernel.now = 1.0
    kernel.put(kernel.proc / "pressure/memory", pressure(300_000))
    assert meter.read().stalled == 0.0
    kernel.now = 3.0
    kernel.put(kernel.proc / "pressure/memory", pressure(900_000))
    kernel.stat(faults=50)
    reading = meter.read()
    assert (reading.stalled, reading.faults_per_s) == (pytest.approx(0.3), 25.0)


def test_the_groups_memory_pressure_goes_before_the_machines(tmp_path):
    kernel = Kernel(tmp_path, V2)
    kernel.put(kernel.proc / "pressure/memory", pressure(0))
    kernel.put(kernel.cgroup / "a/b/memory.pressure", pressure(0))
    meter = kernel.meter()
    kernel.now = 1.0
    kernel.put(kernel.proc / "pressure/memory", pressure(900_000))
    kernel.put(kernel.cgroup / "a/b/memory.pressure", pressure(200_000))
    assert meter.read().stalled == pytest.approx(0.2)


def test_the_clock_is_that_of_the_core_that_the_process_ran_on(kernel):
    for core, now in ((0, 3_000_000), (1, 2_000_000)):
        kernel.put(kernel.cpus / f"cpu{core}/cpufreq/scaling_cur_freq", f"{now}\n")
        kernel.put(kernel.cpus / f"cpu{core}/cpufreq/cpuinfo_max_freq", "4000000\n")
    meter = kernel.meter()
    kernel.now = 1.0
    assert meter.read().clock == pytest.approx(0.5)


def test_bytes_sent_are_counted_over_all_interfaces_but_the_loopback(kernel):
    """What the ranks of one machine tell each other is on no network."""

    def sent(**interfaces):
        line = "    {}: 9 9 9 9 9 9 9 9 {} 9 9 9 9 9 9 9\n"
        lines = (line.format(name, sent) for name, sent in interfaces.items())
        kernel.put(kernel.proc / "self/net/dev", "Inter-|\n face |\n" + "".join(lines))

    sent(lo=1000, eth0=0, eth1=0)
    meter = kernel.meter()
    kernel.now = 2.0
    sent(lo=700_000_000, eth0=50_000_000, eth1=10_000_000)
    assert meter.read().sent_mb_s == pytest.approx(30.0)


def test_collecting_garbage_is_timed():
    began, meter = time.perf_counter(), HindranceMeter(time.perf_counter)
    before_s = collecting_s()
    kept = [[] for _ in range(100_000)]
    gc.collect()
    spent_s = collecting_s() - before_s
    del kept
    assert 0.0 < spent_s < time.perf_counter() - began
    assert meter.read().collecting > 0.0
    assert gc.callbacks.count(next(c for c in gc.callbacks if type(c).__name__ == "_Collections")) == 1


FILES = (
    "proc/self/cgroup", "proc/self/stat", "proc/self/task/7/schedstat", "proc/self/net/dev", "proc/stat",
    "proc/pressure/memory", "cgroup/a/b/cpu.stat", "cgroup/a/b/cpu.max", "cgroup/a/b/memory.pressure",
    "cgroup/cpu/a/b/cpu.stat", "cgroup/cpu/a/b/cpu.cfs_quota_us", "cgroup/cpu/a/b/cpu.cfs_period_us",
    "cpus/cpu1/cpufreq/scaling_cur_freq", "cpus/cpu1/cpufreq/cpuinfo_max_freq",
)  # fmt: skip
WORDS = st.sampled_from(
    ("0", "1", "-1", "-7", "99999999999", "1e3", "max", "nan", "cpu0", "cpu1", "some", "total=5", "throttled_usec",
     "throttled_time", "lo:", ")", "(", ":", "\n", "")
)  # fmt: skip
CONTENT = st.none() | st.binary(max_size=40) | st.lists(WORDS, max_size=30).map(lambda words: " ".join(words).encode())


@given(st.data(), st.sampled_from([V1, V2]))
def test_whatever_the_files_hold_a_reading_is_made_of_finite_figures(tmp_path_factory, data, membership):
    root = tmp_path_factory.mktemp("kernel")
    kernel = Kernel(root, membership)
    meter = kernel.meter()
    for _ in range(2):
        for name in data.draw(st.lists(st.sampled_from(FILES), max_size=5)):
            content = data.draw(CONTENT)
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).unlink(missing_ok=True)
            if content is not None:
                (root / name).write_bytes(content)
        kernel.now += 1.0
        reading = (kernel.meter() if data.draw(st.booleans()) else meter).read()
        if kernel.now > 1.0 or not math.isnan(reading.throttled):
            figures = reading.row()
            assert all(0.0 <= figures[name] <= 1.0 for name in SHARES) or all(map(math.isnan, figures.values()))
            assert all(value >= 0.0 for value in figures.values()) or all(map(math.isnan, figures.values()))


BURN = """
import time
from pathlib import Path
from hvd_hetero.measurement.hindrances import HindranceMeter
from hvd_hetero.testing import CpuQuota

def throttled_s():
    stat = dict(line.split() for line in (Path(quota.group) / "cpu.stat").read_text().splitlines())
    return float(stat["throttled_usec"]) * 1e-6 if "throttled_usec" in stat else float(stat["throttled_time"]) * 1e-9

with CpuQuota(0.1, period_us=20_000) as quota:
    outer, outer_s = time.perf_counter(), throttled_s()
    meter = HindranceMeter(time.perf_counter)
    inner_s, inner = throttled_s(), time.perf_counter()
    while time.perf_counter() < inner + 0.5 or throttled_s() < inner_s + 0.1:
        pass
    inner, inner_s = time.perf_counter() - inner, throttled_s() - inner_s
    found = meter.read()
    outer_s, outer = throttled_s() - outer_s, time.perf_counter() - outer
print(found.quota_cores, inner_s / outer, found.throttled, outer_s / inner)
"""


def test_a_real_quota_is_seen():
    """At least what the kernel counts, and at most the nine tenths of the time that the quota leaves."""
    if not (support := quota_available()):
        pytest.skip(f"no quota can be set here: {support.why}")
    done = subprocess.run([sys.executable, "-c", BURN], capture_output=True, text=True, timeout=60, check=True)
    quota_cores, least, throttled, most = map(float, done.stdout.split())
    assert quota_cores == 0.1
    assert least - 0.05 <= throttled <= max(most, 0.95)
    assert throttled > 0.0


class Counted:
    """Stands in for a meter: tells how often it was read, and when a reading would have delayed others."""

    def __init__(self):
        self.reads, self.at_leisure = 0, False

    def read(self):
        assert self.at_leisure, "read while others may wait for this rank"
        self.reads += 1
        return Hindrances(*[0.25] * 9)


@pytest.mark.parametrize("policy", [BSP(), LBBSP(predictor="narx")], ids=["no drivers", "drivers"])
def test_a_rank_reads_once_a_second_while_others_compute_and_tells_it_with_the_next_row(policy):
    now, meter = [0.0], Counted()
    balancer = Balancer(policy, 0, 1, 16, clock=lambda: now[0], hindrances=meter)
    told = []
    for _ in range(100):
        balancer.begin(MicroBatch(balancer.plan(), 16))
        now[0] += 0.05
        row = balancer.report()
        meter.at_leisure = True
        balancer.waiting()
        meter.at_leisure = False
        balancer.agree(row)
        told.append(balancer.finished.table.figures("throttled")[0])
    assert 4 <= meter.reads <= 5
    assert all(map(math.isnan, told[:20]))
    assert told[25:] == [0.25] * 75
    assert {balancer.finished.table.figures(field.name)[0] for field in fields(Hindrances)} == {0.25}


def test_a_rank_without_a_meter_tells_zeros_as_older_files_are_read():
    balancer = Balancer(BSP(), 0, 1, 16, clock=lambda: 0.0)
    balancer.begin(MicroBatch(balancer.plan(), 16))
    balancer.agree(balancer.report())
    assert {balancer.finished.table.figures(field.name)[0] for field in fields(Hindrances)} == {0.0}


def test_the_name_of_a_group_is_any_bytes(tmp_path):
    kernel = Kernel(tmp_path, V2)
    (kernel.proc / "self/cgroup").write_bytes(b"0::/caf\xe9\n")
    kernel.throttle(os.fsdecode(b"caf\xe9"), 0.0, quota=1.5)
    meter = kernel.meter()
    kernel.now = 1.0
    assert meter.read().quota_cores == 1.5
