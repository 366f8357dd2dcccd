"""What Keras users do in fit and around it works on all ranks, and what cannot work is refused with the way out."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=["Keras 3", "tf_keras"])
def outcomes(request, pool):
    """What each rank answers to a case."""
    with pool("keras_behaviour.py", 2, request.param) as ranks:
        yield ranks.ask


# What is of this package far more than of Keras: which samples go where, and what the ranks tell each other.
once = pytest.mark.parametrize("outcomes", ["Keras 3"], indirect=True)


def test_nothing_is_traced_again_after_the_first_round(outcomes):
    for rank in outcomes("nothing_is_traced_again_after_the_first_round"):
        for kind in ("one", "several"):
            assert rank[kind]["late"] == 0
            assert rank[kind]["first"] >= 1
            assert rank[kind]["rounds"] == 35
            assert rank[kind]["plans"] > 1, "the sizes did change"


@once
def test_metrics_are_those_of_all_samples_also_where_they_are_no_means(outcomes):
    for rank in outcomes("metrics_are_those_of_all_samples"):
        for name, value in rank["whole"].items():
            assert rank["train"][name] == pytest.approx(value, rel=1e-5)
            assert rank["validation"][name] == pytest.approx(value, rel=1e-5)


@once
def test_a_metric_that_cannot_be_joined_is_rank_0s_and_a_warning_says_so_once(outcomes):
    zero, *others = outcomes("metrics_are_those_of_all_samples")
    for rank in (zero, *others):
        assert rank["latest"] == zero["latest"]
        (warning,) = rank["warnings"]
        assert re.search(r"metric 'latest' keeps something.*rank 0's alone\. Keep a total and a count", warning)


MICRO_BATCHES, IDLE = "micro-batches", "one rank idle for an epoch, then another in every round"


@pytest.mark.parametrize(
    ("case", "names", "policy"),
    [
        ("a_step_tells_trackers_under_names_of_its_own", {"loss", "reconstruction_loss", "root"}, MICRO_BATCHES),
        ("a_step_tells_trackers_under_names_of_its_own", {"loss", "reconstruction_loss", "root"}, IDLE),
        ("several_outputs_tell_a_loss_each", {"loss", "a_loss", "b_loss", "a_mae", "b_mse"}, MICRO_BATCHES),
        ("a_second_compile_makes_metrics_anew", {"loss", "auc", "precision"}, IDLE),
    ],
)
def test_fit_tells_what_one_process_tells_under_whatever_names(outcomes, case, names, policy):
    for rank in outcomes(case):
        told, expected = rank[policy]["keys"]
        assert told == expected
        assert names | {f"val_{name}" for name in names} <= set(told)
        assert ("elsewhere" in told) == case.startswith("a_step_tells"), "a tracker that is not in model.metrics"
        assert max(rank[policy]["apart"].values()) < 2e-6, "float32"
        assert rank[policy]["alike"] == 1, "ranks agree to the last bit"
        first, last = rank[policy]["loss"]
        assert last < first


@once
def test_figures_that_cannot_be_joined_are_named_and_alike_on_all_ranks(outcomes):
    for rank in outcomes("figures_that_cannot_be_joined_are_named"):
        assert rank["alike"] == 1
        moving, mixed, hidden = rank["warnings"]
        assert re.match(r"what is told as 'moving' keeps something that is neither .* rank 0's alone", moving)
        assert re.match(r"the step makes 'mixed' of a metric and of something else.*mean of the ranks", mixed)
        assert re.match(r"the step makes 'hidden' .* or in a tf.function or branch of its own", hidden)


@pytest.mark.parametrize("data", ["once", "repeated"])
def test_data_that_end_before_steps_per_epoch_give_what_one_process_gives(outcomes, data):
    for rank in outcomes("data_that_end_before_steps_per_epoch_end_the_epoch"):
        assert rank[data]["epochs"][0] == rank[data]["epochs"][1]
        assert rank[data]["history"] < 2e-6, "float32"
        assert rank[data]["weights"] < 2e-6, "float32"
        assert rank[data]["spread"] == 0.0
        assert rank[data]["alike"] == 1


@once
def test_early_stopping_stops_all_ranks_together(outcomes):
    for rank in outcomes("early_stopping_stops_all_ranks_together"):
        assert rank == {"epochs": 2, "rounds": 14}


@once
def test_a_rank_that_stops_in_the_middle_takes_the_others_with_it_one_round_later(outcomes):
    for rank in outcomes("a_rank_that_stops_in_the_middle_takes_the_others_with_it"):
        assert rank == {"epochs": 1, "rounds": 4, "spread": 0.0}


@once
def test_a_rank_that_stops_at_the_end_of_an_epoch_takes_the_others_with_it(outcomes):
    for rank in outcomes("a_rank_that_stops_at_the_end_of_an_epoch_takes_the_others_with_it"):
        assert rank == {"epochs": 2, "rounds": 14, "spread": 0.0}


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
        assert rank["difference"] < 1e-4, "float32"
        assert rank["spread"] == 0.0
        assert rank["rounds"] == 14


def test_local_updates_follow_a_schedule_at_each_ranks_own_pace(outcomes):
    for rank in outcomes("local_updates_follow_a_schedule"):
        slow, fast = rank["updates"]
        assert slow < fast
        assert rank["spread"] == 0.0


def test_a_stand_in_leaves_no_trace_in_running_statistics(outcomes):
    idle, busy = outcomes("running_statistics_and_seeds_stay_with_a_rank_without_data")[0]["moved"]
    assert idle == 0.0
    assert busy > 0.01


@once
def test_an_epoch_to_start_with_takes_the_samples_of_that_epoch(outcomes):
    for rank in outcomes("an_epoch_to_start_with_is_that_epoch"):
        assert rank["difference"] < 1e-6


@once
def test_a_dataset_of_samples_is_shared_out_among_the_ranks(outcomes):
    outcome = outcomes("a_dataset_of_samples_is_shared_out")[0]
    assert (outcome["steps"], outcome["rounds"]) == (5, 10)
    assert sorted(i for rank in outcome["seen"] for i in rank) == sorted([*range(50), *range(50)])
    assert len(outcome["seen"][0]) > 2 * len(outcome["seen"][1])


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
    if sizes is not None:
        assert first["sizes"] == sizes
    for other in others:
        assert {**other, "difference": 0} == {**first, "difference": 0}, "ranks agree, also on the history"


@once
def test_each_epoch_of_a_stream_that_is_shuffled_has_an_order_of_its_own(outcomes):
    order = outcomes("streams_of_unknown_length_end")[0]["generator, shuffled"]["order"]
    assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
    assert order[:50] != order[50:]
    assert order[:50] != list(range(50))


@once
def test_validation_and_history_of_a_stream_are_those_of_all_samples(outcomes):
    whole = outcomes("streams_of_unknown_length_end")[0]["whole"]
    assert len(whole["loss"]) == len(whole["val_loss"]) == 3
    assert whole["val_loss"][-1] < whole["val_loss"][0]


@once
def test_a_tfrecord_pipeline_gives_the_history_and_the_weights_of_one_process(outcomes):
    for result in outcomes("a_tfrecord_pipeline_gives_what_one_process_gives"):
        assert result["rounds"] == 9, "the last of an epoch has two samples"
        assert result["weights"] < 1e-12
        assert result["history"] < 1e-12
        assert result["keys"][0] == result["keys"][1] == ["accuracy", "loss"]
        assert result["spread"] == 0.0
        assert result["learns"]


# On Keras 3 a loop is compared with one process in test_keras_ports.py.
@pytest.mark.parametrize("outcomes", ["tf_keras"], indirect=True)
def test_a_loop_of_ones_own_trains_as_fit_does(outcomes):
    for rank in outcomes("a_loop_of_ones_own"):
        assert rank["compiled"] < 1e-5
        assert rank["eager"] < 1e-5
        assert rank["spread"] == 0.0


def test_eager_training_works(outcomes):
    for rank in outcomes("eager_training"):
        assert rank == {"spread": 0.0, "rounds": 7}


@once
def test_a_millionth_of_a_variable_is_told_within_as_many_rounds_as_there_are_variables(outcomes):
    for rank in outcomes("a_millionth_of_a_variable_is_told"):
        assert len(rank) == 2
        for name, error in rank.items():
            found = re.match(r"PlanMismatchError: round (\d+): ranks \[1\] .* than rank 0 \(here '(.*)', .* its", error)
            assert found, error
            assert 20 <= int(found[1]) < 24
            assert found[2] == name


@once
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update(outcomes):
    for rank in outcomes("what_is_not_finite_on_one_rank"):
        assert len(rank) == 4
        for case in rank.values():
            assert re.match(r"HeteroError: round \d: the gradient of ranks \[[01]\] is not finite", case["error"])
            assert case["as before"]


def test_fit_without_the_callback_is_refused_until_it_is_released(outcomes):
    ranks = outcomes("two_trainings_one_after_the_other_and_one_without")
    for rank in ranks:
        assert re.match(r"RoundStateError: .*write callbacks=\[balance\], or call balance.release\(\)", rank["refusal"])
        assert rank["spread"] == 0.0
    assert ranks[0]["loss"] == ranks[1]["loss"]


@once
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "rate",
            r"PlanMismatchError: round 2: ranks \[1\] have other hyper-parameters.*a callback that all ranks",
        ),
        (
            "data",
            r"PlanMismatchError: round 0: ranks \[1\] follow another plan or another order.*shuffle, seed, prefetch",
        ),
        ("weight_of", r"PlanMismatchError: round 0: ranks \[1\] follow another plan or another order.*weight_of"),
        ("weights", r"PlanMismatchError: round 2: ranks \[1\] hold other parameters.*must do so on every rank alike"),
        ("epochs", "HeteroError: 1 of 2 ranks left fit, and the others began another epoch.*the same number of epochs"),
        ("no file", "ValueError: data must hold at least one sample on every rank, and epoch 0 had none on rank 1;"),
        ("all filtered", "ValueError: data must hold at least one sample .*, and epoch 0 had none on rank 1; check"),
        ("layers", "HeteroError: 1 ranks do not train the same variables.*build and compile the model alike on every"),
    ],
)
def test_ranks_that_differ_are_told_in_what_and_what_to_do(outcomes, what, message):
    for rank in outcomes("ranks_with_other_rates_or_data_are_found_out"):
        assert re.match(message, rank[what]), rank[what]


@once
@pytest.mark.parametrize(
    ("samples", "found_in"),
    [
        ("interleave", 0),
        ("cut", 0),
        ("sequence", 6),  # it shuffles itself after the first epoch
        ("augmented, other labels", 0),
        ("augmented", None),
        ("not compared", None),
    ],
)
def test_ranks_that_hold_other_samples_are_told_so_in_the_round_that_has_them(outcomes, samples, found_in):
    for rank in outcomes("ranks_with_other_samples_are_found_out"):
        if found_in is None:
            assert rank[samples] == ""
        else:
            message = (
                rf"PlanMismatchError: round {found_in}: ranks \[1\] cut the round from other samples.*check_data=F"
            )
            assert re.match(message, rank[samples]), rank[samples]


@once  # arrays without a row, which tf_keras refuses by itself, among them
@pytest.mark.parametrize("which", ["none", "one sample", "empty", "all, of unknown length"])
def test_a_rank_without_a_batch_to_validate_on_ends_the_job_with_the_reason(outcomes, which):
    for rank in outcomes("ranks_without_validation_batches_are_told_so"):
        if which.startswith("all"):
            assert rank[which] == ""
        else:
            assert re.match(r"HeteroError: 1 of 2 ranks have no batch to validate on", rank[which]), rank[which]


@once
def test_validation_data_of_unknown_length_give_the_figures_of_all_ranks(outcomes):
    (first,), (second,) = (rank["val_loss"] for rank in outcomes("ranks_without_validation_batches_are_told_so"))
    assert first == second
    assert len(first) == 2, "epochs"


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("forgotten resize_batches", r"ValueError: fit was given data that .*model.fit\(resize_batches\(\(x, y\), bal"),
        (
            "batches from elsewhere",
            r"RoundStateError: the batches of this fit do not come from resize_batches: pass",
        ),
        ("XLA", "ValueError: jit_compile=True compiles .*compile with jit_compile=False"),
        ("steps_per_execution", "ValueError: steps_per_execution is 2.*compile with steps_per_execution=1"),
        (
            "horovod's own optimizer",
            "ValueError: the optimizer is Horovod's .*compile the model with the plain optimizer",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_the_way_out(outcomes, attempt, message):
    for rank in outcomes("what_cannot_be_fitted"):
        assert re.match(message, rank[attempt])


@once
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("small batch", "ValueError: global_batch must be at least the number of ranks"),
        ("policy", "ValueError: policy 'lbbsp' is not known; did you mean 'lb-bsp'"),
        ("local layers", "ValueError: local_layers go with averaged gradients only"),
        ("lists", "TypeError: data must be arrays or tensors.*np.asarray"),
        ("lengths", r"ValueError: all arrays of data must hold equally many samples, got \[49, 50\]"),
        ("balance", r"TypeError: balance must be a LoadBalance, got 32; write resize_batches"),
        ("prefetch", "ValueError: prefetch must be at least 0, got -1; give a whole number of batches"),
        ("shuffled batches", r"ValueError: .shuffle\(\) follows resize_batches.*shuffle=True"),
        ("batched again", r"ValueError: .batch\(\) follows resize_batches, whose batches the plan forms"),
        ("warm-up", "ValueError: warmup_epochs must be 1 or more, got 0"),
        ("schedule", "ValueError: epochs must be 0 <= start_epoch < end_epoch, got 3 and 3"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(outcomes, attempt, message):
    for rank in outcomes("what_cannot_work"):
        assert re.match(message, rank[attempt])


# On Keras 3 a device's times and memory have unit tests.
@pytest.mark.parametrize("outcomes", ["tf_keras"], indirect=True)
def test_unequal_gpus_find_their_split_and_survive_a_shortage_of_memory(outcomes):
    zero, one = outcomes("unequal_gpus_find_their_split_and_survive_a_shortage_of_memory")
    assert 0.85 * 40 <= zero["limit"] <= 40, "40 samples fit on rank 0"
    assert zero["over the best"][0] > 1.4
    assert max(zero["over the best"][-10:]) <= 1.05, "on simulated clocks, which know no noise"
    for rank in (zero, one):
        assert rank["spread"] == 0.0
        assert rank["weights"] < 2e-6, "float32"
        assert rank["history"] < 2e-6, "float32"
