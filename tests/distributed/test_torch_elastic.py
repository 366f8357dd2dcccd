"""Ranks die, freeze, join and lie while they train elastically, and nothing is lost. One launch per policy."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from limits import TORCH_S

from hvd_hetero.testing import Elastic, launch

pytestmark = pytest.mark.distributed
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLES, EPOCHS, GLOBAL_BATCH = 100, 3, 24  # five rounds an epoch where rounds are of one size, the last one short
NEEDS_S = [1.0, 2.0, 4.0, 1.0]  # per sample, by host
NOTICED_S = 15  # of a rank that is gone, at the latest


@pytest.fixture(scope="module")
def reliability():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("_reliability")


@pytest.fixture(scope="module")
def elastic(tmp_path_factory, reliability):
    """Runs a job, once, and returns what its ranks reported and wrote down."""

    @cache
    def run(job, patience_s):
        directory = tmp_path_factory.mktemp("elastic")
        default = {
            "samples": SAMPLES, "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "rounds_per_commit": 2,
            "seconds_per_sample": NEEDS_S, "directory": str(directory), "faults": [],
        }  # fmt: skip
        spec = default | json.loads(job)
        result = launch(
            BENCHMARKS / "_reliability_rank.py", 3, [json.dumps(spec)], timeout_s=TORCH_S,
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": str(patience_s)}, elastic=Elastic(least=1),
        )  # fmt: skip
        struck = len(list(directory.glob("fault.*")))
        assert struck == len([kind for kind, _ in spec["faults"] if kind != "report"]), "a fault did not happen"
        reports = [report for report in result.reports if report is not None]
        return reports, reliability.read(directory), "".join(result.stderr)

    return lambda patience_s=NOTICED_S, **job: run(json.dumps(job), patience_s)


KILLS = {
    "bsp": {"rank": 2, "at": 3},
    "static": {"rank": 1, "at": 7, "late": True},
    "lb-bsp": {"rank": 0, "at": 8},
    "self-adaptive": {"rank": 1, "at": 9},
    "non-blocking": {"rank": 2, "at": 5},
    "elastic-bsp": {"rank": 0, "at": 3, "late": True},
    "elastic-bsp, local": {"rank": 2, "at": 3},
}


@pytest.mark.parametrize("policy", KILLS)
def test_a_rank_killed_in_the_middle_of_a_round_costs_no_sample_under_any_policy(elastic, reliability, policy):
    reports, record, _ = elastic(policy=policy, faults=[["kill", KILLS[policy]]])
    assert [each["size"] for each in record.memberships] == [3, 2]
    assert reliability.faults_of(record, SAMPLES, EPOCHS) is None
    assert len(reports) == 2
    assert reports[0]["parameters"] == reports[1]["parameters"]
    assert reports[0]["seen"] == list(range(EPOCHS)), "what follows an epoch was done once for each"
    if policy != "elastic-bsp, local":
        expected = reliability.replayed(record.rounds, [0.05] * len(record.rounds), 0.9, SAMPLES)
        np.testing.assert_allclose(reports[0]["parameters"], expected, rtol=1e-9)
    else:
        zeros = [0.0] * len(reports[0]["parameters"])
        assert reliability.loss(reports[0]["parameters"], SAMPLES) < 0.1 * reliability.loss(zeros, SAMPLES)
