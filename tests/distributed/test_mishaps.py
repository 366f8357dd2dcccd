"""What goes wrong in users' loops is found out and explained; what only looks wrong works."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory):
    with pool("mishaps.py", 2, "torch", [tmp_path_factory.mktemp("telemetry") / "run.jsonl"]) as ranks:
        yield ranks


def test_step_hooks_run_once_per_round_also_where_there_is_no_data(ranks):
    outcomes = [rank["step_hooks_run_on_ranks_without_data"] for rank in ranks]
    assert outcomes[0]["rounds"] == 12
    assert outcomes[0]["spread"] == 0.0
    assert outcomes[0]["rate"] == outcomes[1]["rate"]


@pytest.mark.parametrize("case", ["idle", "micro-batches"])
def test_a_schedule_that_steps_unlike_on_the_ranks_is_found_out(ranks, case):
    for rank in ranks:
        found = rank["a_schedule_in_the_body_is_found_out"][case]
        assert re.match(r"PlanMismatchError: .*ranks \[1\] have other hyper-parameters.*register_step_post_hook", found)


def test_a_schedule_that_asks_for_the_end_of_the_round_works(ranks):
    for rank in ranks:
        outcome = rank["a_schedule_in_the_body_works_when_asked_whether_the_round_is_complete"]
        assert outcome == {"rate": 0.05 * 0.5**4, "rounds": 4, "spread": 0.0}


def test_clipping_that_a_rank_without_data_does_not_do_is_found_out(ranks):
    for rank in ranks:
        found = rank["clipping_in_the_body_is_found_out"]["refusal"]
        assert re.match(r"PlanMismatchError: .*ranks \[1\] hold other parameters.*register_step_pre_hook", found)


@pytest.mark.parametrize("parameter", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_a_parameter_that_is_changed_on_one_rank_is_found_out_whichever_it_is(ranks, parameter):
    for rank in ranks:
        outcome = rank["parameters_changed_on_one_rank_are_found_out"][parameter]
        assert re.match(r"PlanMismatchError: .*ranks \[1\] hold other parameters", outcome["refusal"])
        assert outcome["after"] <= 4, "rounds, as many as there are parameters"


def test_a_gradient_that_is_changed_on_its_way_is_found_out(ranks):
    for rank in ranks:
        found = rank["gradients_changed_in_flight_are_found_out"]["refusal"]
        assert re.match(r"RoundStateError: the gradient of '\w+' was changed between backward\(\) and step\(\)", found)


@pytest.mark.parametrize("case", ["before", "after"])
def test_a_gradient_cleared_in_the_middle_of_a_round_is_found_out(ranks, case):
    for rank in ranks:
        found = rank["a_gradient_cleared_in_the_middle_is_found_out"][case]
        assert re.match(r"RoundStateError: the gradient of .*gathered.*call optimizer.zero_grad\(\)", found)


def test_two_trainings_of_one_job_do_not_disturb_each_other(ranks):
    assert ranks[0]["two_trainings_at_once"] == {"spread": 0.0, "rounds": [2, 2]}


def test_a_model_can_be_trained_again_once_its_former_optimizer_is_closed(ranks):
    outcome = ranks[0]["a_model_is_trained_again_by_another_optimizer"]
    assert (outcome["rounds"], outcome["spread"]) == (3, 0.0)


def test_channels_last_parameters_are_broadcast_and_synchronised(ranks):
    assert ranks[0]["channels_last"]["spread"] == 0.0


def test_a_break_in_the_middle_of_a_round_leaves_no_trace_in_the_next_epoch(ranks):
    for rank in ranks:
        assert rank["a_break_in_the_middle_of_a_round_and_another_epoch"] == {"rounds": 3, "difference": 0.0}


def test_parameters_whose_gradients_share_memory_are_trained(ranks):
    assert ranks[0]["parameters_that_are_concatenated"] == {"spread": 0.0, "rounds": 6}


def test_rates_that_differ_by_a_little_are_found_out(ranks):
    for rank in ranks:
        found = rank["a_small_difference_of_small_rates"]["refusal"]
        assert re.match(r"PlanMismatchError: round 0: ranks \[1\] have other hyper-parameters", found)


def test_ranks_that_leave_an_epoch_at_different_rounds_are_told(ranks):
    for rank in ranks:
        found = rank["ranks_that_leave_at_different_rounds_are_told"]["refusal"]
        assert re.match(r"PlanMismatchError: .*another plan or another order of the data.*stop_at", found)


def test_parameters_in_another_order_are_refused_on_every_rank(ranks):
    for rank in ranks:
        found = rank["different_order_of_parameters"]["refusal"]
        assert re.match("HeteroError: the ranks do not train the same parameters in the same order", found)
    assert "this rank has ('b.weight'" in ranks[1]["different_order_of_parameters"]["refusal"]


def test_parameters_added_later_come_from_rank_0_and_are_synchronised(ranks):
    for rank in ranks:
        outcome = rank["added_groups_are_synchronised"]
        assert outcome["start"] == 0.0
        assert outcome["spread"] == 0.0
        assert outcome["moved"] > 0


def test_the_table_rides_with_the_gradients(ranks):
    """Once it is known which gradients arise, the table is in the vector of the last of them."""
    posted = ranks[0]["the_table_travels_with_the_last_gradients"]["posted"]
    table, *first = posted[: len(posted) // 2 + 1]
    assert table == "table", "what is trained is agreed in the first round, before gradients leave"
    assert len(first) >= 2
    assert posted[len(first) + 1 :] == first, "the gradients of the second round, and nothing else"


def test_waiting_for_a_late_rank_does_not_use_the_processor(ranks):
    outcome = ranks[0]["waiting_does_not_spin"]
    assert outcome["wall_s"] > 0.3
    assert outcome["used_s"] < 0.25 * outcome["wall_s"]


def test_a_lead_and_micro_batches_together_visit_every_sample_once(ranks):
    outcome = ranks[0]["a_lead_with_micro_batches"]
    assert outcome["visits"] == sorted(list(range(26)) * 3)
    assert outcome["spread"] == 0.0


def test_drop_last_leaves_out_the_short_round(ranks):
    assert ranks[0]["drop_last"] == {"rounds": 6, "length": 2, "whole": 3}


def test_reading_updating_and_what_lies_between_rounds_are_told_apart(ranks):
    outcome = {name: np.array(figures) for name, figures in ranks[0]["where_the_time_goes"].items()}
    assert (outcome["input_s"] >= 0.012).all()
    assert (outcome["compute_s"] >= 0.03).all()
    # The 200 ms between rounds are in the time of the round alone. It is rank 0's, whose clock the round's time is.
    assert (outcome["elapsed_s"] - outcome["compute_s"][:, 0] - outcome["input_s"][:, 0] >= 0.19).all()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("sized stream", "ValueError: stream must be 'whole' or 'shard', got None"),
        ("loader without balance", "TypeError: balance must be a LoadBalance, got 'lb-bsp'"),
        ("optimizer without balance", "TypeError: balance must be the LoadBalance of this training, got str"),
        ("a model", "TypeError: optimizer must be a torch.optim.Optimizer, got Linear"),
        ("wrapped by Horovod", "TypeError: optimizer is a DistributedOptimizer already, of this package or of Horovod"),
        ("lbfgs", "ValueError: LBFGS evaluates a closure as often as it likes"),
        ("bfloat16", "ValueError: parameter 'weight' is bfloat16.*autocast"),
        ("copy", r"TypeError: a DistributedOptimizer cannot be copied or pickled.*state_dict\(\)"),
        ("nothing left", "ValueError: drop_last leaves no round at all: an epoch has 5 samples.* 12"),
        ("in_order", "TypeError: BalancedLoader does not take in_order"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["refusals"][attempt])
