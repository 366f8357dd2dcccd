"""The models of the simulator: compute, availability, variation, network."""

import numpy as np
import pytest

from hvd_hetero.rounds import RoundPlan
from hvd_hetero.tools.simulation import (
    Availability,
    Compute,
    Drivers,
    Exponential,
    Jitter,
    Network,
    RandomSlowDown,
    Recorded,
    Worker,
)
from hvd_hetero.tools.simulation.availability import Availabilities
from hvd_hetero.tools.simulation.cluster import DriverMeter
from hvd_hetero.tools.simulation.compute import Devices
from hvd_hetero.tools.simulation.variation import Draws

DEVICES = (Compute.at_speed(100.0), Compute.at_speed(50.0, 0.01), Compute(0.002, 0.05, 40, 120), Compute(0.01))


def gamma(compute, batch):
    """Γ as the docstring writes it."""
    return compute.slope_s * max(batch, compute.saturation) + compute.intercept_s if batch else 0.0


@pytest.mark.parametrize("samples", [0, 1, 7, 100, 119])
@pytest.mark.parametrize("cuts", [1, 3, 7])
def test_a_round_costs_the_sum_of_its_micro_batches(samples, cuts):
    """Sizes are those of RoundPlan, and each costs Γ."""
    k = min(cuts, samples)
    plan = RoundPlan((samples,) * 4, (k,) * 4)
    pieces = Devices(DEVICES).pieces(np.array(plan.samples), np.array(plan.micro_batches))
    for i, compute in enumerate(DEVICES):
        times = [gamma(compute, size) for size in plan.sizes(i)]
        assert pieces.work_s[i] == pytest.approx(sum(times))
        for done in range(k + 1):
            done_all = np.full(4, done)
            assert pieces.work_of(done_all)[i] == pytest.approx(sum(times[:done]))
            assert pieces.samples_of(done_all)[i] == sum(plan.sizes(i)[:done])
            assert pieces.finished_by(pieces.work_of(done_all))[i] == done


def test_a_micro_batch_above_the_memory_limit_is_cut():
    """300 samples on a device that holds 120 are three micro-batches, not one."""
    pieces = Devices(DEVICES).pieces(np.full(4, 300), np.ones(4, dtype=np.int64))
    assert pieces.count.tolist() == [1, 1, 3, 1]
    assert pieces.work_s[2] == pytest.approx(3 * gamma(DEVICES[2], 100))


PROCESSES = (
    Availability(),
    Availability((0.0, 3.0, 4.5), (1.0, 0.25, 2.0)),
    Availability((0.0, 1.0), (0.5, 1.5), period_s=2.5),
    Availability.series([0.2, 0.9, 0.4], 0.7),
)


def test_work_is_the_integral_of_the_share():
    """Against a sum over small steps, from any moment, over several periods."""
    processes = Availabilities(PROCESSES)
    step = 4e-3
    for begin, end in ((0.0, 1.0), (0.3, 6.1), (4.4, 4.6), (2.0, 17.3)):
        middles = np.arange(begin + step / 2, end, step)
        sums = sum(processes.at(t) for t in middles) * step
        assert processes.work_between(np.full(4, begin), np.full(4, end)) == pytest.approx(sums, abs=2e-2)


def test_finish_inverts_work_and_one_worker_is_like_all():
    """Work begun at t and ended at finish(t, w) is w."""
    processes = Availabilities(PROCESSES)
    for begin, work in ((0.0, 0.4), (2.9, 1.0), (1.2, 40.0), (7.7, 0.0)):
        end = processes.finish(np.full(4, begin), np.full(4, work))
        assert processes.work_between(np.full(4, begin), end) == pytest.approx(np.full(4, work), abs=1e-9)
        alone = [float(Availabilities([each]).finish(begin, np.array([work]))[0]) for each in PROCESSES]
        assert alone == pytest.approx(end)


VARIATIONS = (Exponential(), RandomSlowDown("round", 2.0, 0.5), Jitter("round", 0.1))


def draws(workers, seed=7):
    return Draws([VARIATIONS] * workers, seed, "round", 0)


def test_draws_depend_on_seed_and_worker_and_number_alone():
    """Whether asked for all workers, for one, out of step with others, or beside more workers."""
    together = np.array([draws(3).round(k) for k in [300]])[0]
    stepwise = draws(3)
    rows = [stepwise.round(k).copy() for k in range(301)]
    alone = draws(5)
    assert [alone.one(1, k) for k in range(301)] == [row[1] for row in rows]
    assert rows[300].tolist() == together.tolist()
    assert draws(3, seed=8).round(0).tolist() != rows[0].tolist()


@pytest.mark.parametrize("kind", [Exponential, RandomSlowDown, Jitter, Recorded])
def test_a_variation_of_what_is_not_known_is_refused(kind):
    """It changed nothing, and said nothing."""
    with pytest.raises(ValueError, match=r"batch, round.*'micro-batch'"):
        kind("micro-batch")


def test_the_servers_queue_against_a_loop():
    """First come, first served, ties to the lower rank."""
    rng = np.random.default_rng(3)
    network = Network("server", message_bytes=30.0, server_bandwidth=100.0)
    for _ in range(50):
        arrival = rng.integers(0, 8, 9) / 4
        free, expected = 0.0, np.empty(9)
        for i in sorted(range(9), key=lambda j: (arrival[j], j)):
            free = max(free, arrival[i]) + 0.3
            expected[i] = free
        assert network.served(arrival) == pytest.approx(expected)


def test_drivers_are_late_and_within_bounds():
    """A share that falls at 10 s is seen to fall at 12 s; noise never leaves [0, 1]; unknown is NaN."""
    falling = Availability((0.0, 10.0), (1.0, 0.5))
    now = np.array([11.9])
    meter = DriverMeter(Worker(Compute.at_speed(1.0), falling, drivers=Drivers(lag_s=2.0)), 0, 0, now)
    assert meter.read().cpu == 1.0
    now[0] = 12.1
    assert meter.read().cpu == 0.5
    assert np.isnan(meter.read().memory)
    noisy = DriverMeter(Worker(Compute.at_speed(1.0), falling, drivers=Drivers(noise=0.5, memory=falling)), 0, 0, now)
    readings = [noisy.read() for _ in range(200)]
    assert {0.0, 1.0} < {r.cpu for r in readings}
    assert all(0 <= r.memory <= 1 for r in readings)
    blind = DriverMeter(Worker(Compute.at_speed(1.0), drivers=Drivers(known=False)), 0, 0, now)
    assert np.isnan(blind.read().cpu)
