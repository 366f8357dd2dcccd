"""Times of queued work: by events that are asked and never waited for, and what a rank makes of them."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import LBBSP
from hvd_hetero.rounds import MicroBatch
from torch_hooks.cuda_stopwatch import CudaStopwatch


class Device:
    """A queue: the host runs ahead, and the device passes events when it gets there."""

    def __init__(self) -> None:
        self.host_s = self.queued_s = 0.0
        self.made = 0

    def clock(self) -> float:
        return self.host_s

    def launch(self, seconds: float) -> None:
        self.host_s += 1e-5
        self.queued_s = max(self.queued_s, self.host_s) + seconds

    def synchronise(self) -> None:
        self.host_s = max(self.host_s, self.queued_s)

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_s = math.inf

    def record(self, stream: object) -> None:
        self.at_s = max(self.device.queued_s, self.device.host_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "the real one raises"
        assert end.query()
        return (end.at_s - self.at_s) * 1000.0

    def synchronize(self) -> None:
        pytest.fail("nobody may wait for the device in a step")


def watch(device: Device) -> CudaStopwatch:
    return CudaStopwatch(torch.device("cpu"), device.event)


def test_the_time_is_the_devices_and_not_the_hosts():
    device = Device()
    stopwatch = watch(device)
    for seconds in (0.5, 0.25):
        stopwatch.start()
        device.launch(seconds)
        stopwatch.stop()
        device.launch(3.0)  # not counted
    device.synchronise()
    assert stopwatch.read() == pytest.approx(0.75, rel=1e-3)
    assert stopwatch.read() == 0.0


def test_what_is_not_done_is_not_known_and_nobody_waits_for_it():
    device = Device()
    stopwatch = watch(device)
    stopwatch.start()
    device.launch(0.5)
    stopwatch.stop()
    assert math.isnan(stopwatch.read())
    device.synchronise()
    stopwatch.start()
    device.launch(0.25)
    stopwatch.stop()
    device.synchronise()
    assert stopwatch.read() == pytest.approx(0.25, rel=1e-3), "and the next time is not mixed with it"


def test_events_are_used_again_once_they_were_passed():
    device = Device()
    stopwatch = watch(device)
    for _ in range(10):
        stopwatch.start()
        device.launch(0.1)
        stopwatch.stop()
        device.synchronise()
        stopwatch.read()
    assert device.made == 2


def test_a_stop_without_a_start_counts_nothing():
    device = Device()
    stopwatch = watch(device)
    stopwatch.stop()
    assert stopwatch.read() == 0.0


def test_a_rank_reports_the_devices_time_one_round_later_with_the_update_and_without_the_hosts_lead():
    device = Device()
    balancer = Balancer(LBBSP("ema"), 0, 1, 8, clock=device.clock)
    balancer.meter.stopwatch = watch(device)
    tables = []
    balancer.observer = lambda finished: tables.append(finished.table)
    for work_s in (0.5, 0.7, 0.9, 0.9):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(work_s)
        vector = balancer.report()  # while the device is still at work
        device.launch(0.125)  # the sum
        device.synchronise()
        balancer.agree(vector)
        balancer.applying()
        device.launch(0.0625)
        balancer.applied(1e-5)
    assert [t.column("compute_s")[0] for t in tables] == pytest.approx([0.0, 0.5, 0.7625, 0.9625], abs=1e-3)
    # Of the round before, too: what is left of it when the device's work is taken off, the transfer.
    assert [t.column("wait_s")[0] for t in tables[1:]] == pytest.approx([0.125] * 3, abs=1e-3)
    assert tables[3].column("samples_per_s")[0] == pytest.approx(8 / 0.7625 * 0.8 + 8 / 0.9625 * 0.2, rel=0.02)


def test_waiting_for_others_inside_a_micro_batch_is_not_the_devices_work():
    device = Device()
    balancer = Balancer(LBBSP("ema"), 0, 1, 8, clock=device.clock)
    balancer.meter.stopwatch = watch(device)
    tables = []
    balancer.observer = lambda finished: tables.append(finished.table)
    for _ in range(3):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(0.5)
        with balancer.meter.held_up():
            device.launch(2.0)  # the collective of a layer, for which the host waits
            device.synchronise()
        device.launch(0.25)
        vector = balancer.report()
        with balancer.meter.held_up():
            device.launch(0.125)  # starts nothing that is over
        device.synchronise()
        balancer.agree(vector)
    assert [t.figures("compute_s")[0] for t in tables] == pytest.approx([0.0, 0.75, 0.75], abs=1e-3)
    assert [t.figures("wait_s")[0] for t in tables[1:]] == pytest.approx([2.125] * 2, abs=1e-3)


def test_a_time_that_is_not_known_teaches_nothing():
    device = Device()
    balancer = Balancer(LBBSP("ema"), 0, 1, 8, clock=device.clock)
    balancer.meter.stopwatch = watch(device)
    tables = []
    balancer.observer = lambda finished: tables.append(finished.table)
    for late in (False, False, True, False, False):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(0.5)
        vector = balancer.report()
        if not late:
            device.synchronise()
        balancer.agree(vector)
        device.synchronise()
    compute_s = [float(t.column("compute_s")[0]) for t in tables]
    assert [math.isnan(s) for s in compute_s] == [False, False, False, True, False]
    assert tables[4].column("samples_per_s")[0] == pytest.approx(16, rel=1e-3)
