"""What PyTorch users do around the loop works, and what cannot work is refused with the way out."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory):
    with pool("behaviour.py", 2, "torch", [tmp_path_factory.mktemp("telemetry")]) as ranks:
        yield ranks


def test_worker_processes_change_nothing_but_the_lead(ranks):
    for rank in ranks:
        outcome = rank["worker_processes_change_nothing"]
        assert outcome["with"] == outcome["without"]
        assert outcome["lead"] == 4


def test_lb_bsp_with_a_lead_finds_the_slow_rank(ranks):
    fast, slow = ranks[0]["balanced_with_workers"]["plan"]
    assert fast + slow == 120
    assert fast > 1.5 * slow
    assert ranks[0]["balanced_with_workers"]["spread"] == 0.0


def test_own_batches_are_weighted_by_what_was_really_used(ranks):
    assert ranks[0]["own_batches_are_weighted_by_what_was_used"]["difference"] < 1e-12


def test_the_nan_of_an_empty_batch_reaches_nobody(ranks):
    for rank in ranks:
        assert rank["an_empty_batch_of_ones_own"] == {"finite": True, "spread": 0.0}


def test_clipping_between_synchronise_and_step_clips_the_global_gradient(ranks):
    outcome = ranks[0]["clipping_between_synchronise_and_step"]
    assert len(outcome["norms"]) == 12
    assert max(outcome["norms"]) == pytest.approx(0.1, rel=1e-4)
    assert outcome["norms"] == ranks[1]["clipping_between_synchronise_and_step"]["norms"]
    assert outcome["spread"] == 0.0


def test_a_step_that_is_skipped_after_synchronising_leaves_the_next_round_whole(ranks):
    assert ranks[0]["a_step_that_a_scaler_skips"] == {"rounds": 10, "spread": 0.0}


def test_each_index_that_a_sampler_draws_is_visited_once(ranks):
    for rank in ranks:
        outcome = rank["a_weighted_sampler"]
        assert outcome["visited"] == outcome["drawn"]
        assert len(set(outcome["drawn"])) < len(outcome["drawn"]) == 50
        assert (outcome["rounds"], outcome["spread"]) == (3, 0.0)


def test_schedulers_groups_and_hooks_work_on_the_wrapper(ranks):
    outcome = ranks[0]["schedulers_and_groups"]
    assert outcome["rates"] == pytest.approx([0.1 * 1e-3, 0.01 * 1e-3])
    assert outcome["hooked"] == 6
    assert outcome["spread"] == 0.0


def test_parameters_state_and_hyper_parameters_come_from_rank_0(ranks):
    for rank in ranks:
        outcome = rank["state_is_broadcast"]
        assert outcome["rate"] == 0.125
        assert outcome["steps"] == [3.0, 3.0]
        assert outcome["moments"] == outcome["spread"] == 0.0
        assert outcome["moment"] > 0


@pytest.mark.parametrize("change", ["freezes", "thaws"])
def test_a_rank_that_trains_other_parameters_stops_all_and_hangs_none(ranks, change):
    for rank in ranks:
        message = rank["trained_on_one_rank_alone"][change]
        assert re.match(r"PlanMismatchError: round 3: ranks \[1\] .*freeze parameters on all of them at once", message)


def test_a_parameter_that_is_thawed_later_is_synchronised(ranks):
    outcome = ranks[0]["thawed_parameters_are_synchronised"]
    assert outcome["moved"] > 0
    assert outcome["spread"] == 0.0


@pytest.mark.parametrize("members", ["32", "3", "1"])
def test_layers_frozen_and_thawed_train_as_in_one_process_and_another_optimizer_goes_on(ranks, members):
    outcome = ranks[0]["gradual_unfreezing"][members]
    assert outcome["difference"] < 1e-12, "about so many gradients travel together"
    assert outcome["spread"] == 0.0
    assert "that was closed" in outcome["closed"]


def test_telemetry_is_written_by_rank_0_alone(ranks):
    assert ranks[0]["telemetry_is_written_by_rank_0"] == {"exists": True, "lines": 11}
    assert ranks[1]["telemetry_is_written_by_rank_0"] == {"exists": False, "lines": 0}


def test_ranks_with_different_data_are_told_in_the_first_round(ranks):
    for rank in ranks:
        assert "ranks [1] follow another plan or another order of the data" in rank["different_data"]["refusal"]
        assert rank["different_data"]["rounds"] == 0


def test_data_cut_by_hand_into_parts_of_equal_length_are_told_before_the_first_round(ranks):
    for rank in ranks:
        cut, whole = rank["data_cut_by_hand"]["cut"], rank["data_cut_by_hand"]["whole"]
        assert (
            "ranks [1] hold other samples than rank 0 at the same indices. Give every rank the whole" in cut["refusal"]
        )
        assert cut["rounds"] == 0
        assert whole["rounds"] == 5


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("small batch", "ValueError: global_batch must be at least the number of ranks.*got 1 for 2 ranks"),
        ("policy", "ValueError: policy 'lbbsp' is not known; did you mean 'lb-bsp'"),
        (
            "no optimizer",
            "RoundStateError: the loss of the last batch was not scaled.*wrap the optimizer before the loop",
        ),
        ("stream", "ValueError: stream must be 'whole' or 'shard', got None"),
        ("batch_size", "TypeError: BalancedLoader does not take batch_size.*global_batch"),
        ("empty", "ValueError: the dataset must hold at least one sample"),
        ("names missing", "ValueError: named_parameters must name every parameter.*1 are not named"),
        ("names repeated", "ValueError: names in named_parameters must be unique, repeated: weight"),
        ("names of no pairs", "ValueError: named_parameters must be pairs"),
        ("twice", "ValueError: balance already serves another optimizer"),
        ("wrapped", "TypeError: optimizer is a DistributedOptimizer already"),
        ("step without batch", r"RoundStateError: step\(\) came without a batch.*balance.batch\(samples\)"),
        ("zero_grad too late", r"RoundStateError: the gradient .* changed between backward\(\) and step"),
        ("no step", r"RoundStateError: the next batch was asked for before .* Call optimizer.step\(\) once for every"),
        ("negative samples", "ValueError: samples must be at least 0, got -1; give the number of samples"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["refusals"][attempt])
