"""Training loops in the shapes of other people's scripts, with one sample more than whole rounds."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed


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
            assert rank[script]["rates"] == 3, "the warm-up takes three rounds"


def test_all_ranks_have_data_in_each_round_of_both_optimizers(ranks):
    for rank in ranks:
        assert rank["dcgan"]["rounds"] == 4
        assert rank["dcgan"]["bodies"] == [4, 4]
        assert rank["lightning"]["rounds"] == 4
        assert rank["lightning"]["seen"] == [18, 16]


@pytest.mark.parametrize(
    "step",
    [
        "a_metric_averaged", "a_metric_averaged_by_samples", "a_schedule", "a_warm_up", "weights_clamped",
        "gradients_clipped", "another_training",
    ],
)  # fmt: skip
def test_a_body_that_runs_once_a_round_on_every_rank_may_do_what_belongs_to_an_update(ranks, step):
    for rank in ranks:
        assert rank["mistakes"][step] == "nothing was refused"


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
