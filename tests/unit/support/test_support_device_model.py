"""A process that plays a device takes the modelled time, and has no memory for more than the modelled batch."""

import pytest

from tests.support.device_model import DeviceModel


def test_steps_take_the_modelled_time_and_a_batch_beyond_the_memory_is_refused_before_any_work():
    clock = [50.0]

    def work(seconds):
        clock[0] += seconds

    device = DeviceModel(0.5, 2.0, 4, 30, clock=lambda: clock[0], sleep=work)
    with pytest.raises(MemoryError, match=r"31 samples.* 30"), device.step(31):
        pytest.fail("the body ran")
    with device.step(6):
        work(1.5)
    assert clock[0] == pytest.approx(55.0)
    device.enqueue(4)
    device.enqueue(20)
    assert device.busy
    assert clock[0] == pytest.approx(55.0), "the host has only queued it"
    device.wait()
    assert clock[0] == pytest.approx(55.0 + 4.0 + 12.0)
    assert not device.busy
