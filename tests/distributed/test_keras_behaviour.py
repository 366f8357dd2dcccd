"""What Keras users do in fit and around it works on all ranks, and gives what one process gives.

Horovod's ``test_tensorflow2_keras.py`` has thirteen tests; stock Horovod passes one of them on Keras 3 and twelve on
tf_keras. Their behaviours are tested here in words of our own: averaged metrics, embeddings with and without
accumulation, layers of a rank's own, the broadcast with and without such layers, and the state of elastic jobs.
Accumulated gradients (the mean; Horovod's sum without an average has no counterpart) and frozen weights are in
``test_keras_exactness.py``; schedules, and what can be refused on one rank, in the unit tests.
"""

from __future__ import annotations

import math
import re

import pytest
from keras_frameworks import KERAS_3, TF_KERAS, by_framework

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[KERAS_3, TF_KERAS])
def outcomes(request, pool):
    """What each rank answers to a case."""
    with pool("keras_behaviour.py", 2, request.param) as ranks:
        yield ranks.ask


# What is of this package far more than of Keras: which samples go where, and what the ranks tell each other.
once = pytest.mark.parametrize("outcomes", [KERAS_3], indirect=True)
on_tf_keras = pytest.mark.parametrize("outcomes", [TF_KERAS], indirect=True)


# Fits.


@once
def test_nothing_is_traced_again_after_the_first_round(outcomes):
    for rank in outcomes("nothing_is_traced_again_after_the_first_round"):
        for kind in ("one", "several"):
            assert rank[kind]["late"] == 0
            assert rank[kind]["first"] >= 1
            assert rank[kind]["rounds"] == 35
            assert rank[kind]["plans"] > 1, "the sizes did change"


@once
def test_ranks_stop_together(outcomes):
    """By a callback that all have; in the middle, where one rank stops, a round later; and at the end of an epoch."""
    for rank in outcomes("ranks_stop_together"):
        assert rank == {"alike": [2, 14, 0.0], "in the middle": [1, 4, 0.0], "at the end": [2, 14, 0.0]}


def test_checkpoints_hold_what_was_trained_and_load_without_the_package(outcomes):
    for rank in outcomes("checkpoints_hold_what_was_trained_and_load_without_the_package"):
        assert rank["optimizer"] == rank["loaded optimizer"] == "Adam"
        assert rank["difference"] == 0.0
        assert rank["moments"] > 0, "the optimizer's state was saved"
        assert rank["spread"] == 0.0
        assert rank["rounds"] == 7


def test_an_overflow_on_one_rank_makes_all_skip_the_step_and_halve_the_scale(outcomes):
    for rank in outcomes("loss_scales_skip_a_step_alike_on_all_ranks"):
        assert rank == {"scale": 512.0, "finite": True, "spread": 0.0, "rounds": 7}


@once
def test_mixed_precision_learns_and_keeps_the_ranks_together(outcomes):
    for rank in outcomes("mixed_precision"):
        assert rank["last"] < 0.8 * rank["first"]
        assert rank["spread"] == 0.0


def test_options_of_the_optimizer_and_of_fit_give_what_one_process_gives(outcomes):
    for rank in outcomes("ema_class_weights_and_an_update_of_ones_own"):
        assert rank["weights"] < 1e-4, "float32"
        assert rank["spread"] == 0.0
        assert rank["rounds"] == 14


@once
def test_local_updates_follow_a_schedule_at_each_ranks_own_pace(outcomes):
    for rank in outcomes("local_updates_follow_a_schedule"):
        slow, fast = rank["updates"]
        assert slow < fast
        assert rank["spread"] == 0.0


def test_a_stand_in_leaves_no_trace_in_running_statistics(outcomes):
    idle, busy = outcomes("running_statistics_and_seeds_stay_with_a_rank_without_data")[0]["moved"]
    assert idle == 0.0
    assert busy > 0.01


