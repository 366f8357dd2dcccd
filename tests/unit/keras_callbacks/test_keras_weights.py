"""What batches weigh and samples cost in Keras: what is refused, and what a wrapped loss leaves as it was."""

from __future__ import annotations

import copy
import logging
import re

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP, ElasticBSP, NonBlocking  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches  # noqa: E402
from keras_callbacks.step.weights import Weights  # noqa: E402

keras = tf.keras
X = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [0, 0, 0]] * 2)
Y = (X % 2).astype("float32")[..., None]


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def network(outputs=1, **compiled):
    words = keras.layers.Input((3,), dtype="int64")
    hidden = keras.layers.Embedding(8, 4, mask_zero=True)(words)
    heads = [keras.layers.Dense(1, name=name)(hidden) for name in "ab"[:outputs]]
    model = keras.Model(words, heads[0] if outputs == 1 else heads)
    model.compile("sgd", **({"loss": "mse"} | compiled))
    return model


def fit(model=None, *, data=(X, Y), policy="bsp", epochs=1, **resized):
    balance = LoadBalance(policy, global_batch=4)
    model = network() if model is None else model
    history = model.fit(resize_batches(data, balance, **resized), epochs=epochs, callbacks=[balance], verbose=0)
    return history.history, balance


def infinite(x, y):
    return tf.constant(float("inf"))


def fails(x, y):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("weight_of", "message"),
    [
        (lambda x, y: tf.constant(float("nan")), "round 0: 4 samples of rank 0 weigh nan, and a weight must be finite"),
        (lambda x, y: -1, "round 0: 4 samples of rank 0 weigh -1.0, .* at least 0"),
        (infinite, "weigh inf"),
        (lambda x, y: y, r"weight_of failed for .*InvalidArgumentError|weight_of failed for .*ValueError.*one number"),
        (fails, "weight_of failed for .*KeyError: 'labels'.*computed by TensorFlow"),
        (lambda x, y: y.numpy().sum(), "weight_of failed for .*AttributeError"),
        (lambda x, y: 0, "weight_of gave 0 for every batch of round 0"),
        (max, "weight_of failed for .*no signature"),
    ],
    ids=["NaN", "negative", "infinite", "one for each", "raises", "not in the graph", "nothing at all", "no signature"],
)
@pytest.mark.parametrize("policy", ["bsp", "several"])
def test_a_weight_that_is_none_ends_the_fit_with_an_error_that_says_whose(weight_of, message, policy):
    with pytest.raises(ValueError, match=re.compile(message.replace("4 samples", "[24] samples"), re.DOTALL)):
        fit(weight_of=weight_of, policy=BSP(max_micro_batch=2) if policy == "several" else policy)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight_of": 3}, TypeError, "weight_of must be a function of a batch, got 3"),
        ({"max_micro_batch_cost": 8}, ValueError, "max_micro_batch_cost needs cost_of"),
        ({"cost_of": [1, 2]}, ValueError, r"cost_of must hold one number for each of the 8 samples, got shape \(2,\)"),
        (
            {"cost_of": [*range(7), np.nan]},
            ValueError,
            r"cost_of\[7\] must be from 0 to 1e\+100, got nan",
        ),
        ({"cost_of": lambda i: -1}, ValueError, r"cost_of must be from 0 to 1e\+100, got -1.0 for index \d"),
        ({"cost_of": lambda i: 1e308}, ValueError, r"cost_of must be from 0 to 1e\+100, got 1e\+308 for index \d"),
        ({"cost_of": lambda i: {}[i]}, ValueError, r"cost_of failed for index \d, KeyError"),
        ({"cost_of": np.arange(8), "max_micro_batch_cost": 5}, ValueError, "got 5, and index 7 costs 7"),
    ],
    ids=["no function", "no costs", "too few", "NaN", "negative", "too large", "raises", "above the limit"],
)
def test_what_says_no_weight_or_cost_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        fit(**options)


@pytest.mark.parametrize(
    ("cost_of", "message"),
    [
        ([1, 2], "cost_of must be a function of a sample for a stream"),
        (lambda x, y: x, "cost_of failed for .*one number"),
        (lambda x, y: float("nan"), r"cost_of must be from 0 to 1e\+100, got nan for a sample of the stream"),
    ],
    ids=["an array", "one for each word", "NaN"],
)
def test_what_says_no_cost_of_a_stream_is_refused(cost_of, message):
    with pytest.raises((TypeError, ValueError), match=re.compile(message, re.DOTALL)):
        fit(data=tf.data.Dataset.from_tensor_slices((X, Y)), cost_of=cost_of)


@pytest.mark.parametrize(
    "policy", [NonBlocking(2, scaling="n/N"), ElasticBSP(2, updates="local")], ids=["twice", "local updates"]
)
def test_rounds_that_do_more_than_weigh_refuse_weight_of(policy):
    balance = LoadBalance(policy, global_batch=4)
    with pytest.raises(ValueError, match="weight_of does not go with policy"):
        resize_batches((X, Y), balance, weight_of=lambda x, y: 1)


