"""Ranks die and join while Keras trains elastically, and nothing is lost. Launches are shared."""

from __future__ import annotations

from functools import partial

import elastic_jobs
import numpy as np
import pytest
from elastic_jobs import CONVERGES, INEXACT, JOIN, SAMPLES
from keras_frameworks import KERAS_3, TF_KERAS
from limits import KERAS_S
from side_by_side import side_by_side

pytestmark = pytest.mark.distributed
RATE, MOMENTUM = 1 / 16, 7 / 8  # as a float32 holds them, through which Keras sends them


# Commits come after every second round of an epoch, and after its last one. Each way in which ranks average has one
# policy: which samples a round loses is not Keras's matter, and held by the tests for PyTorch.
KILLS = {
    "self-adaptive, constant batch per rank": ({"rank": 0, "at": 8}, {"policy": "self-adaptive", "per_rank_batch": 8}),
    "elastic-bsp, local": ({"rank": 2, "at": 3, "late": True}, {"policy": "elastic-bsp, local", **CONVERGES}),
    "non-blocking, d-psgd": ({"rank": 1, "at": 5}, {"policy": "non-blocking", "sync": "d-psgd", **CONVERGES}),
}
OF_TF_KERAS = ("elastic-bsp, local",)
CASES = [(TF_KERAS if name in OF_TF_KERAS else KERAS_3, name) for name in KILLS]


JOBS = {"join": JOIN} | {name: {"faults": [["kill", kill]], **job} for name, (kill, job) in KILLS.items()}


@pytest.fixture(scope="module")
def jobs(request, launch, reliability):
    script, common = "_reliability_rank_keras.py", {"rate": RATE, "momentum": MOMENTUM}
    started = {
        (framework, name): partial(elastic_jobs.run, launch, reliability, script, framework, KERAS_S, **common | job)
        for framework in (KERAS_3, TF_KERAS)
        for name, job in JOBS.items()
    }
    with side_by_side(request, started) as jobs:
        yield jobs


def label(case):
    return f"{case[1]}, {case[0]}"


@pytest.fixture(params=CASES, ids=label)
def killed(request, jobs):
    return request.param[1], *jobs[request.param].result()


@pytest.fixture(params=[(KERAS_3, "join")], ids=label)  # that a state is rank 0's: test_keras_behaviour.py, on both
def joined(request, jobs):
    return jobs[request.param].result()


def test_a_rank_killed_in_the_middle_of_a_round_costs_no_sample_under_any_policy(killed, reliability):
    name, reports, record, said = killed
    epochs = KILLS[name][1].get("epochs", elastic_jobs.EPOCHS)
    elastic_jobs.require_two_survivors(reports, record, said, epochs)
    elastic_jobs.require_a_recovery_told(record, said)
    assert reliability.faults_of(record, SAMPLES, epochs) is None
    assert len({each["prefix"] for each in record.memberships}) == 2, "names on the wire are others than before"


def line():
    from _reliability_job import line  # on the path while `reliability` is

    x, y = line(SAMPLES)
    return np.hstack([x, np.ones((SAMPLES, 1))]), y[:, 0]


def replayed(record):
    """The parameters of one process without faults that takes the same samples in the same rounds."""
    x, y = line()
    parameters, velocity = np.zeros(x.shape[1]), 0.0
    for (_, indices), rate in zip(record.rounds, record.rates(), strict=True):
        error = x[indices] @ parameters - y[indices]
        velocity = MOMENTUM * velocity - rate * 2 * x[indices].T @ error / len(indices)
        parameters = parameters + velocity
    return parameters


def loss(parameters):
    x, y = line()
    return float(np.mean((x @ parameters - y) ** 2))


def test_survivors_end_with_the_parameters_of_one_process_that_took_the_same_samples(killed):
    name, reports, record, said = killed
    parameters = reports[0]["parameters"]
    if name in INEXACT:
        assert loss(parameters) < 1e-3 * loss(np.zeros(len(parameters)))
        return
    if "constant batch" in name:  # per rank, and the linear rule
        assert [sum(each["plan"]) for each in record.memberships] == [24, 16]
        assert [each["rate"] for each in record.memberships] == pytest.approx([RATE, RATE * 16 / 24])
        assert "the global batch was 24 and is 16 now; learning rates were scaled alike" in said
    np.testing.assert_allclose(parameters, replayed(record), rtol=1e-9)


def test_ten_rounds_after_a_join_the_allocation_is_within_5_per_cent_of_the_best(joined):
    _, record, _ = joined
    assert elastic_jobs.late_after_a_join(record) <= 0.05


def test_a_join_loses_no_work_and_repeats_no_sample(joined):
    reports, record, _ = joined
    assert record.lost == 0
    elastic_jobs.require_every_sample_once(reports, record)
