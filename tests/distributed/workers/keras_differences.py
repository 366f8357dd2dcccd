"""The part of ``keras_behaviour.py`` about ranks that differ."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import BATCH, FEATURES, UNEQUAL, data, network

from hvd_hetero.policies import ElasticBSP
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras


def error_of(
    model: Any, arrays: Any, *, policy: Any = "bsp", sync: str = "allreduce", callbacks: Any = (), resized: Any = None,
    **fit: Any,
) -> tuple[str, dict[str, list[float]]]:  # fmt: skip
    """What a fit says, if it fails, and its history otherwise."""
    if getattr(model, "optimizer", None) is None:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    balance = LoadBalance(policy, global_batch=BATCH, sync=sync)
    try:
        batches = resize_batches(arrays, balance, **{"shuffle": True} | (resized or {}))
        told = model.fit(batches, verbose=0, callbacks=[balance, *callbacks], **fit)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}", {}
    return "", told.history


def a_millionth_of_a_variable_is_told() -> dict:
    """Of the last variable, on one rank, once all have agreed to the bit; its name, and the error."""

    class Moved(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            if self.batches == 20 and hvd.rank() == 1:
                variable.assign(variable + 1e-6 * tf.math.abs(variable) + 1e-9)
            self.batches += 1

    model = network()
    variable = model.trainable_variables[-1]
    model.compile(keras.optimizers.Adam(0.01), "mse")
    error, _ = error_of(model, data(), callbacks=[Moved()], epochs=5)
    return {getattr(variable, "path", variable.name.removesuffix(":0")): error}


def what_is_not_finite_on_one_rank() -> dict:
    """NaN in one sample: errors, and whether weights are as before the round."""
    x, y = data()
    y[11] = np.nan
    outcome = {}
    for name, policy, width in (("one", "bsp", 6), ("several", UNEQUAL, 6), ("large", "bsp", 1024), ("rows", "bsp", 6)):
        hidden = keras.layers.Dense(width, activation="tanh")(inputs := keras.layers.Input((FEATURES,)))
        hidden = keras.layers.Dense(width, activation="tanh")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        if name == "rows":
            rows = keras.layers.Embedding(7, 1)(inputs)
            model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(rows))
        before: list[list[np.ndarray]] = []

        class Noted(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                before.append(self.model.get_weights())  # noqa: B023

        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        error, _ = error_of(model, (abs(x) % 7, y), policy=policy, callbacks=[Noted()], epochs=2)
        same = all((a == b).all() for a, b in zip(before[-1], model.get_weights(), strict=True))
        outcome[name] = {"error": error, "as before": same}
    for name, options in (("neighbours", {"sync": "d-psgd"}), ("local", {"policy": ElasticBSP(2, updates="local")})):
        error, _ = error_of(network(), (x, y), epochs=2, **options)
        outcome[name] = {"error": error, "as before": True}  # these mix, or update, before they hear of it
    return outcome


class ShufflesItself(keras.utils.Sequence):
    """Batches that it shuffles at the end of an epoch, on each rank by a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(12)
        self.rng = np.random.default_rng(hvd.rank())

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x, _ = data()
        rows = slice(4 * self.order[index], 4 * self.order[index] + 4)
        return x[rows], np.arange(48)[rows]

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


class OtherRate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and hvd.rank() == 1:
            self.model.optimizer.learning_rate = 0.05


def ranks_that_differ_are_found_out() -> dict:
    """What fits say in which rank 1 has another rate, other data, or no sample to train or to validate on."""
    x, y = data()
    rank, alone = hvd.rank(), hvd.rank() == 1
    np.random.seed(rank)
    tf.random.set_seed(None)
    samples, parts = tf.data.Dataset.from_tensor_slices((x, y)), tf.data.Dataset.range(5)
    not_here = samples.filter(lambda one, target: not alone)
    unknown = tf.data.Dataset.from_tensor_slices((x[rank::2], y[rank::2])).filter(lambda one, target: True)
    other_labels = parts.flat_map(lambda part: tf.data.Dataset.range(10).shuffle(10))
    of_samples: dict[str, Any] = {
        "interleave": parts.interleave(lambda part: samples.skip(10 * part).take(10).shuffle(10)),
        "cut": (x[rank::2], y[rank::2]),
        "sequence": ShufflesItself(),
        "augmented": samples.map(lambda one, target: (one + tf.random.normal([FEATURES]), target)),
        "augmented, other labels": other_labels.map(lambda label: (tf.random.normal([FEATURES]), label)),
        "not compared": (np.random.normal(size=x.shape), y),
    }
    fits: dict[str, dict[str, Any]] = {
        "rate": {"callbacks": [OtherRate()]},
        "data": {"resized": {"seed": rank}},
        "weight_of": {"resized": {"weight_of": (lambda x, y: tf.size(y)) if alone else None}},
        "epochs": {"epochs": 1 + alone},
        "no samples": {"arrays": not_here, "resized": {"stream": "shard"}},
        "layers": {"model": keras.Sequential([network(), keras.layers.Dense(1)]) if alone else network()},
        "no validation data": {"validation_data": None if alone else (x, y)},
        "empty validation data": {"validation_data": not_here.batch(4)},
        "validation data of unknown length": {"validation_data": unknown.batch(4), "epochs": 2},
    } | {
        f"samples: {name}": {
            "arrays": given, "epochs": 2, "resized": {"shuffle": False, "check_data": name != "not compared"}
        }
        for name, given in of_samples.items()
    }  # fmt: skip
    outcome: dict[str, Any] = {}
    for name, options in fits.items():
        given = {"model": network(), "arrays": (x, y), **options}
        outcome[name], history = error_of(given.pop("model"), given.pop("arrays"), **given)
        outcome["val_loss"] = history.get("val_loss", outcome.get("val_loss"))
    return outcome
