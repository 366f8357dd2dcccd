"""Faults strike the rank and the round they are ordered for, once, whatever the ranks are numbered afterwards."""

import math
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.testing import Faults
from hvd_hetero.testing.hosts import HOSTS, Elastic, add_host, host_name


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def job(tmp_path):
    """One rank of one, or what plays it: ten samples a round, a second each."""
    clock = Clock()
    faults = Faults(tmp_path, clock=clock, sleep=clock.sleep)

    def rounds(count, rank=0, policy=BSP, first=0):
        balancer = Balancer(policy(), rank, rank + 1, 10 * (rank + 1), clock=clock)
        balancer.planner.rounds = first
        faults.attach(SimpleNamespace(_session=SimpleNamespace(balancer=balancer, meter=balancer.meter)))
        rows = []
        for _ in range(count):
            plan = balancer.plan()
            balancer.begin(MicroBatch(plan, 10))
            clock.now += 10.0
            row = balancer.report()
            rows.append(row[rank * len(row) // (rank + 1) :])
            balancer.agree(np.tile(rows[-1], rank + 1))  # the other ranks do the same
        return rows

    return SimpleNamespace(faults=faults, rounds=rounds, clock=clock, directory=tmp_path)


def test_a_slow_rank_stays_slow_until_told_otherwise(job):
    job.faults.slow(rank=0, at=2, factor=3).slow(rank=0, at=4, factor=1)
    assert [row[2] for row in job.rounds(6)] == [10.0, 10.0, 30.0, 30.0, 10.0, 10.0]


def test_a_fault_strikes_once_although_its_round_is_repeated(job):
    job.faults.slow(rank=0, at=0, factor=2).slow(rank=0, at=1, factor=1)
    assert [row[2] for row in job.rounds(2)] == [20.0, 10.0]
    assert [row[2] for row in job.rounds(2)] == [10.0, 10.0]
    assert [fault.kind for fault in job.faults.happened()] == ["slow", "slow"]


def test_a_lie_goes_into_the_report_for_as_many_rounds_as_asked(job):
    job.faults.report(rank=0, at=1, value=1e9, rounds=2).report(rank=0, at=4, value=math.nan)
    told = [row[5] for row in job.rounds(5, policy=lambda: LBBSP("ema"))]
    assert told[1:3] == [1e9, 1e9]
    assert told[3] == 1.0
    assert math.isnan(told[4])


def test_a_join_adds_a_host_of_this_machine(job, monkeypatch):
    hosts = job.directory / "hosts"
    Elastic().options(job.directory, 2)
    monkeypatch.setenv(HOSTS, str(hosts))
    job.faults.join(at=1)
    job.rounds(3)
    assert hosts.read_text().splitlines() == ["127.0.0.1:1", "127.0.0.01:1", "127.0.0.001:1"]
    assert add_host(hosts) == host_name(3)


SCRIPT = """
import sys, time
from types import SimpleNamespace
from hvd_hetero.balancer import Balancer
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.policies import BSP
from hvd_hetero.testing import Faults
faults = Faults(sys.argv[1])
getattr(faults, sys.argv[2])(rank=0, at=1, **eval(sys.argv[3]))
balancer = Balancer(BSP(), 0, 1, 4, clock=time.monotonic)
faults.attach(SimpleNamespace(_session=SimpleNamespace(balancer=balancer, meter=balancer.meter)))
for _ in range(3):
    balancer.begin(MicroBatch(balancer.plan(), 4))
    print("begun", balancer.rounds, flush=True)
    row = balancer.report()
    print("computed", row[2], flush=True)
    balancer.agree(row)
"""


def run(directory, kind, **options):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(directory), kind, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("late", "last"), [(False, "computed"), (True, "begun 1")])
def test_a_kill_is_a_kill_at_the_beginning_of_the_round_or_once_its_gradients_are_computed(tmp_path, late, last):
    code, lines = run(tmp_path, "kill", late=late)
    assert code == -signal.SIGKILL
    assert lines[-1].startswith(last)
    assert len(lines) == (3 if late else 2)
    assert (tmp_path / "fault.0").exists()


def test_a_frozen_process_stands_still_for_so_long_and_goes_on(tmp_path):
    code, lines = run(tmp_path, "freeze", seconds=0.4)
    assert code == 0
    assert float(lines[3].split()[1]) >= 0.4
    assert len(lines) == 6