def test_data_that_were_resized_for_another_step_are_refused_and_work_when_resized_again():
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    first = resize_batches((X, Y), balance, weight_of=lambda x, y: tf.reduce_sum(y) + 1)
    resize_batches((X, Y), balance)
    with pytest.raises(RoundStateError, match="another weight_of or max_micro_batch_cost"):
        model.fit(first, callbacks=[balance], verbose=0)
    again = resize_batches((X, Y), balance, weight_of=lambda x, y: tf.reduce_sum(y) + 1)
    model.fit(again, callbacks=[balance], verbose=0)


def test_a_loop_of_ones_own_refuses_micro_batches():
    balance = LoadBalance("bsp", global_batch=4)
    data = resize_batches((X, Y), balance, cost_of=np.arange(8), max_micro_batch_cost=8)
    with pytest.raises(ValueError, match=r"max_micro_batch_cost is for model\.fit"):
        next(balance.batches(data))


def test_weights_of_a_loop_are_checked_as_well():
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    balance.start(model, model.optimizer)
    data = resize_batches((X, Y), balance, weight_of=lambda x, y: float("nan"))
    with pytest.raises(ValueError, match="round 0: 4 samples of rank 0 weigh nan"):
        next(balance.batches(data))


@pytest.mark.parametrize("loss", ["mse", keras.losses.MeanSquaredError(reduction="sum")], ids=["mean", "sum"])
def test_losses_are_as_keras_has_them_in_evaluation_and_after_release(loss):
    model = network(loss=loss)
    before = model.evaluate(X, Y, batch_size=4, verbose=0)
    weights = model.get_weights()
    _, balance = fit(model)
    model.set_weights(weights)
    assert model.evaluate(X, Y, batch_size=4, verbose=0) == pytest.approx(before, rel=1e-6)
    balance.release()
    model.set_weights(weights)
    alone = network(loss=loss)
    alone.set_weights(weights)
    for each in (model, alone):
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("policy", ["bsp", BSP(max_micro_batch=2)], ids=["one", "several"])
def test_masks_of_several_outputs_that_are_found_to_differ_are_refused(policy):
    losses = [keras.losses.MeanSquaredError(reduction="mean_with_sample_weight") for _ in "ab"]
    weights = np.ones(X.shape), np.arange(X.size).reshape(X.shape)
    with pytest.raises(ValueError, match=r"several losses divide by different counts, since masks.*weight_of"):
        fit(network(2, loss=losses), data=(X, (Y, Y), weights), policy=policy)


class OwnCall(keras.losses.MeanSquaredError):
    def __call__(self, *arguments, **named):
        return super().__call__(*arguments, **named)


@pytest.mark.parametrize("weight_of", [None, lambda x, y: tf.math.count_nonzero(x)], ids=["unknown", "weight_of"])
def test_a_loss_that_overrides_call_is_warned_of_once_unless_weight_of_speaks_for_it(caplog, weight_of):
    model = network(2, loss=[OwnCall(), OwnCall()])
    with caplog.at_level(logging.WARNING):
        fit(model, data=(X, (Y, Y)), epochs=2, weight_of=weight_of)
    warnings = [record.message for record in caplog.records if "loss OwnCall overrides __call__" in record.message]
    assert len(warnings) == (weight_of is None)


@pytest.mark.parametrize("data", [(X, Y), (X, Y, np.ones(X.shape))], ids=["without weights", "with weights"])
def test_weight_of_gets_sample_weights_by_an_optional_parameter_if_there_are_any(data):
    seen = []

    def weight_of(x, y, weights=None, *, scale=2.0):
        seen.append((weights is not None, scale))
        return tf.reduce_sum(tf.abs(y)) + 1

    fit(data=data, weight_of=weight_of)
    assert set(seen) == {(len(data) == 3, 2.0)}


def test_a_wrapped_loss_can_be_copied():
    loss = Weights().of_loss(keras.losses.MeanSquaredError(reduction="sum"))
    assert float(copy.copy(loss)(Y, Y + 1)) == pytest.approx(float(loss(Y, Y + 1))) == pytest.approx(Y.size)


def test_costs_do_not_change_which_samples_are_visited():
    seen = []

    class Seen(keras.layers.Layer):
        def call(self, words, training=None):
            if training:
                tf.numpy_function(lambda batch: seen.append(sorted(map(tuple, batch.tolist()))), [words], [])
            return words

    words = keras.layers.Input((3,), dtype="int64")
    model = keras.Model(words, keras.layers.Dense(1)(keras.layers.Embedding(8, 4)(Seen()(words))))
    model.compile("sgd", "mse")
    fit(model, cost_of=(X > 0).sum(1), max_micro_batch_cost=6)
    assert len(seen) > 2, "rounds of several micro-batches"
    assert sorted(each for batch in seen for each in batch) == sorted(map(tuple, X.tolist()))
