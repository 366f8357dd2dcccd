"""The gradient is exact: whatever the split, training is that of one process on the same global batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_hetero.testing import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "exactness.py"


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def outcome(request):
    return launch(WORKER, request.param, timeout_s=90).reports[0]


def test_parameters_after_50_rounds_are_those_of_the_single_process(outcome):
    tolerance = {"torch.float64": 1e-10, "torch.float32": 1e-5}
    for case in outcome["cases"]:
        assert len(case["rounds"]) == 50
        assert case["difference"] <= tolerance[case["dtype"]], case["policy"]


def test_all_ranks_hold_the_same_bits(outcome):
    for case in outcome["cases"]:
        assert case["between_ranks"] == 0.0, case["policy"]


def test_every_policy_visits_the_same_samples_in_the_same_rounds(outcome):
    first, *others = (case["rounds"] for case in outcome["cases"])
    for other in others:
        assert other == first


def test_each_sample_of_an_epoch_is_visited_exactly_once(outcome):
    per_epoch = outcome["rounds_per_epoch"]
    rounds = outcome["cases"][0]["rounds"]
    epochs = [rounds[i : i + per_epoch] for i in range(0, len(rounds) - per_epoch + 1, per_epoch)]
    assert len(epochs) >= 5
    for epoch in epochs:
        assert sorted(i for r in epoch for i in r) == list(range(outcome["samples"]))
        assert len(epoch[-1]) < len(epoch[0]), "the last round is the short one"


def test_the_hard_cases_did_occur(outcome):
    """Rounds without data for a rank, and micro-batches of different sizes, were among those compared."""
    by_policy = {case["policy"]: case for case in outcome["cases"]}
    assert by_policy["static, one rank without data"]["idle"][0] == 50
    assert sum(by_policy["every round another"]["idle"]) > 0
    assert all(len(sizes) > 2 for sizes in by_policy["every round another"]["sizes"])
