"""The gradient is exact: whatever the split, training is that of one process on the same global batches.

So is batch norm over all ranks, and what averages parameters. A job takes all of these cases. What is not about
processes is in tests/unit/torch_hooks, on threads: all policies with all options, and sparse gradients.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed
ROUNDS = 20  # of eight or nine an epoch: two epochs, and the beginning of a third one
POLICIES = ["bsp", "every round another", "lb-non-blocking", "lb-non-blocking, with trials", "elastic-bsp"]
JOBS = {"4 ranks": (4, "torch"), "3 ranks of torch.distributed": (3, "torch.distributed")}
AVERAGING = [
    "static, d-psgd", "non-blocking, matcha", "elastic-bsp, local, momentum", "elastic-bsp, local, adam",
    "non-blocking, n/N",
]  # fmt: skip
# Adam counts its steps in float32, so their weighted mean has no more digits than that.
LOOSER = {"elastic-bsp, local, adam": 1e-6}


@pytest.fixture(scope="module", params=list(JOBS))
def ranks(request, pool):
    with pool("exactness.py", *JOBS[request.param], [ROUNDS]) as ranks:
        yield ranks


def require_each_sample_once(rounds, epochs, samples):
    """Or at most once, in the last epoch, which was left in the middle."""
    for epoch in range(epochs[-1] + 1):
        visited = sorted(i for r, of in zip(rounds, epochs, strict=True) if of == epoch for i in r)
        assert visited == (list(range(samples)) if epoch < epochs[-1] else sorted(set(visited)))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_as_one_process_does_and_visits_each_sample_of_an_epoch_once(ranks, policy):
    outcome = ranks[0][policy]
    assert outcome["difference"] <= 1e-10
    assert outcome["between_ranks"] == 0.0
    assert len(outcome["rounds"]) == len(outcome["epochs"]) == ROUNDS
    assert outcome["epochs"][-1] >= (1 if "non-blocking" in policy else 2), "rounds that end early are more to an epoch"
    require_each_sample_once(outcome["rounds"], outcome["epochs"], outcome["samples"])
    if policy == "every round another":  # which keeps the global batch
        assert outcome["rounds"] == ranks[0]["bsp"]["rounds"]


def test_the_hard_cases_did_occur(ranks):
    """Among what was compared: ranks without data, unequal micro-batches, rounds cut short, iterations that differ."""
    rank = ranks[0]
    assert sum(rank["every round another"]["idle"]) > 0
    assert all(len(sizes) > 2 for sizes in rank["every round another"]["sizes"])
    early = rank["lb-non-blocking"]
    done = zip(early["shares"], early["planned"], strict=True)
    assert any(sum(of_round) < sum(plan) for of_round, plan in done)
    shares = rank["elastic-bsp"]["shares"]
    assert sum(of_rank[0] > of_rank[-1] for of_rank in shares) > ROUNDS / 2


@pytest.mark.parametrize("case", AVERAGING)
def test_who_averages_parameters_holds_those_of_the_oracle_sample_by_sample(ranks, case):
    """D-PSGD, MATCHA, local updates and the paper's learning-rate rule do what their equations say."""
    outcome = ranks[0][case]
    assert outcome["difference"] <= LOOSER.get(case, 1e-10)
    with_neighbours = "psgd" in case or "matcha" in case
    assert (outcome["between_ranks"] == 0) == (not with_neighbours), "who averages with everybody holds the same bits"
    # On fewer than four ranks a ring is the complete graph, where wrong neighbours would go unnoticed.
    assert outcome["strangers"] == ([[2, 0], [3, 1]] if with_neighbours and len(ranks) == 4 else [])
    require_each_sample_once(outcome["visited"], outcome["epochs"], outcome["samples"])
    assert sum(len(set(done)) > 1 for done in outcome["done"]) >= 5, "ranks did unequal work"


def test_d_psgd_takes_equal_parts_of_both_neighbours_and_of_itself(ranks):
    n = len(ranks)
    near = [{rank, (rank + 1) % n, (rank - 1) % n} for rank in range(n)]
    for row, members in zip(ranks[0]["static, d-psgd"]["first_mix"], near, strict=True):
        assert row == pytest.approx([(j in members) / len(members) for j in range(n)])


def test_batch_norm_over_unequal_batches_is_that_of_the_single_process(ranks):
    outcome = ranks[0]["batch_norm_over_all_ranks"]
    assert len(outcome["differences"]) == outcome["names"] == 21
    assert max(outcome["differences"].values()) < 1e-10
    assert outcome["evaluated"] < 1e-10
    assert outcome["spread"] == 0.0
    assert outcome["moved"] > 0.1
    assert sum(min(shares) == 1 for shares in outcome["shares"]) >= 4, "ranks with a single sample took part"


def test_an_infinity_on_one_rank_makes_all_skip_that_step_and_halve_the_scale(ranks):
    outcome = ranks[0]["an_infinity_on_one_rank_is_skipped_by_all"]
    assert outcome == {"spread": 0.0, "scales": [512.0] * len(ranks), "missing": [4]}


def test_bfloat16_autocast_trains_float32_parameters(ranks):
    outcome = ranks[0]["bfloat16_autocast"]
    before, after, plain = outcome["losses"]
    assert plain < 0.9 * before
    assert abs(after - plain) < 0.02 * (before - plain), "it learns what float32 learns"
    assert 0 < outcome["off"] < 0.02
    assert outcome["spread"] == 0.0


def test_compressed_gradients_are_near_and_counts_are_exact(ranks):
    outcome = ranks[0]["compression"]
    assert 0 < outcome["difference"] < 1e-3
    assert outcome["spread"] == 0.0
    assert outcome["counted"] == [2049.0 + 3 * rank for rank in range(len(ranks))], "though no half holds these"


@pytest.mark.parametrize("reducer", ["own", "beside"])
def test_one_process_that_replays_the_ledger_ends_with_the_ranks_parameters(ranks, reducer):
    """Of shares that change every round, with random numbers in the body, and evaluations between epochs."""
    outcome = ranks[0]["a_ledger_is_replayed"][reducer]
    assert outcome["difference"] <= 1e-10
    assert outcome["moved"] > 0.1
    assert outcome["shares"] > 2 * len(ranks)
    assert outcome["visits"] == sorted([*range(24)] * 8)