@on_tf_keras
def test_an_eager_step_trains(outcomes):
    for rank in outcomes("eager_training"):
        assert rank == {"spread": 0.0, "rounds": 7}


# On Keras 3 a device's times and memory have unit tests.
@on_tf_keras
def test_unequal_gpus_find_their_split_and_survive_a_shortage_of_memory(outcomes):
    zero, one = outcomes("unequal_gpus_find_their_split_and_survive_a_shortage_of_memory")
    assert 0.85 * 40 <= zero["limit"] <= 40, "40 samples fit on rank 0"
    assert zero["over the best"][0] > 1.4
    assert max(zero["over the best"][-10:]) <= 1.05, "on simulated clocks, which know no noise"
    for rank in (zero, one):
        assert rank["spread"] == 0.0
        assert rank["weights"] < 2e-6, "float32"
        assert rank["history"] < 2e-6, "float32"


# Figures.


@once
def test_metrics_are_those_of_all_samples_or_rank_0s_with_a_warning(outcomes):
    """Also where they are no means."""
    zero, *others = outcomes("metrics_are_those_of_all_samples")
    for rank in (zero, *others):
        for name, value in rank["whole"].items():
            assert rank["train"][name] == pytest.approx(value, rel=1e-5)
            assert rank["validation"][name] == pytest.approx(value, rel=1e-5)
        assert rank["latest"] == zero["latest"]
        (warning,) = rank["warnings"]
        assert re.search(
            r"the state of metric 'latest' is neither.*rank 0's figure\. Keep a total and a count", warning
        )


MICRO_BATCHES, IDLE = "micro-batches", "one rank idle for an epoch, then another in every round"
NAMES = {
    f"a_step_tells_trackers_under_names_of_its_own, {IDLE}": {"loss", "reconstruction_loss", "root"},
    f"a_step_tells_trackers_under_names_of_its_own, {MICRO_BATCHES}": {"loss", "reconstruction_loss", "root"},
    f"several_outputs_tell_a_loss_each, {MICRO_BATCHES}": {"loss", "a_loss", "b_loss", "a_mae", "b_mse"},
    f"a_second_compile_makes_metrics_anew, {IDLE}": {"loss", "auc", "precision"},
}


@by_framework(NAMES, [name for name in NAMES if name.startswith("several_outputs")])
def test_fit_tells_what_one_process_tells_under_whatever_names(outcomes, case):
    for rank in outcomes(case):
        told, expected = rank["keys"]
        assert told == expected
        assert NAMES[case] | {f"val_{name}" for name in NAMES[case]} <= set(told)
        assert ("elsewhere" in told) == case.startswith("a_step_tells"), "a tracker that is not in model.metrics"
        assert max(rank["history"].values()) < 2e-6, "float32"
        assert rank["alike"] == 1, "ranks agree to the last bit"
        first, last = rank["loss"]
        assert last < first


@once
def test_figures_that_cannot_be_joined_are_named_and_alike_on_all_ranks(outcomes):
    for rank in outcomes("figures_that_cannot_be_joined_are_named"):
        assert rank["alike"] == 1
        moving, mixed, hidden = rank["warnings"]
        assert re.match(r"the state of figure 'moving' is neither .* rank 0's figure", moving)
        assert re.match(r"figure 'mixed' is made of more than a metric's state.*mean of the ranks", mixed)
        assert re.match(r"figure 'hidden' is made .* or in a tf.function or branch of its own", hidden)


# Data.


@once
@pytest.mark.parametrize("data", ["once", "repeated"])
def test_data_that_end_before_steps_per_epoch_give_what_one_process_gives(outcomes, data):
    for rank in outcomes("data_that_end_before_steps_per_epoch_end_the_epoch"):
        assert rank[data]["epochs"][0] == rank[data]["epochs"][1]
        assert max(rank[data]["history"].values()) < 2e-6, "float32"
        assert rank[data]["weights"] < 2e-6, "float32"
        assert rank[data]["spread"] == 0.0
        assert rank[data]["alike"] == 1


