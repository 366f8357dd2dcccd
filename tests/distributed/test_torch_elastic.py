"""Ranks die, freeze, join and lie while they train elastically, and nothing is lost. Launches are shared."""

from __future__ import annotations

from functools import partial

import elastic_jobs
import numpy as np
import pytest
from elastic_jobs import CONVERGES, INEXACT, JOIN, SAMPLES, STARTED_S, late
from limits import TORCH_S
from side_by_side import side_by_side

pytestmark = pytest.mark.distributed
RATE, MOMENTUM = 0.05, 0.9


# Each kind of round with something else that must go on, too: a process that reads ahead, a stream. Commits come before
# even rounds, so in an odd one there is something to lose. Equal batches: with a spare, below.
KILLS = {
    "self-adaptive, constant batch per rank": (
        {"rank": 0, "at": 9}, {"policy": "self-adaptive", "per_rank_batch": 8, "num_workers": 1}
    ),
    "non-blocking, on a stream": ({"rank": 2, "at": 5}, {"policy": "non-blocking", "stream": "whole"}),
    "elastic-bsp, local": ({"rank": 2, "at": 3}, {"policy": "elastic-bsp, local", **CONVERGES}),
    "matcha": ({"rank": 1, "at": 5, "late": True}, {"policy": "bsp", "sync": "matcha", **CONVERGES}),
}  # fmt: skip


CONSTANT = "self-adaptive, constant batch per rank"
# Five seconds, in which the job's clock passes eighty: ten rounds. Later a rank tells absurd speeds.
LIES = [
    ["report", {"rank": 1, "at": at, "value": value, "rounds": 2}]
    for at, value in ((45, 1e6), (50, 0.0), (55, float("inf")), (60, float("nan")))
]
FREEZE = {
    "ranks": 2, "patience_s": STARTED_S, "policy": "lb-bsp", "seconds_per_sample": [0.5, 1.0], "slept_s": 16,
    "faults": [["freeze", {"rank": 1, "at": 15, "seconds": 5}], *LIES], "samples": 240, "epochs": 7,
}  # fmt: skip
SPARE = {
    "spares": 1,
    "policy": "lb-bsp",
    "rounds_per_commit": "auto",
    "faults": [["kill", {"rank": 0, "at": 9, "late": True}]],
}
LOST_TWICE = {**SPARE, "spare_is_lost": True, "patience_s": 10}
JOBS = {"join": JOIN, "freeze": FREEZE, "spare": SPARE, "spare lost": LOST_TWICE} | {
    name: {"faults": [["kill", kill]], **job} for name, (kill, job) in KILLS.items()
}


@pytest.fixture(scope="module")
def jobs(request, launch, reliability):
    started = {
        name: partial(elastic_jobs.run, launch, reliability, "_reliability_rank.py", "torch", TORCH_S, **job)
        for name, job in JOBS.items()
    }
    with side_by_side(request, started) as jobs:
        yield jobs


@pytest.fixture(params=KILLS)
def killed(request, jobs):
    return request.param, *jobs[request.param].result()


@pytest.fixture(params=["join"])
def joined(request, jobs):
    return jobs[request.param].result()


@pytest.fixture(params=["spare"])
def replaced(request, jobs):
    return jobs[request.param].result()


@pytest.fixture(params=["spare lost"])
def lost_twice(request, jobs):
    return jobs[request.param].result()


@pytest.fixture(params=["freeze"])
def frozen(request, jobs):
    return jobs[request.param].result()


def test_a_rank_killed_in_the_middle_of_a_round_costs_no_sample_under_any_policy(killed, reliability):
    name, reports, record, said = killed
    epochs = KILLS[name][1].get("epochs", elastic_jobs.EPOCHS)
    elastic_jobs.require_two_survivors(reports, record, said, epochs)
    elastic_jobs.require_a_recovery_told(record, said)
    assert reliability.faults_of(record, SAMPLES, epochs) is None


