"""Slowing a process down by a known factor: arithmetic with a clock of our own, and the choice of the method."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.testing import ProportionalSleep, QuotaSupport, quota_available, slow_down
from hvd_hetero.testing import slowdown as module


class FakeTime:
    """A clock that only sleeping and computing move; every sleep lasts ``overshoot_s`` longer than asked for."""

    def __init__(self, overshoot_s=0.0):
        self.now_s = 0.0
        self.overshoot_s = overshoot_s

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        assert seconds > 0
        self.now_s += seconds + self.overshoot_s

    def slow(self, factor):
        return ProportionalSleep(factor, clock=self.clock, sleep=self.sleep)


def test_step_measures_its_body():
    time = FakeTime()
    slow = time.slow(2.5)
    with slow.step():
        time.now_s += 2.0
    assert time.now_s == pytest.approx(2.5 * 2.0)


def test_a_step_that_raises_is_not_paid_for():
    time = FakeTime()

    def broken_step():
        with time.slow(2.0).step():
            time.now_s += 1.0
            raise KeyError("broken")

    with pytest.raises(KeyError):
        broken_step()
    assert time.now_s == 1.0


@given(
    factor=st.floats(1.5, 10.0),
    steps=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=50),
    overshoot_s=st.floats(0.0, 0.05),
)
@settings(derandomize=True, deadline=None)
def test_overshoot_of_sleeps_does_not_add_up(factor, steps, overshoot_s):
    """However long the run, the total is factor x compute to within the overshoot of one sleep."""
    time = FakeTime(overshoot_s)
    slow = time.slow(factor)
    total_s = sum(steps) + sum(slow.pay(step) for step in steps)
    assert -1e-9 <= total_s - factor * sum(steps) <= overshoot_s + 1e-9


def test_auto_sleeps_where_ranks_outnumber_cores(monkeypatch):
    """A rank that waits for its core anyway would not notice a quota."""
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", str(1 + os.cpu_count()))
    assert slow_down(2.0).describe() == (
        f"2 times slower by proportional sleep ({1 + os.cpu_count()} ranks on {os.cpu_count()} cores)"
    )


@pytest.mark.parametrize(
    ("fits", "told"),
    [
        (True, "a quota of 0.5, cgroup v1"),
        (False, "2 times slower by proportional sleep (quotas that do not fit into the core that ranks share)"),
    ],
)
def test_whether_quotas_fit_can_be_said_where_ranks_outnumber_cores(monkeypatch, fits, told):
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", str(1 + os.cpu_count()))
    monkeypatch.setattr(module, "quota_available", lambda: QuotaSupport(True, "cgroup v1"))
    monkeypatch.setattr(module, "QuotaSlowDown", lambda factor, cores, why: f"a quota of {cores / factor}, {why}")
    slow = slow_down(2.0, fits=fits)
    assert (slow if fits else slow.describe()) == told


def test_auto_falls_back_when_the_kernel_refuses_the_share(monkeypatch):
    def refuse(*args, **keywords):
        raise module.QuotaUnavailableError("a group above allows less")

    monkeypatch.setattr(module, "quota_available", lambda: QuotaSupport(True, "cgroup v1"))
    monkeypatch.setattr(module, "QuotaSlowDown", refuse)
    assert slow_down(2.0).describe() == "2 times slower by proportional sleep (a group above allows less)"


@pytest.mark.skipif(not quota_available(), reason=quota_available().why)
def test_auto_takes_the_quota_where_it_may_and_needs_no_call_per_step(monkeypatch):
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE", raising=False)
    with slow_down(2.0) as slow:
        assert slow.describe().startswith("2 times slower by processor quota (cgroup v")
        assert slow.after_compute(100.0) == 0.0
        assert slow._quota.share == 0.5
        slow.set_factor(4.0)
        assert slow._quota.share == 0.25
        group = slow._quota.group
        assert group.exists()
        slow.set_factor(1.0)
        assert not group.exists()
        assert slow.describe() == "full speed"


def test_pinning_binds_every_thread_to_the_core_and_refuses_one_that_is_not_there():
    """In a process of its own, for it binds this whole process."""
    code = """
import os, threading
from hvd_hetero.testing import pin_to_core
stop = threading.Event(); threading.Thread(target=stop.wait, daemon=True).start()
allowed = sorted(os.sched_getaffinity(0))
try:
    pin_to_core(len(allowed))
except ValueError as error:
    assert f"index must be from 0 to {len(allowed) - 1}" in str(error) and f"got {len(allowed)}" in str(error)
else:
    raise SystemExit("not refused")
core = pin_to_core(len(allowed) - 1)
assert core == allowed[-1]
threads = os.listdir("/proc/self/task")
assert len(threads) >= 2 and all(os.sched_getaffinity(int(thread)) == {core} for thread in threads)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
