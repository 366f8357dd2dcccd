"""On Keras, too, the gradient is exact: whatever the split, training is that of one process on the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import KERAS_S

from hvd_hetero.testing import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "keras_exactness.py"


@pytest.fixture(scope="module", params=["0", "1"], ids=["Keras 3", "tf_keras"])
def legacy(request):
    return {"TF_USE_LEGACY_KERAS": request.param, "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def outcome(request, legacy):
    return launch(WORKER, request.param, timeout_s=KERAS_S, env=legacy).reports[0]


def test_weights_after_36_rounds_are_those_of_the_single_process(outcome):
    tolerance = {"float64": 1e-10, "float32": 1e-5}
    for case in outcome["cases"]:
        assert len(case["rounds"]) == 36
        assert case["difference"] <= tolerance[case["dtype"]], case["policy"]
        assert case["moved"] > 1e-2, "training did change the weights"


def test_all_ranks_hold_the_same_bits_and_the_same_loss(outcome):
    for case in outcome["cases"]:
        assert case["between_ranks"] == 0.0, case["policy"]
        assert case["loss_between_ranks"] == 0.0, case["policy"]


def test_every_policy_visits_the_same_samples_in_the_same_rounds(outcome):
    first, *others = (case["rounds"] for case in outcome["cases"])
    for other in others:
        assert other == first


def test_each_sample_of_an_epoch_is_visited_exactly_once(outcome):
    per_epoch = outcome["rounds_per_epoch"]
    rounds = outcome["cases"][0]["rounds"]
    for begin in range(0, len(rounds), per_epoch):
        epoch = rounds[begin : begin + per_epoch]
        assert sorted(i for r in epoch for i in r) == list(range(outcome["samples"]))
        assert len(epoch[-1]) < len(epoch[0]), "the last round is the short one"


def test_the_hard_cases_did_occur(outcome):
    """Rounds without data for a rank, and micro-batches of different sizes, were among those compared."""
    by_policy = {case["policy"]: case for case in outcome["cases"]}
    assert by_policy["static, one rank without data"]["idle"][0] == 36
    for policy in ("every round another", "every round another, in micro-batches"):
        assert sum(by_policy[policy]["idle"]) > 0
        assert all(len(sizes) > 2 for sizes in by_policy[policy]["sizes"])


def test_the_loss_was_weighted_where_it_can_be_and_gradients_elsewhere(outcome):
    weighed = {case["policy"] for case in outcome["cases"] if case["weighs_the_loss"]}
    assert weighed == {"bsp", "lb-bsp", "every round another"}
