"""What users of Horovod's Keras side rely on, as its own tests tell, holds here on Keras 3 and on tf_keras.

Horovod's ``test_tensorflow2_keras.py`` has thirteen tests; stock Horovod passes one of them on Keras 3 and twelve on
tf_keras. Their behaviours are tested here in words of our own: schedules and averaged metrics, embeddings with and
without accumulation, configurations, layers of a rank's own, the broadcast with and without such layers, and the
state of elastic jobs. Infinite gradients under accumulation are in ``test_keras_behaviour.py``, accumulated gradients
(the mean; Horovod's sum without an average has no counterpart) in ``test_keras_exactness.py``.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=["Keras 3", "tf_keras"])
def ranks(request, pool):
    with pool("keras_conformance.py", 2, request.param) as ranks:
        yield ranks


# What is of this package far more than of Keras.
once = pytest.mark.parametrize("ranks", ["Keras 3"], indirect=True)


@once
def test_learning_rates_warm_up_step_by_step(ranks):
    for outcome in ranks.ask("learning rates"):
        initial, steps = outcome["initial"], outcome["warm-up"]
        expected = [initial * (0.5 + 0.5 * step / 15) for step in range(15)]
        assert steps == pytest.approx(expected, rel=1e-5)


@once
def test_learning_rates_follow_a_schedule_by_epochs(ranks):
    for outcome in ranks.ask("learning rates"):
        initial, rates = outcome["initial"], outcome["rates"]
        assert rates[3:5] == pytest.approx([initial * 0.1] * 2)
        assert rates[5:7] == pytest.approx([initial * 0.01] * 2)
        assert rates[7:] == pytest.approx([initial * epoch for epoch in range(7, 10)])


@once
def test_metrics_are_the_same_on_all_ranks(ranks):
    for outcome in ranks.ask("learning rates"):
        assert outcome["loss spread"] == 0.0


@once
@pytest.mark.parametrize("name", ["Adam", "Adam, clipped", "AdamW"])
def test_embeddings_are_trained_as_keras_does_in_one_process(ranks, name):
    for outcome in ranks.ask(f"embeddings, {name}"):
        assert outcome["sparse"], "their gradients are tf.IndexedSlices"
        assert outcome["difference"] < 1e-5 * outcome["moved"]
        assert outcome["spread"] == 0.0


@pytest.mark.parametrize("ranks", ["tf_keras"], indirect=True)
def test_embeddings_are_trained_in_several_micro_batches_as_tf_keras_does_in_one_process(ranks):
    test_embeddings_are_trained_as_keras_does_in_one_process(ranks, "Adam")


@once
def test_an_optimizer_keeps_its_class_and_its_configuration(ranks):
    for outcome in ranks.ask("configuration"):
        assert outcome == {"class": "Adam", "same": True, "copy": True}


def test_layers_of_a_ranks_own_are_neither_broadcast_nor_synchronised(ranks):
    for outcome in ranks.ask("own layers"):
        start, end = outcome["start"], outcome["end"]
        assert start["shared"] == end["shared"] == 0.0
        assert start["root's"]
        assert start["untouched"]
        assert start["own"] == 1.0, "each rank has what it made"
        assert end["own"] > 0.0
        assert not end["untouched"]


def test_a_ranks_own_layers_stay_while_it_holds_no_data(ranks):
    untouched = [outcome["without data"]["untouched"] for outcome in ranks.ask("own layers")]
    assert untouched == [False] + [True] * (len(untouched) - 1)


@once
def test_frozen_weights_are_broadcast_too(ranks):
    for outcome in ranks.ask("broadcast"):
        assert outcome == {"root's": True, "spread": 0.0}


def test_an_elastic_state_is_committed_restored_and_synchronised(ranks):
    root = {"weight": [1.0], "rate": 0.001, "scale": 1024.0, "epoch": 10, "batch": 20, "best": 0.5}
    changed = {"weight": [7.0], "rate": 0.25, "scale": 1024.0, "epoch": 11, "batch": 21, "best": 0.25}
    for number, outcome in enumerate(ranks.ask("elastic state"), start=1):
        assert outcome["made"] == {
            "weight": [number],
            "rate": 0.001 * number,
            "scale": 1024.0 * number,
            "epoch": 9 + number,
            "batch": 19 + number,
            "best": number - 0.5,
        }
        assert outcome["synchronised"] == root, "all values are those of rank 0"
        assert outcome["restored"] == root, "what was not committed is gone"
        assert outcome["committed"] == changed


@once
def test_a_fit_goes_on_after_failures_as_if_there_were_none(ranks):
    require_as_without_failures(ranks.ask("elastic, commits first"), [[0, 0], [0, 4], [1, 0], [2, 0]])


def require_as_without_failures(outcomes, fits):
    for outcome in outcomes:
        assert outcome["left"] == 0, "all three failures happened"
        assert outcome["fits"] == fits, "epoch and batch of the last commit"
        assert outcome["stands"] == [3, 0]
        assert outcome["visits"] == sorted([*range(44)] * 3), "committed samples, each once an epoch"
        assert outcome["difference"] < 1e-6
        assert outcome["iterations"] == 18


@pytest.mark.parametrize("ranks", ["tf_keras"], indirect=True)
def test_a_fit_of_tf_keras_goes_on_after_failures_as_if_there_were_none(ranks):
    require_as_without_failures(ranks.ask("elastic, commits last"), [[0, 0], [0, 3], [1, 0], [1, 3]])


@once
def test_after_failures_a_sample_is_committed_once_where_nobody_knows_the_rounds_of_an_epoch(ranks):
    for outcome in ranks.ask("elastic, unknown rounds"):
        assert outcome["left"] == 0
        assert outcome["stands"] == [3, 0]
        assert outcome["visits"] == sorted([*range(44)] * 3)


@once
def test_after_failures_a_dataset_makes_up_for_the_rounds_that_are_left(ranks):
    for outcome in ranks.ask("elastic, dataset"):
        assert outcome["fits"] == [[0, 0], [0, 4], [1, 0], [1, 4]]
        assert outcome["iterations"] == 18
        assert len(outcome["visits"]) == 3 * 44, "of each shard, begun again with each LoadBalance"
