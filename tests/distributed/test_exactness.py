"""The gradient is exact: whatever the split, training is that of one process on the same global batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import TORCH_S

from hvd_hetero.testing import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "exactness.py"


@pytest.fixture(scope="module", params=[2, 3, 4], ids=["2 ranks", "3 ranks", "4 ranks"])
def outcome(request):
    return launch(WORKER, request.param, timeout_s=TORCH_S).reports[0]


def test_parameters_after_100_rounds_are_those_of_the_single_process(outcome):
    # In float32 a hundred steps with momentum carry the rounding of each, which differs with the order of the sum.
    tolerance = {"torch.float64": 1e-10, "torch.float32": 5e-5}
    for case in outcome["cases"]:
        assert len(case["rounds"]) == 100
        assert case["difference"] <= tolerance[case["dtype"]], (case["policy"], case["order"])


def test_all_ranks_hold_the_same_bits(outcome):
    for case in outcome["cases"]:
        assert case["between_ranks"] == 0.0, (case["policy"], case["order"])


OF_ONE_SIZE = ("bsp", "bsp in micro-batches", "lb-bsp", "static", "every round another", "self-adaptive")


def test_policies_that_keep_the_global_batch_visit_the_same_samples_in_the_same_rounds(outcome):
    first, *others = (case["rounds"] for case in outcome["cases"] if case["policy"] in OF_ONE_SIZE)
    assert len(others) >= 1
    for other in others:
        assert other == first


def test_each_sample_of_an_epoch_is_visited_exactly_once_under_every_policy(outcome):
    for case in outcome["cases"]:
        epochs = case["epochs"]
        assert len(epochs) == 100
        assert epochs[-1] >= 3
        for epoch in range(epochs[-1]):  # the last one was left in the middle
            visited = sorted(i for r, of in zip(case["rounds"], epochs, strict=True) if of == epoch for i in r)
            assert visited == list(range(outcome["samples"])), case["policy"]


def test_the_hard_cases_did_occur(outcome):
    """Among what was compared: ranks without data, unequal micro-batches, rounds cut short, iterations that differ."""
    by_policy = {case["policy"]: case for case in outcome["cases"]}
    for case in outcome["cases"]:
        if case["order"] != "zero_grad first":
            assert sum(case["idle"]) > 0 or len(case["idle"]) < 3, "a rank without data, whose loop clears nothing"
    ranks = len(by_policy["lb-bsp"]["idle"])
    if ranks < 4:
        assert by_policy["static, one rank without data"]["idle"][0] == 100
    assert sum(by_policy["every round another"]["idle"]) > 0
    assert all(len(sizes) > 2 for sizes in by_policy["every round another"]["sizes"])
    early = by_policy["non-blocking"]
    assert sum(done[-1] < plan[-1] for done, plan in zip(early["shares"], early["planned"], strict=True)) >= 20
    for policy in {"lb-bsp", "self-adaptive", "elastic-bsp"} & by_policy.keys():
        shares = by_policy[policy]["shares"]
        assert sum(of_rank[0] > of_rank[-1] for of_rank in shares) > 50, policy
