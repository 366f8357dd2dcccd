"""Mixed precision, compression, batch norm over ranks and evaluation, around a loop that stays as it is."""

from __future__ import annotations

import re
import statistics
from itertools import chain

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("torch_around.py", 2, "torch") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def over_torch(pool):
    with pool("torch_around.py", 3, "torch.distributed") as ranks:
        yield ranks


@pytest.fixture(params=["ranks", "over_torch"], ids=["2 ranks", "3 ranks of torch.distributed"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("policy", ["bsp", "micro-batches", "static", "never data", "non-blocking"])
def test_a_gradient_scaler_changes_nothing_where_nothing_overflows(ranks, policy):
    outcome = ranks[0]["a_scaler_changes_nothing_where_nothing_overflows"][policy]
    if policy != "non-blocking":  # whose rounds no second run repeats
        assert outcome["difference"] < 1e-14  # scales are powers of two
    assert outcome["spread"] == 0.0
    assert outcome["scales"] == [4096.0, 4096.0], "1024, doubled after five rounds and after ten"


def test_an_infinity_on_one_rank_makes_all_skip_that_step_and_halve_the_scale(ranks):
    outcome = ranks[0]["an_infinity_on_one_rank_is_skipped_by_all"]
    assert outcome == {"spread": 0.0, "finite": True, "scales": [512.0, 512.0], "missing": [4]}


def test_clipping_sees_unscaled_gradients_in_the_hook_and_after_unscale(ranks):
    outcome = ranks[0]["clipping_of_unscaled_gradients"]
    assert outcome["difference"] == 0.0
    assert outcome["clipped"] > 1e-3


def test_a_disabled_scaler_is_no_scaler(ranks):
    assert ranks[0]["a_scaler_that_is_disabled"]["difference"] == 0.0


def test_a_scaler_resumes_from_its_state(ranks):
    assert ranks[0]["a_scaler_resumes"] == {"same": True, "scale": 4096.0}


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("stock", r"RoundStateError: torch.amp.GradScaler would look for infinities.*torch_hooks.GradScaler\("),
        ("scales differ", r"PlanMismatchError: round 0: ranks \[1\] have other hyper-parameters"),
        ("another optimizer", r"ValueError: this scaler was made for another optimizer.*optimizer=optimizer"),
        ("clipped in between", r"RoundStateError: .*gathered.*register_step_pre_hook"),
        ("d-psgd", "ValueError: gradients stay on their rank here.*bfloat16"),
        ("local", "ValueError: gradients stay on their rank here.*bfloat16"),
        ("no optimizer", "TypeError: optimizer must be a torch_hooks.DistributedOptimizer, got SGD"),
    ],
)
def test_what_a_scaler_cannot_do_is_refused_with_the_way_out(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["scaler_refusals"][attempt])


def test_pytorchs_own_scaler_works_after_synchronize(ranks):
    assert ranks[0]["scaler_refusals"]["stock, synchronised"] < 1e-14


@pytest.mark.parametrize("policy", ["bsp", "static"])
def test_bfloat16_autocast_trains_float32_parameters(ranks, policy):
    outcome = ranks[0]["bfloat16_autocast"][policy]
    before, after, plain = outcome["losses"]
    assert plain < 0.9 * before
    assert abs(after - plain) < 0.02 * (before - plain), "it learns what float32 learns"
    assert 0 < outcome["off"] < 0.02
    assert outcome["spread"] == 0.0


def test_compressed_gradients_are_near_and_counts_are_exact(ranks):
    outcome = ranks[0]["compression"]
    assert 0 < outcome["difference"] < 1e-3
    assert outcome["spread"] == 0.0
    assert outcome["counted"] == [2049.0, 2052.0]
    assert re.match("TypeError: compression must be a type, .*or have compress and decompress", outcome["refused"])
    assert re.match("ValueError: compression and sparse_as_dense are for gradients", outcome["refused with d-psgd"])


def test_a_gradient_that_shares_its_memory_is_not_weighted_in_place(ranks):
    outcome = ranks[0]["a_gradient_that_shares_its_memory"]
    assert outcome["difference"] < 1e-14
    assert outcome["moved"] > 0.1


def test_batch_norm_over_unequal_batches_is_that_of_the_single_process(either):
    outcome = either[0]["batch_norm_over_all_ranks"]
    assert len(outcome["differences"]) == outcome["names"] == 21
    assert max(outcome["differences"].values()) < 1e-10
    assert outcome["evaluated"] < 1e-10
    assert outcome["spread"] == 0.0
    assert outcome["moved"] > 0.1
    assert sum(min(shares) == 1 for shares in outcome["shares"]) >= 4, "ranks with a single sample took part"


