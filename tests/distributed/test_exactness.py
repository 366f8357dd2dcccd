"""The gradient is exact: whatever the split, training is that of one process on the same global batches.

Other optimizers, types and orders of calls, which are not about processes: on threads, in tests/unit/torch_hooks.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
ROUNDS = 24  # of eight or nine an epoch: two epochs, and most of a third one
OF_ONE_SIZE = ["bsp", "bsp in micro-batches", "lb-bsp", "static", "every round another", "self-adaptive"]
POLICIES = [*OF_ONE_SIZE, "static, one rank without data", "non-blocking", "lb-non-blocking", "elastic-bsp"]


# Of each kind of round one, for other numbers of ranks and for another wire.
FEW = ["bsp", "every round another", "lb-non-blocking", "elastic-bsp"]
EVERY_POLICY = "3 ranks"
JOBS = {f"{ranks} ranks": (ranks, "torch") for ranks in (2, 3, 4)}
JOBS["3 ranks of torch.distributed"] = 3, "torch.distributed"


@pytest.fixture(scope="module", params=list(JOBS))
def ranks(request, pool):
    with pool("exactness.py", *JOBS[request.param], [ROUNDS]) as ranks:
        yield ranks


class Exactness:
    def test_parameters_at_the_end_are_those_of_the_single_process(self, ranks, policy):
        outcome = ranks[0][policy]
        assert len(outcome["rounds"]) == ROUNDS
        assert outcome["difference"] <= 1e-10

    def test_all_ranks_hold_the_same_bits(self, ranks, policy):
        assert ranks[0][policy]["between_ranks"] == 0.0

    def test_policies_that_keep_the_global_batch_visit_the_same_samples_in_the_same_rounds(self, ranks, policy):
        if policy in OF_ONE_SIZE:
            assert ranks[0][policy]["rounds"] == ranks[0]["bsp"]["rounds"]

    def test_each_sample_of_an_epoch_is_visited_exactly_once_under_every_policy(self, ranks, policy):
        outcome = ranks[0][policy]
        epochs = outcome["epochs"]
        assert len(epochs) == ROUNDS
        assert epochs[-1] >= (1 if "non-blocking" in policy else 2), "rounds that end early are more to an epoch"
        for epoch in range(epochs[-1]):  # the last one was left in the middle
            visited = sorted(i for r, of in zip(outcome["rounds"], epochs, strict=True) if of == epoch for i in r)
            assert visited == list(range(outcome["samples"]))


@pytest.mark.parametrize("ranks", [EVERY_POLICY], indirect=True, scope="module")
@pytest.mark.parametrize("policy", POLICIES)
class TestUnderEveryPolicy(Exactness):
    pass


@pytest.mark.parametrize("ranks", [job for job in JOBS if job != EVERY_POLICY], indirect=True, scope="module")
@pytest.mark.parametrize("policy", FEW)
class TestOnOtherRanks(Exactness):
    pass


@pytest.mark.parametrize("ranks", [EVERY_POLICY], indirect=True)
def test_the_hard_cases_did_occur(ranks):
    """Among what was compared: ranks without data, unequal micro-batches, rounds cut short, iterations that differ."""
    rounds, rank = ROUNDS, ranks[0]
    assert rank["static, one rank without data"]["idle"][0] == rounds
    assert sum(rank["every round another"]["idle"]) > 0
    assert all(len(sizes) > 2 for sizes in rank["every round another"]["sizes"])
    early = rank["non-blocking"]
    cut = sum(done[-1] < plan[-1] for done, plan in zip(early["shares"], early["planned"], strict=True))
    assert cut >= rounds / 5
    for policy in ("lb-bsp", "self-adaptive", "elastic-bsp"):
        shares = rank[policy]["shares"]
        assert sum(of_rank[0] > of_rank[-1] for of_rank in shares) > rounds / 2, policy
