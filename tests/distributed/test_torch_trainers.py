"""Trainers of transformers and Lightning, with unequal batches: exact, each sample once, resumed within an epoch."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("torch_trainers.py", 2, "torch.distributed") as ranks:
        yield ranks


@pytest.mark.parametrize(("kind", "k"), [("tokens", 1), ("samples", 3), ("adapter", 2)])
def test_a_trainer_trains_as_one_process_does(ranks, kind, k):
    """Means over tokens, and those of a model that ignores their number; its logs show the loss of the whole batch."""
    for rank in ranks:
        outcome = rank[f"{kind}, k = {k}"]
        assert outcome["difference"] <= 1e-10
        assert outcome["losses"] <= 1e-6
        assert outcome["splits"] >= 3
        assert outcome["once"]
        rounds = 10 - 2 * (k > 1)  # three samples at the end are fewer than 2 k
        assert outcome["rounds"] == outcome["steps"] == outcome["planned"] == rounds
        assert outcome["evaluated"] >= 2


@pytest.mark.parametrize(
    ("case", "bound", "splits"),
    [("bound by the Trainer", 7, 3), ("bound by the Trainer, tight", 6, 2), ("bound by name", 9, 3)],
)
def test_a_trainer_keeps_to_the_batch_of_each_device_unless_more_is_allowed_by_name(ranks, case, bound, splits):
    """Where the bound is tight, a remainder that no rank could add to a round is a round of its own."""
    for rank in ranks:
        outcome = rank[case]
        assert outcome["difference"] <= 1e-10
        assert outcome["once"]
        assert max(outcome["largest"]) == bound
        assert outcome["splits"] >= splits
        assert outcome["steps"] == outcome["planned"] == outcome["rounds"] == 10


@pytest.mark.parametrize("case", ["tokens, k = 1", "samples, k = 2", "adapter, k = 2, backward"])
def test_a_trainer_that_runs_out_of_memory_does_the_batch_again_in_parts_and_trains_as_one_process_does(ranks, case):
    for rank in ranks:
        outcome = rank[f"out of memory, {case}"]
        assert outcome["difference"] <= 1e-10
        assert outcome["losses"] <= 1e-6
        assert outcome["once"]
        assert outcome["failed"] >= 1


@pytest.mark.parametrize("lengths", ["group_by_length", "cost_of"])
def test_a_trainer_divides_by_the_lengths_that_it_knows_and_trains_as_one_process_does(ranks, lengths):
    for rank in ranks:
        outcome = rank[f"costs, {lengths}"]
        assert outcome["difference"] <= 1e-10
        assert outcome["once"]
        assert outcome["splits"] >= 3, "by number, equal shares have two: that of the last round is another"


def test_a_trainer_evaluates_and_predicts_on_unequal_parts_as_one_process_does(ranks):
    for rank in ranks:
        for outcome, samples in zip(rank["evaluated"], (23, 2, 1), strict=True):
            assert outcome["figures"] == pytest.approx(outcome["expected"], rel=1e-12), "rank 0's, on all"
            assert outcome["apart"] <= 1e-12
            assert outcome["labels"], "in the dataset's order"
            assert outcome["shapes"] == [[samples, 3]] * 2, "metrics see all predictions"
            assert outcome["random state kept"]
            assert outcome["restored"]
            assert f"sample {samples - 1} is not there" in outcome["fails"], "on all ranks"
    assert len({str(rank["evaluated"][0]["figures"]) for rank in ranks}) == 1


def test_an_evaluation_stops_a_trainer_early_and_keeps_the_best_on_all_ranks(ranks):
    first, second = (rank["stopped early"] for rank in ranks)
    assert first == second
    losses = first["losses"]
    assert len(losses) < 9, "it stopped"
    assert first["best"] == 5 * (1 + losses.index(max(losses))), "of the greatest loss, as it was asked to"


def test_lightning_validates_on_unequal_parts_stops_early_and_keeps_the_best(ranks):
    for rank in ranks:
        outcome = rank["lightning validates"]
        assert outcome["apart"] <= 1e-5, "Lightning sums in float32"
        assert len(outcome["figures"]) >= 4
        for parts in zip(*outcome["parts"], strict=True):
            validated = [i for part in parts for i in part]
            assert sorted(validated) == list(range(17)) * bool(validated), "each sample once"
    assert ranks[0]["lightning validates"]["figures"] == ranks[1]["lightning validates"]["figures"]
    assert ranks[0]["lightning validates"]["best"] == ranks[1]["lightning validates"]["best"] != ""


def test_a_trainer_goes_on_in_the_middle_of_an_epoch(ranks):
    per_epoch = 4
    for rank in ranks:
        outcome = rank["resumed"]
        assert outcome["apart"] <= 1e-10
        assert outcome["once"]
        assert outcome["rounds"] == [6, 3 * per_epoch - 6]
        assert outcome["epochs"] == pytest.approx([3 - 1 / per_epoch, 3])


@pytest.mark.parametrize("case", ["stream, whole", "stream, shard", "lightning, stream"])
def test_trainers_take_streams_of_unknown_length_and_go_on_in_the_middle_of_one(ranks, case):
    """Epochs of a stream end with it, whatever the trainer counts, and a resumed one may have other processes."""
    for rank in ranks:
        outcome = rank[case]
        assert outcome["difference"] <= 1e-10
        assert outcome["resumed: difference"] <= 1e-10
        assert outcome["once"] == [True, True]
        assert outcome.get("steps", [8, 8]) == [8, 8]


def test_a_trainer_s_options_hold(ranks):
    for rank in ranks:
        assert rank["options"] == {"steps": 4, "rounds_ahead": 2}


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("tokens of a rank", "ValueError: average_tokens_across_devices must be True"),
        ("too small", r"ValueError: global_batch=12 .*rank 0: 5, rank 1: 5\).*global_batch=10 .*gradient_accumulation"),
        ("too small, in parts", r"ValueError: global_batch=12 .*in 3 micro-batch.*global_batch=6 "),
        ("lightning, too small", r"ValueError: global_batch=12 .*rank 0: 3, rank 1: 4\).*global_batch=7 "),
        ("lightning, too small, in parts", r"ValueError: global_batch=12 .*global_batch=6 .*micro_batches=6"),
        ("a batch that adapts", "ValueError: global_batch=Goodput.*steps of an epoch"),
        ("lightning and a batch that adapts", "ValueError: global_batch=Goodput.*steps of an epoch"),
        ("a size that is found", "ValueError: auto_find_batch_size"),
        ("lightning divides otherwise", "ValueError: accumulate_grad_batches.*micro_batches=3"),
        ("lightning and a stream", "ValueError: .*no __len__.*rounds_per_epoch"),
        ("a checkpoint of another trainer", "ValueError: .*stream.pt is missing.*ignore_data_skip=True"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["refused"][attempt])


def test_lightning_trains_as_one_process_does_and_goes_on(ranks):
    for rank in ranks:
        outcome = rank["lightning"]
        assert outcome["difference"] <= 1e-10
        assert outcome["splits"] >= 3
        assert [size <= bound for size, bound in zip(outcome["largest"], [4, 3], strict=True)] == [True, True]
        assert outcome["once"]
        assert outcome["logs its own loss"]
        assert outcome["resumed: apart"] <= 1e-10
        assert outcome["resumed: once"]