@pytest.mark.parametrize(
    "case",
    [
        "uneven",
        "several micro-batches",
        "pinned, by a worker",
        "shards",
        "nothing left on a rank",
        "nothing left of a micro-batch",
    ],
)
def test_samples_that_collate_fn_leaves_out_weigh_nothing(ranks, case):
    outcome = ranks[0]["samples_left_out_by_collate_fn"][case]
    assert outcome["difference"] < 1e-12
    assert outcome["spread"] == 0.0
    readable = [i for i in range(24) if i % 5]
    counts = outcome["counts"]
    if case == "nothing left on a rank":
        assert sum(sorted(each) == [0, 1] for each in counts) >= 5, "such a rank took part all the same"
        assert sorted(chain(*outcome["visits"][:12])) == readable
    else:
        assert len({sum(of_round) for of_round in counts}) > 1, "of an odd number, two rounds leave out unequally many"
        for epoch in range(9):
            assert sorted(chain(*outcome["visits"][2 * epoch : 2 * epoch + 2])) == readable


def test_who_leaves_samples_out_must_say_so_and_may_not_where_rounds_end_early(ranks):
    for rank in ranks:
        early, silent = rank["samples_left_out_by_collate_fn"]["refused"]
        assert re.match("ValueError: weight_of .*'non-blocking'.*use policy='lb-bsp'", early)
        assert re.match("ValueError: collate_fn must use all samples that it is given", silent)


def test_lb_bsp_finds_the_slow_rank_behind_a_batch_norm_that_makes_all_wait_for_it(ranks):
    outcome = ranks[0]["batch_norm_leaves_lb_bsp_its_eyes"]
    fast, slow = (statistics.median(shares) for shares in zip(*outcome["plans"][-8:], strict=True))
    assert 1.5 < fast / slow < 2.5
    assert sum(outcome["plans"][-1]) == 24
    equal = [r for r, plan in enumerate(outcome["plans"]) if plan == [12, 12] and r + 1 < len(outcome["plans"])]
    fast_s, slow_s = zip(*(outcome["compute_s"][r] for r in equal), strict=True)
    # Sleeps of 48 and 96 ms, and what other processes add. With its waiting the fast rank's time is never the shorter.
    assert min(slow_s) > 1.2 * min(fast_s), "what each reports is its own"
    waits = [outcome["wait_s"][r] for r in equal]  # told one round later
    assert max(fast_s - slow_s for fast_s, slow_s in waits) > 32e-3, "of the 48 ms between them"


def test_no_share_of_equal_ranks_becomes_too_small_for_batch_norm(ranks):
    shares = ranks[0]["batch_norm_of_equal_ranks_whose_steps_are_all_fixed_cost"]
    assert len(shares) == 300
    # On a quiet machine 17 at least; beside other tests times scatter by more than they follow the batch.
    assert min(map(min, shares)) >= 3


@pytest.mark.parametrize("policy", ["non-blocking", "elastic-bsp", "self-adaptive", "no data"])
def test_batch_norm_refuses_policies_whose_ranks_do_unequal_micro_batches(either, policy):
    name = "static" if policy == "no data" else policy
    for rank in either:
        refusal = rank["batch_norm_refusals"][policy]
        assert re.match(f"ValueError: policy '{name}' does not go with SyncBatchNorm: .*use policy='lb-bsp'", refusal)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("outside", r"RoundStateError: SyncBatchNorm ran in training mode outside of a batch.*model.eval\(\)"),
        ("one-dimensional", "ValueError: input must have at least 2 dimensions"),
        ("static", "nothing was refused"),
        ("later", "HeteroError: round 1 has 1, 2(, 2)? micro-batches under policy 'sometimes-more'"),
        ("short round", "HeteroError: two rounds were done"),
        ("short round dropped", "HeteroError: two rounds were done"),
        ("short epoch", r"ValueError: epoch 0 has 1 sample\(s\) left for . ranks, and SyncBatchNorm needs 1 on"),
        (
            "no balance",
            r"TypeError: balance must be .*got None; write SyncBatchNorm.convert_sync_batchnorm\(model, bal",
        ),
        ("nothing left", "ValueError: weight_of must be positive with SyncBatchNorm.*GroupNorm"),
        ("evaluates", "nothing was refused"),
    ],
)
def test_batch_norm_says_when_it_would_wait_for_ever(either, attempt, message):
    for rank in either:
        assert re.match(message, rank["batch_norm_refusals"][attempt])


def test_evaluation_is_averaged_by_samples(either):
    for rank in either:
        outcome = rank["evaluation"]
        assert max(outcome["differences"]) < 1e-14
        assert outcome["forms"] == ["Tensor", "float"]
        assert outcome["order"] == ["y", "y2"]
        assert outcome["nothing"] == [3.0, 5.0], "the NaN of a rank without samples stays out"
        assert re.match("HeteroError: the ranks average values of different names", outcome["names"])
        assert re.match("ValueError: samples is 0 on every rank", outcome["no samples"])
        assert re.match("ValueError: samples must be.* -1", outcome["negative"])