@once
@pytest.mark.parametrize(
    ("stream", "sizes"),
    [
        ("whole", [8, 8, 8, 8, 8, 8, 2] * 3),
        ("generator, shuffled", [8, 8, 8, 8, 8, 8, 2] * 2),
        ("shards, non-blocking", None),
    ],
)
def test_a_stream_of_unknown_length_ends_on_all_ranks_together_and_each_sample_comes_once(outcomes, stream, sizes):
    first, *others = (rank[stream] for rank in outcomes("streams_of_unknown_length_end"))
    assert first["difference"] < 1e-5, "as one process on the same rounds"
    assert first["spread"] == 0.0
    assert len(set(first["visits"])) == 1, "each sample equally often"
    assert first["visits"][0] == (2 if stream == "generator, shuffled" else 3)
    assert sizes in (first["sizes"], None)
    for other in others:
        assert {**other, "difference": 0} == {**first, "difference": 0}, "ranks agree, also on the history"


@once
def test_epochs_of_a_stream_have_orders_of_their_own_and_a_validation(outcomes):
    found = outcomes("streams_of_unknown_length_end")[0]
    order = found["generator, shuffled"]["order"]
    assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
    assert order[:50] != order[50:]
    assert order[:50] != list(range(50))
    assert len(found["whole"]["loss"]) == len(found["whole"]["val_loss"]) == 3
    assert found["whole"]["val_loss"][-1] < found["whole"]["val_loss"][0]


# Ranks that differ.


@once
def test_a_millionth_of_a_variable_is_told_within_as_many_rounds_as_there_are_variables(outcomes):
    for rank in outcomes("a_millionth_of_a_variable_is_told"):
        ((name, error),) = rank.items()
        found = re.match(r"PlanMismatchError: round (\d+): ranks \[1\] .* than rank 0 \(here '(.*)', .* its", error)
        assert found, error
        assert 20 <= int(found[1]) < 24
        assert found[2] == name


@once
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update(outcomes):
    for rank in outcomes("what_is_not_finite_on_one_rank"):
        assert len(rank) == 6
        for case in rank.values():
            assert re.match(r"HeteroError: round \d: the gradient of ranks \[[01]\] is not finite", case["error"])
            assert case["as before"]


DIFFERENT = {
    "rate": r"PlanMismatchError: round 2: ranks \[1\] have other hyper-parameters.*a callback that all ranks",
    "data": r"PlanMismatchError: round 0: ranks \[1\] follow another plan or another order.*shuffle, seed, prefetch",
    "weight_of": r"PlanMismatchError: round 0: ranks \[1\] follow another plan or another order.*weight_of",
    "epochs": "HeteroError: 1 of 2 ranks left fit, and the others began another epoch.*the same number of epochs",
    "no samples": "ValueError: data must hold at least one sample .*, and epoch 0 had none on rank 1; check",
    "layers": "HeteroError: 1 ranks do not train the same variables.*build and compile the model in the same way",
    "no validation data": "HeteroError: 1 of 2 ranks have no batch to validate on",
    "empty validation data": "HeteroError: 1 of 2 ranks have no batch to validate on",
}
# The round in which samples are found to be others. A sequence shuffles itself after the first epoch.
FOUND_IN = {"interleave": 0, "cut": 0, "sequence": 6, "augmented, other labels": 0}
DIFFERENT |= {
    f"samples: {what}": rf"PlanMismatchError: round {found_in}: ranks \[1\] cut the round from other samples.*check_d"
    for what, found_in in FOUND_IN.items()
}


@once
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_in_what_and_what_to_do(outcomes, what):
    for rank in outcomes("ranks_that_differ_are_found_out"):
        assert re.match(DIFFERENT[what], rank[what]), rank[what]