def test_survivors_end_with_the_parameters_of_one_process_that_took_the_same_samples(killed, reliability):
    name, reports, record, _ = killed
    if name in INEXACT:
        zeros = [0.0] * len(reports[0]["parameters"])
        assert reliability.loss(reports[0]["parameters"], SAMPLES) < 1e-3 * reliability.loss(zeros, SAMPLES)
        return
    rates = record.rates()
    assert len(set(rates)) == (2 if name == CONSTANT else 1)
    expected = reliability.replayed(record.rounds, rates, MOMENTUM, SAMPLES)
    np.testing.assert_allclose(reports[0]["parameters"], expected, rtol=1e-9)


@pytest.mark.parametrize("killed", [CONSTANT], indirect=True)
def test_with_constant_batches_per_rank_the_learning_rate_follows_the_global_batch(killed):
    _, _, record, said = killed
    assert [sum(each["plan"]) for each in record.memberships] == [24, 16]
    assert [each["rate"] for each in record.memberships] == pytest.approx([RATE, RATE * 16 / 24])
    assert "the global batch was 24 and is 16 now; learning rates were scaled alike" in said


@pytest.mark.parametrize("killed", [CONSTANT], indirect=True)
def test_names_on_the_wire_agree_after_a_reset_and_differ_from_those_before(killed):
    _, _, record, _ = killed
    assert len({each["prefix"] for each in record.memberships}) == 2


def test_ten_rounds_after_a_join_the_allocation_is_within_5_per_cent_of_the_best(joined):
    _, record, _ = joined
    assert elastic_jobs.late_after_a_join(record) <= 0.05


def test_a_spare_takes_the_place_of_a_killed_rank_and_no_sample_is_lost(replaced, reliability):
    reports, record, _ = replaced
    sizes = [each["size"] for each in record.memberships]
    assert sizes in ([3, 3], [3, 2, 3]), "the latter where the rank was killed before the spare had come to hvd.init()"
    assert len(record.newcomers[-1]) == 1
    assert reliability.faults_of(record, SAMPLES, elastic_jobs.EPOCHS) is None
    assert len(reports) == 3
    assert len({tuple(report["parameters"]) for report in reports}) == 1
    expected = reliability.replayed(record.rounds, record.rates(), MOMENTUM, SAMPLES)
    np.testing.assert_allclose(reports[0]["parameters"], expected, rtol=1e-9)


def test_a_rank_that_is_lost_while_the_others_meet_it_costs_no_sample(lost_twice, reliability):
    reports, record, _ = lost_twice
    sizes = [each["size"] for each in record.memberships]
    assert sizes in ([3, 2], [3, 2, 2]), "the latter where the spare came when the others had met without it"
    assert reliability.faults_of(record, SAMPLES, elastic_jobs.EPOCHS) is None
    assert len(reports) == 2
    expected = reliability.replayed(record.rounds, record.rates(), MOMENTUM, SAMPLES)
    np.testing.assert_allclose([report["parameters"] for report in reports], [expected] * 2, rtol=1e-9)


def test_a_join_loses_no_work_and_repeats_no_sample(joined):
    reports, record, _ = joined
    assert record.lost == 0
    elastic_jobs.require_every_sample_once(reports, record)


def test_a_rank_frozen_for_5_s_is_not_thrown_out_and_the_allocation_recovers_within_20_rounds(frozen, reliability):
    reports, record, _ = frozen
    assert [each["size"] for each in record.memberships] == [2]
    assert reliability.faults_of(record, 240, 7) is None
    speeds = [1 / needs_s for needs_s in record.needs_s[0]]
    assert late(record.plans[14], speeds) <= 0.05
    assert late(record.plans[35], speeds) <= 0.05
    assert reports[0]["parameters"] == reports[1]["parameters"]


def test_absurd_speeds_change_no_share_and_are_said_once_each(frozen):
    _, record, said = frozen
    plans = {tuple(plan) for plan in record.plans[44:66]}
    assert len(plans) == 1
    assert said.count("it keeps its share until its forecast is credible") == 4
    assert said.count("rank 1 forecasts a credible speed again") == 4
