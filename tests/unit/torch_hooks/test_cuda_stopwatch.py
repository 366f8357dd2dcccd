"""Times of queued work, by events, and what a rank makes of them, on a device that is made up."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import BSP, LBBSP, NonBlocking, Policy
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.telemetry import Recorder
from torch_hooks.cuda_stopwatch import CudaStopwatch, DeviceTimes


class Device:
    """A queue: the host runs ahead, and the device passes events when it gets there."""

    def __init__(self) -> None:
        self.host_s = self.queued_s = self.idle_s = 0.0
        self.made = 0

    def clock(self) -> float:
        return self.host_s

    def launch(self, seconds: float) -> None:
        self.host_s += 1e-5
        self.idle_s += max(self.host_s - self.queued_s, 0.0)
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
        self.device.host_s = max(self.device.host_s, self.at_s)


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
    stopwatch.lap()
    assert stopwatch.read() == pytest.approx((0.75, 3.0, math.nan), rel=1e-3, nan_ok=True), "nothing was before it"
    assert all(map(math.isnan, stopwatch.read())), "a lap is read once"


def test_it_waits_for_the_lap_that_is_read_and_not_for_what_is_queued_behind():
    device = Device()
    stopwatch = watch(device)
    for seconds in (0.5, 0.25):
        stopwatch.start()
        device.launch(seconds)
        stopwatch.stop()
        device.launch(0.125)
        stopwatch.lap()
        stopwatch.start()
        device.launch(4.0)  # belongs to the next
        device.launch(4.0)
        assert stopwatch.read()[:2] == pytest.approx((seconds, 0.125), rel=1e-3)
        assert device.queued_s - device.host_s == pytest.approx(8.0, rel=1e-3)
        stopwatch.forget()
    stopwatch.catch_up()
    assert device.host_s == device.queued_s


def watched(device: Device, policy: Policy) -> tuple[Balancer, list]:
    balancer = Balancer(policy, 0, 1, 8, clock=device.clock)
    balancer.meter.stopwatch, balancer.meter.queued = watch(device), True
    tables: list = []
    balancer.observer = lambda finished: tables.append(finished.table)
    return balancer, tables


def train(device: Device, balancer: Balancer, work_s: float, sum_s: float, *, host_waits: bool, input_s: float = 0.0):
    """A round of one micro-batch, and its update."""
    balancer.begin(MicroBatch(balancer.plan(), 8), input_s)
    device.launch(work_s)
    vector = balancer.report()  # while the device is still at work
    device.launch(sum_s)
    if host_waits:
        device.synchronise()
    balancer.agree(vector)
    balancer.meter.applying()
    device.launch(0.0625)
    balancer.meter.applied(1e-5)


@pytest.mark.parametrize("host_waits", [True, False], ids=["the host waits for sums", "the host runs ahead"])
@pytest.mark.parametrize("policy", [LBBSP("ema"), BSP()], ids=lambda policy: policy.name)
def test_a_rank_reports_the_devices_times_one_round_later_without_the_hosts_lead(host_waits, policy):
    device = Device()
    balancer, tables = watched(device, policy)
    for work_s in (0.5, 0.7, 0.9, 0.9):
        train(device, balancer, work_s, 0.125, host_waits=host_waits)
    seconds = {name: [t.column(name)[0] for t in tables] for name in ("compute_s", "wait_s", "lap_s")}
    # Those of the round before; an update counts for the round that it delays.
    assert seconds["compute_s"] == pytest.approx([math.nan, 0.5, 0.7625, 0.9625], abs=1e-3, nan_ok=True)
    assert seconds["wait_s"] == pytest.approx([math.nan, 0.125, 0.125, 0.125], abs=1e-3, nan_ok=True)
    # The device's work, the sum and nothing else, from the end of the round before: of the first there is none.
    assert seconds["lap_s"] == pytest.approx([math.nan, math.nan, 0.8875, 1.0875], abs=1e-3, nan_ok=True)
    if policy.measures:
        assert tables[3].column("samples_per_s")[0] == pytest.approx(8 / 0.7625 * 0.8 + 8 / 0.9625 * 0.2, rel=0.02)
    if not host_waits:
        assert device.idle_s == pytest.approx(1e-5), "none after the first launch"


@pytest.mark.parametrize("host_waits", [True, False], ids=["the host waits for sums", "the host runs ahead"])
@pytest.mark.parametrize(
    ("input_s", "others_s"), [(0.2, 0.0), (0.2, 0.3), (0.9, 0.0)], ids=["hidden", "beside other work", "too long"]
)
def test_waiting_for_data_counts_as_long_as_the_device_stands_still(host_waits, input_s, others_s):
    device = Device()
    balancer, tables = watched(device, LBBSP("ema"))
    took = []
    for _ in range(12):
        began_s = device.host_s
        device.launch(others_s)  # an evaluation, say
        device.host_s += input_s
        train(device, balancer, 0.5, 0.0625, host_waits=host_waits, input_s=input_s)
        took.append(device.host_s - began_s)
    told = {name: tables[-1].figures(name)[0] for name in ("compute_s", "wait_s", "input_s")}
    assert tables[0].figures("input_s") == pytest.approx([math.nan], nan_ok=True)
    assert told["input_s"] <= input_s
    # What a rank reports adds up to what a round takes, besides the evaluation; of that, waiting for data hides a part.
    left_s = sum(took[-4:]) / 4 - sum(told.values())
    assert max(others_s - input_s, 0.0) - 1e-3 <= left_s <= others_s + 1e-3
    assert tables[-1].figures("samples_per_s")[0] == pytest.approx(8 / (told["compute_s"] + told["input_s"]), rel=0.02)


def test_waiting_for_others_inside_a_micro_batch_is_not_the_devices_work():
    device = Device()
    balancer, tables = watched(device, LBBSP("ema"))
    for _ in range(3):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(0.5)
        with balancer.meter.waiting_for_others():
            device.launch(2.0)  # the collective of a layer
        device.launch(0.25)
        vector = balancer.report()
        with balancer.meter.waiting_for_others():
            device.launch(0.125)  # starts nothing that is over
        balancer.agree(vector)
    assert [t.figures("compute_s")[0] for t in tables[1:]] == pytest.approx([0.75, 0.75], abs=1e-3)
    assert [t.figures("wait_s")[0] for t in tables[1:]] == pytest.approx([2.125] * 2, abs=1e-3)


def test_a_round_that_is_given_up_counts_nowhere():
    device = Device()
    balancer, tables = watched(device, LBBSP("ema"))
    for given_up in (False, False, True, False, False):
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(4.0 if given_up else 0.5)
        if given_up:
            balancer.discard_round()
        else:
            balancer.agree(balancer.report())
    assert [t.figures("compute_s")[0] for t in tables[1:]] == pytest.approx([0.5] * 3, rel=1e-3)
    assert tables[-1].column("samples_per_s")[0] == pytest.approx(16, rel=1e-3)


class Board:
    """Signals that note what the device had still to do when they were used."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.behind: list[tuple[str, float]] = []

    def raise_signal(self, round: int) -> None:
        self.behind.append(("raised", self.device.queued_s - self.device.host_s))

    def raised(self, round: int) -> bool:
        self.behind.append(("asked", self.device.queued_s - self.device.host_s))
        return False