@once
def test_ranks_may_augment_samples_and_validate_on_data_of_unknown_length(outcomes):
    zero, one = outcomes("ranks_that_differ_are_found_out")
    for what in ("samples: augmented", "samples: not compared", "validation data of unknown length"):
        assert zero[what] == one[what] == ""
    assert zero["val_loss"] == one["val_loss"]
    assert len(zero["val_loss"]) == 2, "epochs"


# What ranks start from.


@once
def test_what_a_loop_of_ones_own_builds_or_adds_later_is_broadcast(outcomes):
    for rank in outcomes("what_a_loop_makes_later_is_rank_0s"):
        for when in ("built later", "added between epochs", "started again"):
            assert rank[when] == 0.0


@once
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("added within one", r"ValueError: 2 of the 8 variables given were not broadcast.*between two bat"),
        ("never started", r"ValueError: 4 of the 4 variables given .*made after balance.start\(model, optimizer\)"),
        ("cannot be built", r"ValueError: model .*TypeError: .*needs a mask.*give it an Input, or call its parts on"),
    ],
)
def test_what_a_loop_cannot_broadcast_is_refused(outcomes, attempt, message):
    for rank in outcomes("what_a_loop_makes_later_is_rank_0s"):
        assert re.match(message, rank[attempt], re.DOTALL), rank[attempt]


def test_what_adapt_has_found_on_rank_0_counts_on_all_ranks_but_for_local_layers(outcomes):
    zero, one = outcomes("what_adapt_has_found_is_rank_0s")
    assert zero["differed"] > 0.1, "each rank's own"
    for rank in (zero, one):
        assert rank["predictions"] == 0.0
        assert rank["bins"][0] == rank["bins"][1]
        assert rank["local"][0] == rank["local"][1]
    for name in ("mean", "given"):
        assert zero[name][1] == zero[name][0] == one[name][1] != one[name][0]
    assert zero["rank 0's"] == pytest.approx(0.0, abs=1e-5)
    assert all(mine != theirs for mine, theirs in zip(zero["local"][0], one["local"][0], strict=True))


def test_other_words_are_refused_on_all_ranks(outcomes):
    for rank in outcomes("what_adapt_has_found_is_rank_0s"):
        assert rank["same words"] == 0.0
        assert re.match(
            r"HeteroError: layer 'words' of rank 1 has another vocabulary than rank 0's.*layer.set_vocabulary\(hvd",
            rank["other words"],
        )


# Scripts of the shape of keras.io's and of Horovod's, ported: History and weights are those of one process.


# On tf_keras a train step of its own shape, and compile with a stream of samples.
@by_framework(
    ["ddim", "distillation", "tensorflow2_keras_mnist", "tensorflow2_mnist"],
    ["distillation by train_step", "tensorflow2_keras_mnist", "tensorflow2_mnist, eagerly"],
)
def test_a_ported_script_gives_the_history_and_the_weights_of_one_process(outcomes, case):
    for result in outcomes(case):
        assert result["rounds"] == 14, "seven an epoch, the last one of two samples"
        assert result["weights"] < 1e-10
        assert result["spread"] == 0.0
        assert result["keys"][0] == result["keys"][1]
        assert max(result["history"].values()) < 1e-10, result["history"]


# What Horovod's own tests expect.


# On tf_keras in several micro-batches.
@by_framework(["embeddings, Adam", "embeddings, Adam, clipped", "embeddings, AdamW"], ["embeddings, Adam"])
def test_embeddings_are_trained_as_keras_does_in_one_process(outcomes, case):
    for outcome in outcomes(case):
        assert outcome["sparse"], "their gradients are tf.IndexedSlices"
        assert outcome["difference"] < 1e-5 * outcome["moved"]
        assert outcome["spread"] == 0.0


