"""Training loops in the shapes of other people's scripts, whose last round leaves a rank without data."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed
SHORT = r"the last round of this epoch has 1 sample for 2 ranks"


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("torch_ported.py", 2, "torch") as ranks:
        yield ranks


@pytest.mark.parametrize(
    "script",
    [
        "horovods_mnist",
        "horovods_imagenet",
        "horovods_imagenet_in_parts",
        "dcgan",
        "dcgan_with_batch_norm",
        "two_optimizers_of_one_loss",
        "hugging_face",
        "hugging_face_accumulates",
        "accelerates",
        "lightning",
        "transformers_trainer",
    ],
)
def test_a_ported_script_is_that_of_one_process(ranks, script):
    for rank in ranks:
        outcome = rank[script]
        assert outcome["off"] < (1e-9 if script == "dcgan_with_batch_norm" else 1e-14)  # Adam divides small by small
        assert outcome["spread"] == 0.0
        assert outcome["moved"] > 0.05


def test_what_the_scripts_report_is_the_same_on_every_rank_and_that_of_all_samples(ranks):
    assert ranks[0]["horovods_mnist"]["losses"] == ranks[1]["horovods_mnist"]["losses"]
    for script in ("horovods_imagenet", "horovods_imagenet_in_parts"):
        for rank in ranks:
            assert max(rank[script]["losses_off"]) < 1e-14
            assert rank[script]["rates"] == 5, "the warm-up takes five rounds"


def test_a_rank_without_data_takes_part_in_the_rounds_of_both_optimizers(ranks):
    for rank in ranks:
        assert rank["dcgan"]["rounds"] == 6
        assert sum(rank["dcgan"]["bodies"]) == 2 * 6 - 2, "in the last round of two epochs, one rank had no data"
        assert rank["lightning"]["rounds"] == 6
        assert rank["lightning"]["seen"] == [18, 16]


@pytest.mark.parametrize(
    ("step", "what", "way_out"),
    [
        (
            "a_metric_averaged",
            r"hvd\.allreduce\(\) at torch_ported\.py:\d+, a_metric_averaged\(\): a collective",
            "after",
        ),
        (
            "a_metric_averaged_by_samples",
            r"torch_hooks\.average_by_samples\(\) at .*: a collective is called",
            "after the",
        ),
        ("a_schedule", "learning rates or other hyper-parameters are changed", "register_step_post_hook"),
        (
            "a_warm_up",
            "learning rates or other hyper-parameters are changed",
            "balance.rounds: in register_step_pre_hook",
        ),
        ("weights_clamped", "parameters are changed", "register_step_post_hook"),
        ("gradients_clipped", r"gradients are changed after synchronize\(\)", "register_step_pre_hook"),
    ],
)
def test_a_mistake_in_the_body_ends_the_second_round_where_the_last_would_go_wrong(ranks, step, what, way_out):
    for rank in ranks:
        said = rank["mistakes"][step]
        assert re.match(
            rf"RoundStateError: round 1: {what}.* in the loop's body, .*: {SHORT}; .*{re.escape(way_out)}", said
        )
        assert rank["mistakes"][f"{step}, whole rounds"] == "nothing was refused"


def test_a_collective_that_ranks_call_unequally_often_ends_the_first_round(ranks):
    for rank in ranks:
        said = rank["mistakes"]["a_metric_averaged, micro-batches"]
        assert re.match(r"RoundStateError: round 0: .*in this round it runs 2, 3 times; call collectives", said)


def test_what_the_body_does_now_and_then_and_what_is_not_looked_at_is_not_refused(ranks):
    for rank in ranks:
        assert rank["mistakes"]["a_metric_averaged, in the first round"] == "nothing was refused"
        assert re.match(r"PlanMismatchError: round 3: ", rank["mistakes"]["a_schedule, not looked at"])


def test_another_training_in_the_body_is_refused_with_the_way_out(ranks):
    for rank in ranks:
        said = rank["mistakes"]["another_training"]
        assert re.match(
            rf"RoundStateError: round 1: batch\(\) of another LoadBalance .*: {SHORT}; .*balance\.also\(\)", said
        )


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("twice", r"ValueError: balance already serves another optimizer; give this one balance\.also\(\)"),
        (
            "other order",
            r"RoundStateError: step\(\) came before that of an optimizer whose LoadBalance was made earlier",
        ),
        ("forgotten", "RoundStateError: the next batch was asked for before the last one was used"),
        ("in turn, in micro-batches", "RoundStateError: .*optimizers that step in turn need rounds of one micro-batch"),
        ("non-blocking", "ValueError: several optimizers need .*policy 'non-blocking' has not; use sync='allreduce'"),
        ("of the second", r"ValueError: this LoadBalance was made by also\(\)"),
        (
            "the loader of the second",
            r"ValueError: BalancedLoader\(dataset, balance\) of a LoadBalance that was made by",
        ),
    ],
)
def test_several_optimizers_say_what_they_need(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["several_optimizers_refused"][attempt])
