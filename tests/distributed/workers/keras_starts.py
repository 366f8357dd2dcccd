"""The part of ``keras_behaviour.py`` about what ranks start from: rank 0's, whenever and wherever it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import BATCH, FEATURES, data, network, spread, trained

from keras_callbacks import LoadBalance, resize_batches, weighted_gradients

keras = tf.keras


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def one_epoch(balance: LoadBalance, batches: Any, model: Any, optimizer: Any, before: Any = None) -> None:
    for number, (x, y) in enumerate(balance.batches(batches)):
        if before is not None and number == 2:
            before()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def what_a_loop_makes_later_is_rank_0s() -> dict:
    """A model that its first batch builds; layers that are added between epochs, and in the middle of one."""
    model = keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.05)
    balance = LoadBalance("bsp", global_batch=BATCH)
    batches = resize_batches(data(), balance, shuffle=True)
    balance.start(model, optimizer)
    one_epoch(balance, batches, model, optimizer)
    outcome: dict[str, Any] = {"built later": spread(model)}

    model.add(keras.layers.Dense(1))
    one_epoch(balance, batches, model, keras.optimizers.Adam(0.05))
    outcome["added between epochs"] = spread(model)

    def add() -> None:
        model.add(keras.layers.Dense(1))

    optimizer = keras.optimizers.SGD(0.05)
    outcome["added within one"] = refusal(lambda: one_epoch(balance, batches, model, optimizer, add))
    optimizer = keras.optimizers.SGD(0.05)
    balance.start(model, optimizer)
    one_epoch(balance, batches, model, optimizer)
    outcome["started again"] = spread(model)

    class Uncallable(keras.Model):
        def call(self, inputs):
            raise TypeError("needs a mask")

    other = LoadBalance("bsp", global_batch=BATCH)
    other.start(Uncallable(), optimizer)
    outcome["cannot be built"] = refusal(lambda: next(other.batches(resize_batches(data(), other))))
    forgotten = LoadBalance("bsp", global_batch=BATCH)
    outcome["never started"] = refusal(
        lambda: one_epoch(forgotten, resize_batches(data(), forgotten), network(), optimizer)
    )
    return outcome


def what_adapt_has_found_is_rank_0s() -> dict:
    """Each rank has adapted layers on data of its own, and used the model before."""
    number = keras.layers.Lambda(lambda found: tf.cast(found, tf.float32))
    x, _ = data()
    mine = x[hvd.rank() :: hvd.size()] + hvd.rank()
    inputs = keras.layers.Input((FEATURES,))
    normal, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4)
    given = keras.layers.Normalization(mean=mine.mean(), variance=mine.var())
    normal.adapt(mine)
    bins.adapt(mine)
    hidden = keras.layers.Concatenate()([normal(inputs), given(inputs), number(bins(inputs))])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    before = model.predict(x, verbose=0)
    single = {"mean": float(np.ravel(normal.mean)[0]), "given": float(np.ravel(given.mean)[0])}
    trained(model, keras.optimizers.SGD(0.0), policy="bsp", epochs=1)
    predictions = np.stack(hvd.allgather_object(model.predict(x, verbose=0)))
    outcome: dict[str, Any] = {
        "differed": float(np.ptp(np.stack(hvd.allgather_object(before)), axis=0).max()),
        "predictions": float(np.abs(predictions - predictions[0]).max()),
        "rank 0's": float(np.abs(predictions[0] - before).max()),
        "mean": [single["mean"], float(np.ravel(normal.mean)[0])],
        "given": [single["given"], float(np.ravel(given.mean)[0])],
        "bins": hvd.allgather_object([float(b) for b in bins.bin_boundaries]),
    }

    words = np.array([["a"], ["b"], ["c"], ["d"]])

    def looked_up(found: Any) -> float:
        inputs = keras.layers.Input((1,), dtype="string")
        lookup = keras.layers.StringLookup(name="words")
        lookup.adapt(found)
        model = keras.Model(inputs, keras.layers.Dense(1)(number(lookup(inputs))))
        trained(model, "sgd", policy="bsp", epochs=1, arrays=(tf.constant(words), np.ones((4, 1), "float32")))
        kernels = np.stack(hvd.allgather_object(model.layers[-1].get_weights()[0]))
        return float(np.abs(kernels - kernels[0]).max())

    words_of = keras.layers.StringLookup(vocabulary=list("ab" if hvd.rank() else "cd"), name="own_words")
    inner = keras.Sequential([keras.layers.Input((FEATURES,)), local := keras.layers.Normalization()])
    local.adapt(mine)
    inputs, text = keras.layers.Input((FEATURES,)), keras.layers.Input((1,), dtype="string")
    hidden = keras.layers.Concatenate()([inner(inputs), number(words_of(text))])
    model = keras.Model([inputs, text], keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    own = [float(np.ravel(local.mean)[0]), words_of.get_vocabulary()]
    balance = LoadBalance("bsp", global_batch=BATCH, local_layers=[inner, words_of])
    y, text = np.ones((len(x), 1), "float32"), tf.constant([["a"]] * len(x))
    model.fit(resize_batches(((x, text), y), balance), verbose=0, callbacks=[balance])
    outcome["local"] = [own, [float(np.ravel(local.mean)[0]), words_of.get_vocabulary()]]

    outcome["same words"] = looked_up(words)
    outcome["other words"] = refusal(lambda: looked_up(words[hvd.rank() :]))
    return outcome