def test_layers_of_a_ranks_own_are_neither_broadcast_nor_synchronised(outcomes):
    answers = outcomes("own layers")
    for outcome in answers:
        start, end = outcome["start"], outcome["end"]
        assert start["shared"] == end["shared"] == 0.0
        assert start["root's"]
        assert start["untouched"]
        assert start["own"] == 1.0, "each rank has what it made"
        assert end["own"] > 0.0
        assert not end["untouched"]
    assert [outcome["without data"]["untouched"] for outcome in answers] == [False, True]


# Elastic state.


def test_an_elastic_state_is_committed_restored_and_synchronised(outcomes):
    root = {"weight": [1.0], "rate": 0.001, "scale": 1024.0, "epoch": 10, "batch": 20, "best": 0.5}
    changed = {"weight": [7.0], "rate": 0.25, "scale": 1024.0, "epoch": 11, "batch": 21, "best": 0.25}
    for number, outcome in enumerate(outcomes("elastic state"), start=1):
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


# Losses that do not divide by samples, and samples that cost unequally much. On Keras 3 most are in the pairs of
# options (test_keras_pairs.py); on tf_keras what depends on how its losses reduce, and on its own step.

BY_COST = ["cost_of, micro-batches", "cost_of a stream", "cost_of a sequence"]
LONGEST, ROUNDS = 5, 18


@by_framework(
    ["weight_of", "ignored class", "sum and mean", *BY_COST],
    ["weight_of, outputs, micro-batches", "masks, micro-batches", "masks, eagerly", "ignored class",
     "sample weights and masks", "class weights", "sum, micro-batches", "sum and mean"],
)  # fmt: skip
def test_weights_and_figures_are_those_of_one_process_whatever_a_batch_weighs(outcomes, case):
    answers = outcomes(case)
    for rank in answers:
        assert rank["rounds"] == ROUNDS
        assert rank["weights"] < 1e-10
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2, "training did change the weights"
    assert answers[0]["splits"] > 1, "of which rank 0 hears"
    # Not the loss where batches of NaN count, nor in an eager step, whose updates are not seen.
    unknown = {"loss"} if case in ["weight_of", *BY_COST, "masks, eagerly"] else set()
    history = {name: apart for name, apart in answers[0]["history"].items() if name not in unknown}
    assert all(apart < 1e-10 for apart in history.values()), history


@once
def test_micro_batches_keep_to_their_cost(outcomes):
    for limited, free in zip(outcomes("cost_of, micro-batches"), outcomes("cost_of a stream"), strict=True):
        assert limited["largest"] <= 2 * LONGEST < free["largest"]
        assert limited["batches"] > ROUNDS, "rounds had several"


ADAPTING = ["adascale", "square-root, micro-batches", "adascale of tokens, a loop"]
OF_NOISE = ["noise, micro-batches", "noise of tokens"]


@by_framework([*ADAPTING, *OF_NOISE], ["square-root, micro-batches"])
def test_a_batch_that_adapts_and_noise_scales_are_those_of_one_process(outcomes, case):
    answers = outcomes(case)
    for rank in answers:
        assert rank["weights"] < 1e-10
        assert rank["spread"] == 0.0
        assert rank["moved"] > 1e-2, "training did change the weights"
        if case in ADAPTING:  # which changes the update and nothing else
            assert len(rank["batches"]) >= 4
            assert rank["epochs of each sample once"] == rank["epochs"] == 2
            found, wanted = rank["progress"]
            assert found == pytest.approx(wanted, rel=1e-9)
            assert found != rank["rounds"]
            assert rank["rates"] == ([0.05] if "loop" in case else [0.05, 0.025]), "as users set them"
    found, wanted = answers[0]["scales"]
    assert len(found) == len(wanted) == answers[0]["rounds"]
    for scale, other in zip(found, wanted, strict=True):
        assert scale == (None if other in (None, math.inf) else pytest.approx(other, rel=1e-8))
    assert sum(scale is not None for scale in found) > 2
