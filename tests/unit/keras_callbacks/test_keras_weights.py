"""What batches weigh and samples cost in Keras: what is refused, and what a wrapped loss leaves as it was."""

from __future__ import annotations

import copy
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.errors import RoundStateError
from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.step.weights import Weights
from tests.unit.keras_callbacks import small
from tests.unit.keras_callbacks.small import SEVERAL, keras

X = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [0, 0, 0]] * 2)
Y = (X % 2).astype("float32")[..., None]


def network(outputs=1, **compiled):
    words = keras.layers.Input((3,), dtype="int64")
    hidden = keras.layers.Embedding(8, 4, mask_zero=True)(words)
    heads = [keras.layers.Dense(1, name=name)(hidden) for name in "ab"[:outputs]]
    model = keras.Model(words, heads[0] if outputs == 1 else heads)
    model.compile("sgd", **({"loss": "mse"} | compiled))
    return model


def fit(model=None, *, data=(X, Y), policy="bsp", epochs=1, **resized):
    return small.fit(model or network(), policy, data=data, epochs=epochs, resized=resized)


def fails(x, y):
    raise KeyError("labels")


STREAM = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("bsp", {"weight_of": lambda x, y: tf.constant(float("nan"))}, "round 0: 4 samples of rank 0 weigh nan"),
        (SEVERAL, {"weight_of": lambda x, y: tf.constant(float("inf"))}, "round 0: 2 samples of rank 0 weigh inf"),
        ("bsp", {"weight_of": lambda x, y: -1}, "weigh -1.0, .* at least 0"),
        (SEVERAL, {"weight_of": lambda x, y: y}, "weight_of failed for .*(InvalidArgument|Value)Error.*one number"),
        (SEVERAL, {"weight_of": fails}, "weight_of failed for .*KeyError: 'labels'.*computed by TensorFlow"),
        ("bsp", {"weight_of": lambda x, y: y.numpy().sum()}, "weight_of failed for .*AttributeError"),
        ("bsp", {"weight_of": lambda x, y: 0}, "weight_of gave 0 for every batch of round 0"),
        ("bsp", {"weight_of": max}, "weight_of failed for .*no signature"),
        ("bsp", {"cost_of": lambda i: -1}, r"cost_of must be from 0 to 1e\+100, got -1.0 for index \d"),
        ("bsp", {"cost_of": lambda i: {}[i]}, r"cost_of failed for index \d, KeyError"),
        ("bsp", {"data": STREAM, "cost_of": lambda x, y: x}, "cost_of failed for .*one number"),
        ("bsp", {"data": STREAM, "cost_of": lambda x, y: float("nan")}, "cost_of.*got nan for a sample of the stream"),
    ],
)
def test_what_is_no_weight_or_no_cost_ends_the_fit_with_an_error_that_says_whose(policy, options, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        fit(policy=policy, **options)


def test_data_that_were_resized_for_another_step_are_refused_and_work_when_resized_again():
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    first = resize_batches((X, Y), balance, weight_of=lambda x, y: tf.reduce_sum(y) + 1)
    resize_batches((X, Y), balance)
    with pytest.raises(RoundStateError, match="weight_of or max_micro_batch_cost of this fit"):
        model.fit(first, callbacks=[balance], verbose=0)
    again = resize_batches((X, Y), balance, weight_of=lambda x, y: tf.reduce_sum(y) + 1)
    model.fit(again, callbacks=[balance], verbose=0)


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


@pytest.mark.parametrize("policy", ["bsp", SEVERAL], ids=["one", "several"])
def test_masks_of_several_outputs_that_are_found_to_differ_are_refused(policy):
    losses = [keras.losses.MeanSquaredError(reduction="mean_with_sample_weight") for _ in "ab"]
    weights = np.ones(X.shape), np.arange(X.size).reshape(X.shape)
    with pytest.raises(ValueError, match=r"several losses divide by different counts, because masks.*weight_of"):
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