def test_times_stay_with_their_rounds_where_a_group_on_another_device_ends_the_timing_by_events():
    """From then on, times are the host's, and of the round itself."""
    device = Device()
    balancer = Balancer(BSP(), 0, 1, 8, clock=device.clock)
    balancer.meter.stopwatch = watch(device)
    records: list[dict] = []
    balancer.observer = recorder = Recorder()
    recorder.add(records.append)
    for number in range(6):
        if number == 3:
            balancer.meter.stopwatch = None
        balancer.begin(MicroBatch(balancer.plan(), 8))
        device.launch(1.0 + number)
        device.synchronise()
        vector = balancer.report()
        device.launch(0.125)
        device.synchronise()
        balancer.agree(vector)
    recorder.close()
    seconds = [record["compute_s"][0] or math.nan for record in records]
    assert seconds == pytest.approx([1, 2, math.nan, 4, 5, 6], abs=1e-3, nan_ok=True)
    took = [record["elapsed_s"] for record in records]
    assert took == pytest.approx([1.125 + number for number in range(6)], abs=1e-3)


def test_the_first_to_be_done_is_the_first_device_and_not_the_first_host():
    device = Device()
    balancer, _ = watched(device, NonBlocking(2))
    board = balancer.signals = Board(device)
    for _ in range(2):
        for last in (False, True):
            balancer.begin(MicroBatch(balancer.plan(), 4, last))
            device.launch(0.5)
            if not last:
                assert not balancer.stop_early()
                balancer.pause()
        balancer.agree(balancer.report())
    assert board.behind == [("asked", 0.0), ("raised", 0.0)] * 2


class Parameter:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def parameters(*devices: str) -> dict:
    return {Parameter(device): f"layer {i}" for i, device in enumerate(devices)}


@pytest.mark.parametrize(
    ("devices", "timed", "error"),
    [
        (("cpu", "cpu"), False, None),
        (("cuda:0", "cpu", "cuda:0"), True, None),
        (("cuda:0", "cuda:1", "cuda:0"), False, r"'layer 1'.*cuda:0, cuda:1"),
        (("mps",), False, r"'layer 0'.*mps"),
    ],
)
def test_one_cuda_device_is_timed_and_what_cannot_be_is_refused_where_times_matter(devices, timed, error):
    meter = Balancer(BSP(), 0, 1, 8, clock=Device().clock).meter
    DeviceTimes("bsp", meter, needed=False).include(parameters(*devices))
    assert (meter.stopwatch is not None, meter.queued) == (timed, devices != ("cpu", "cpu"))
    needed = DeviceTimes("lb-bsp", meter, needed=True)
    if error is None:
        needed.include(parameters(*devices))
    else:
        with pytest.raises(ValueError, match=f"'lb-bsp'.*{error}"):
            needed.include(parameters(*devices))
