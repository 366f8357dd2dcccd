"""LB-BSP on devices with a curve: the ladder, the split against a search by brute force, and whole jobs."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from device_job import DeviceJob
from tables import table

from hvd_hetero.allocation import Gamma, minimax
from hvd_hetero.policies import LBBSP
from hvd_hetero.policies.device_shares import LADDER_ROUNDS, LADDER_STEPS, ladder
from hvd_hetero.policies.gamma_shares import shares_by_gamma, shares_seconds
from hvd_hetero.rounds import RoundPlan, RoundTable


def table_of(devices: list[Gamma], limits: list[int] | int = 0) -> RoundTable:
    curves = {name: [getattr(d, name) for d in devices] for name in ("slope_s", "intercept_s", "saturation")}
    return table(len(devices), limit=limits, **curves)


def seconds(device: Gamma, samples: int, limit: int) -> float:
    """The plain model: so many micro-batches of equal size."""
    if samples == 0:
        return 0.0
    count = -(-samples // (limit or samples))
    return count * (device.slope_s * max(samples / count, device.saturation) + device.intercept_s)


def best_s(devices: list[Gamma], total: int, limits: list[int]) -> float:
    """By brute force: the earliest time by which all ranks together can have done ``total`` samples, one each."""
    times = [[seconds(d, x, limit) for x in range(1, total + 1)] for d, limit in zip(devices, limits, strict=True)]
    levels = sorted({t for of_rank in times for t in of_rank})

    def done(level: float) -> int:
        return sum(max((x for x, t in enumerate(of_rank, start=1) if t <= level), default=0) for of_rank in times)

    floor = max(of_rank[0] for of_rank in times)  # every rank does a sample at least
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if done(levels[middle]) >= total else (middle + 1, high)
    return max(levels[low], floor)


def drawn(n: int, seed: int) -> list[Gamma]:
    """Devices of unequal slopes, unequal costs per batch and unequal saturation."""
    rng = np.random.default_rng(seed)
    return [
        Gamma(float(rng.uniform(0.5e-3, 3e-3)), float(rng.uniform(0, 10e-3)), int(rng.integers(1, 30)), None)
        for _ in range(n)
    ]


def true_best_s(job: DeviceJob) -> float:
    n, total = len(job.devices), sum(job.shares)
    slope, intercept = (np.array([getattr(d, name) for d in job.devices]) for name in ("slope_s", "intercept_s"))
    lower = [min(d.saturation, total // n) for d in job.devices]
    return minimax(slope * job.factor, intercept * job.factor, 0.0, total, lower, total).bound_s


# The ladder.


@pytest.mark.parametrize("n", [2, 3, 9])
def test_the_ladder_keeps_the_total_and_shows_every_rank_many_sizes_small_and_large(n):
    steps = np.array([ladder(n, 64 * n, step) for step in range(LADDER_STEPS)])
    assert (steps.sum(axis=1) == 64 * n).all()
    for sizes in steps.T:
        assert len(set(sizes)) >= 9
        assert sizes.min() <= 0.2 * 64
        assert sizes.max() >= 1.8 * 64


def test_the_ladder_keeps_minimum_and_multiple():
    for step in range(LADDER_STEPS):
        shares = ladder(4, 256, step, 24, 8)
        assert shares.sum() == 256
        assert (shares >= 24).all()
        assert (shares % 8 == 0).all()


# The split.


@pytest.mark.parametrize("seed", range(15))
def test_the_split_is_as_early_as_any_whatever_fits_in_memory(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 5))
    devices, total = drawn(n, seed), 40 * n
    limits = [int(rng.choice([0, 25, 40, 60])) for _ in range(n)]
    told = table_of(devices, limits)
    shares = shares_by_gamma(told, RoundPlan.of([40] * n), 0.0)
    assert shares.sum() == total
    latest_s = max(seconds(d, int(x), limit) for d, x, limit in zip(devices, shares, limits, strict=True))
    assert latest_s == pytest.approx(float(shares_seconds(told, shares).max()))
    assert latest_s <= 1.001 * best_s(devices, total, limits)


def test_a_fast_device_with_little_memory_does_several_micro_batches_while_the_slow_one_does_one():
    devices, limits = [Gamma(0.5e-3, 2e-3, 1, None), Gamma(4e-3, 2e-3, 1, None)], [30, 0]
    shares = shares_by_gamma(table_of(devices, limits), RoundPlan.of([64, 64]), 0.0)
    assert shares[0] > 3 * 30
    assert shares_seconds(table_of(devices, limits), shares) == pytest.approx([0.062, 0.062], rel=0.1)


def test_a_second_micro_batch_that_costs_more_than_it_saves_is_not_done():
    devices, limits = [Gamma(1e-3, 80e-3, 1, None), Gamma(2e-3, 2e-3, 1, None)], [40, 0]
    assert shares_by_gamma(table_of(devices, limits), RoundPlan.of([64, 64]), 0.0).tolist() == [40, 88]


def test_where_memory_bounds_less_than_the_round_shares_are_done_in_several_micro_batches():
    devices = [Gamma(1e-3, 1e-3, 4, None)] * 3
    shares = shares_by_gamma(table_of(devices, [10, 10, 10]), RoundPlan.of([32] * 3), 0.0)
    assert shares.tolist() == [32, 32, 32]


def test_where_saturation_asks_for_more_than_the_round_nobody_saturates():
    devices = [Gamma(1e-3, 1e-3, 100, None), Gamma(1e-3, 1e-3, 50, None)]
    shares = shares_by_gamma(table_of(devices), RoundPlan.of([45, 45]), 0.0)
    assert shares.sum() == 90
    assert abs(shares[0] - 2 * shares[1]) <= 3


def test_a_minimum_that_saturation_leaves_no_room_for_comes_first():
    devices = [Gamma(1e-3, 1e-3, 90, None), Gamma(1e-3, 1e-3, 1, None)]
    shares = shares_by_gamma(table_of(devices), RoundPlan.of([50, 50]), 0.0, minimum=40)
    assert (shares >= 40).all()
    assert shares.sum() == 100


def test_a_limit_below_the_minimum_and_below_the_multiple_is_met_by_micro_batches():
    devices = [Gamma(1e-3, 1e-3, 1, None), Gamma(3e-3, 1e-3, 1, None)]
    shares = shares_by_gamma(table_of(devices, [0, 5]), RoundPlan.of([64, 64]), 0.0, minimum=16, multiple_of=8)
    assert shares[1] >= 16
    assert (shares % 8 == 0).all()
    assert shares.sum() == 128


def test_memory_below_saturation_makes_every_micro_batch_as_long_as_the_others():
    """Eight samples fit, twenty would saturate: eight take as long as twenty would."""
    devices, limits = [Gamma(1e-3, 0.0, 20, None), Gamma(1e-3, 0.0, 1, None)], [8, 0]
    shares = shares_by_gamma(table_of(devices, limits), RoundPlan.of([30, 30]), 0.0)
    assert shares[0] % 8 == 0
    assert max(seconds(d, int(x), k) for d, x, k in zip(devices, shares, limits, strict=True)) <= 0.045


def test_no_share_is_more_than_twice_what_its_rank_has_been_seen_with():
    devices = [Gamma(1e-6, 1e-3, 1, None), *[Gamma(1e-2, 1e-3, 1, None)] * 7]
    told, equal = table_of(devices), RoundPlan.of([10] * 8)
    first = shares_by_gamma(told, equal, 0.0)
    assert first[0] == 2 * 19
    assert shares_by_gamma(told, RoundPlan.of(first), 0.0)[0] == 73  # the others keep one each


# Whole jobs.


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_after_the_ladder_the_split_is_the_optimum_of_the_true_curves(n):
    job = DeviceJob(drawn(n, n), 64 * n)
    job.rounds(LADDER_ROUNDS + 1)
    assert job.makespan_s() <= 1.01 * true_best_s(job)
    found = job.shares
    job.rounds(10)
    assert job.shares == found


@pytest.mark.parametrize("n", [2, 8])
def test_with_noise_and_outliers_the_split_is_within_three_hundredths_of_the_optimum(n):
    for seed in range(3):
        job = DeviceJob(drawn(n, 10 * n + seed), 64 * n, noise=0.02, outlier_every=17, seed=seed)
        job.rounds(LADDER_ROUNDS + 26)
        assert job.makespan_s() <= 1.03 * true_best_s(job)


def test_a_rank_that_slows_down_later_is_followed():
    job = DeviceJob(drawn(3, 4), 192, noise=0.01)
    job.rounds(LADDER_ROUNDS + 5)
    job.factor[1] = 2.0
    before_s = job.makespan_s()
    job.rounds(30)
    assert job.makespan_s() <= 1.04 * true_best_s(job) < 0.9 * before_s


def test_a_rank_that_runs_out_of_memory_on_the_ladder_is_kept_within_what_fits_and_used_to_the_full():
    devices = [Gamma(1e-3, 4e-3, 8, 70), Gamma(3e-3, 2e-3, 4, None), Gamma(2e-3, 2e-3, 4, None)]
    job = DeviceJob(devices, 192)
    job.rounds(LADDER_ROUNDS + 12)
    limit = job.balancers[0].meter.limit
    assert job.failures
    assert all(rank == 0 and size > 70 for _, rank, size in job.failures)
    assert 0.9 * 70 <= limit <= 70
    assert job.finished[-1].table.column("limit").tolist() == [limit, 0, 0]
    assert all(f.table.total == 192 for f in job.finished), "no sample was lost"
    assert job.makespan_s() <= 1.03 * best_s(devices, 192, [limit, 0, 0])
    last = max(round for round, _, _ in job.failures)
    assert last < LADDER_ROUNDS, "what has failed once is not tried again"


def test_headroom_is_a_tenth_of_what_failed():
    job = DeviceJob([Gamma(1e-3, 4e-3, 1, 99), Gamma(1e-3, 4e-3, 1, None)], 200)
    job.rounds(1)
    assert job.failures == [(0, 0, 100)]
    assert job.balancers[0].meter.limit == 90
    assert job.finished[0].table.column("micro_batches").tolist() == [2, 1]


@pytest.mark.parametrize("rounds_ahead", [1, 4, 16])
def test_with_plans_fixed_ahead_the_split_comes_that_much_later_and_is_as_good(rounds_ahead):
    job = DeviceJob(drawn(3, 6), 192, rounds_ahead=rounds_ahead, noise=0.01)
    job.rounds(LADDER_ROUNDS + 2 * rounds_ahead + 2)
    assert job.balancers[0].plan().samples == job.shares
    assert job.makespan_s() <= 1.03 * true_best_s(job)


def test_short_rounds_at_the_end_of_epochs_only_lengthen_the_ladder():
    """Epochs of two rounds, the second one short: it may not eat the second round of a step."""
    job = DeviceJob(drawn(2, 3), 128)
    for _ in range(LADDER_ROUNDS + 2):
        job.rounds(1)
        job.rounds(1, short=50)
    assert job.makespan_s() <= 1.01 * true_best_s(job)


def test_times_without_a_curve_are_given_up_with_one_warning_and_speeds_decide(caplog):
    job = DeviceJob([Gamma(1e-9, 20e-3, 1, None), Gamma(2e-3, 1e-3, 1, None)], 64, noise=0.05, seed=3)
    # A device that nothing in reach keeps busy: its times are noise around one level, falling here, rising there.
    job.devices[0] = type("Falling", (), {"seconds": lambda self, x: 30e-3 - 1e-4 * x, "out_of_memory": None})()
    with caplog.at_level(logging.WARNING):
        job.rounds(3 * LADDER_ROUNDS)
    own = [r for r in caplog.records if "no curve explains the times of ranks [0]" in r.getMessage()]
    assert len(own) == len(job.balancers), "one on each rank"
    times = [job.devices[rank].seconds(x) for rank, x in enumerate(job.shares)]
    best = min(max(job.devices[0].seconds(64 - x), job.devices[1].seconds(x)) for x in range(1, 64))
    assert max(times) <= 1.05 * best


def test_a_split_that_cannot_be_found_leaves_the_plan_as_it_is(caplog, monkeypatch):
    job = DeviceJob([Gamma(1e-3, 20e-3, 1, None), Gamma(2e-3, 1e-3, 1, None)], 64)
    job.rounds(3 * LADDER_ROUNDS)
    before = list(job.shares)

    def fails(*_):
        raise ValueError("a curve that makes no sense")

    monkeypatch.setattr("hvd_hetero.policies.device_shares.shares_by_gamma", fails)
    job.factor[0] *= 3  # so that another split would be worthwhile
    with caplog.at_level(logging.WARNING):
        job.rounds(10)
    assert list(job.shares) == before
    assert "the split stays as it is: a curve that makes no sense" in caplog.text


def test_one_rank_alone_climbs_no_ladder():
    job = DeviceJob([Gamma(1e-3, 4e-3, 8, None)], 64)
    job.rounds(5)
    assert {f.plan.samples for f in job.finished} == {(64,)}


@pytest.mark.parametrize("rounds", [9, LADDER_ROUNDS + 6])
def test_a_job_goes_on_from_its_state_without_climbing_again(rounds):
    first = DeviceJob(drawn(3, 9), 192)
    first.rounds(rounds)
    second = DeviceJob(drawn(3, 9), 192)
    for old, new in zip(first.balancers, second.balancers, strict=True):
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert second.shares == first.shares
    for job in (first, second):
        job.rounds(LADDER_ROUNDS + 12 - rounds)
    assert second.makespan_s() <= 1.01 * true_best_s(second)
    if rounds > LADDER_ROUNDS:
        assert {f.plan.samples for f in second.finished} == {first.shares}


def test_the_state_of_another_device_is_refused():
    with pytest.raises(ValueError, match=r"device.*'cpu'.*resume"):
        LBBSP().load_state_dict(LBBSP(device="gpu").state_dict())
    with pytest.raises(ValueError, match=r"device.*'gpu'.*resume"):
        LBBSP(device="gpu").load_state_dict(LBBSP().state_dict())


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"device.* 'tpu'"):
        LBBSP(device="tpu")
