"""A process that plays a device takes the modelled time, and has no memory for more than the modelled batch."""

import pytest

from hvd_hetero.testing import DeviceModel


class World:
    """A clock that moves by work and by sleeping."""

    def __init__(self):
        self.now_s = 50.0

    def clock(self):
        return self.now_s

    def work(self, seconds):
        self.now_s += seconds


def played(world, **options):
    return DeviceModel(0.5, 2.0, 4, clock=world.clock, sleep=world.work, **options)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 4.0), (4, 4.0), (6, 5.0), (20, 12.0)])
def test_a_step_takes_the_modelled_time_whatever_part_of_it_is_real_work(batch, seconds):
    world = World()
    device = played(world)
    for work_s in (0.0, 1.5, seconds):
        begin_s = world.now_s
        with device.step(batch):
            world.work(work_s)
        assert world.now_s - begin_s == pytest.approx(seconds)
    assert device.late_s == 0.0


def test_a_batch_beyond_the_memory_raises_the_given_error_before_any_work():
    class OutOfMemoryError(RuntimeError):
        pass

    world = World()
    device = played(world, out_of_memory=7, error=OutOfMemoryError)
    with pytest.raises(OutOfMemoryError, match=r"8 samples.* 7"), device.step(8):
        pytest.fail("the body ran")
    assert world.now_s == 50.0
    with device.step(7):
        pass
    assert device.gamma.out_of_memory == 7


def test_a_queued_step_takes_no_time_of_the_host_until_it_asks_for_the_result():
    world = World()
    device = played(world)
    device.wait()  # for nothing
    device.enqueue(4)
    device.enqueue(20)
    assert world.now_s == 50.0
    assert device.busy
    device.wait()
    assert world.now_s == pytest.approx(50.0 + 4.0 + 12.0)
    assert not device.busy
    world.work(1.0)  # while the queue is empty
    device.enqueue(4)
    device.wait()
    assert world.now_s == pytest.approx(66.0 + 1.0 + 4.0)
