"""The part of ``keras_behaviour.py`` about what is refused, and about ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import BATCH, FEATURES, UNEQUAL, data, network, spread, trained

from keras_callbacks import LearningRateSchedule, LearningRateWarmup, LoadBalance, resize_batches

keras = tf.keras


def two_trainings_one_after_the_other_and_one_without() -> dict:
    model = network()
    _, balance = trained(model, "sgd", epochs=1)
    try:
        model.fit(*data(), verbose=0)
        refusal = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        refusal = f"{type(error).__name__}: {error}"
    balance.release()
    if hvd.rank() == 0:
        model.fit(*data(), verbose=0)  # on this rank alone
    history, _ = trained(model, model.optimizer, epochs=1)
    return {"refusal": refusal, "spread": spread(model), "loss": history["loss"][0]}


def ranks_with_other_rates_or_data_are_found_out() -> dict:
    outcome = {}
    for what in ("rate", "data", "weight_of", "weights", "epochs", "layers"):
        alone = hvd.rank() == 1
        model = network()
        if what == "layers" and alone:
            model = keras.Sequential([model, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        weight_of = (lambda x, y: tf.size(y)) if what == "weight_of" and alone else None
        seed = hvd.rank() if what == "data" else 0
        batches = resize_batches(data(), balance, shuffle=True, seed=seed, weight_of=weight_of)

        class Other(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2 and alone and what == "rate":  # noqa: B023
                    self.model.optimizer.learning_rate = 0.05
                if batch == 2 and alone and what == "weights":  # noqa: B023
                    self.model.set_weights([w + 1.0 for w in self.model.get_weights()])

        try:
            epochs = 1 + (what == "epochs" and alone)
            model.fit(batches, epochs=epochs, verbose=0, callbacks=[balance, Other()])
            outcome[what] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            outcome[what] = f"{type(error).__name__}: {error}"
    return outcome | {name: _without_samples(known) for name, known in (("no file", True), ("all filtered", False))}


def a_millionth_of_a_variable_is_told() -> dict:
    """Of the first variable and the last, on one rank, once all have agreed to the bit; its name, and the error."""
    outcome = {}
    for number in (0, 3):
        model = network()

        class Moved(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if balance.rounds == 20 and hvd.rank() == 1:  # noqa: B023
                    variable = self.model.trainable_variables[number]  # noqa: B023
                    variable.assign(variable + 1e-6 * tf.math.abs(variable) + 1e-9)

        model.compile(keras.optimizers.Adam(0.01), "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        variable = model.trainable_variables[number]
        name = getattr(variable, "path", variable.name.removesuffix(":0"))
        error = _error_of(model, balance, data(), Moved(), epochs=5)
        outcome[name] = error
    return outcome


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
        error = _error_of(model, LoadBalance(policy, global_batch=BATCH), (abs(x) % 7, y), Noted(), epochs=2)
        same = all((a == b).all() for a, b in zip(before[-1], model.get_weights(), strict=True))
        outcome[name] = {"error": error, "as before": same}
    return outcome


def _error_of(model: Any, balance: LoadBalance, arrays: Any, *callbacks: Any, epochs: int) -> str:
    try:
        batches = resize_batches(arrays, balance, shuffle=True, seed=0)
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[balance, *callbacks])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def _without_samples(known: bool) -> str:
    """What a fit says whose shard on rank 1 has no sample, as is known beforehand, or not."""
    model = network()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    balance = LoadBalance("bsp", global_batch=BATCH)
    samples, alone = tf.data.Dataset.from_tensor_slices(data()), hvd.rank() == 1
    mine = samples.take(0 if alone else -1) if known else samples.filter(lambda x, y: not alone)
    try:
        model.fit(resize_batches(mine, balance, stream="shard"), verbose=0, callbacks=[balance])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}"
    return ""


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


def ranks_with_other_samples_are_found_out() -> dict:
    """What a fit of two epochs says, and after how many rounds of six or seven."""
    x, y = data()
    rank = hvd.rank()
    np.random.seed(rank)
    tf.random.set_seed(None)
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    parts = tf.data.Dataset.range(5)
    given: dict[str, Any] = {
        "interleave": parts.interleave(lambda part: samples.skip(10 * part).take(10).shuffle(10)),
        "cut": (x[rank::2], y[rank::2]),
        "sequence": ShufflesItself(),
        "augmented": samples.map(lambda one, target: (one + tf.random.normal([FEATURES]), target)),
        "augmented, other labels": parts.flat_map(lambda part: tf.data.Dataset.range(10).shuffle(10)).map(
            lambda label: (tf.random.normal([FEATURES]), label)
        ),
        "not compared": (np.random.normal(size=x.shape), y),
    }
    outcome = {}
    for name, of_rank in given.items():
        model = network()
        model.compile("sgd", "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        batches = resize_batches(of_rank, balance, **({"check_data": False} if name == "not compared" else {}))
        outcome[name] = _said(lambda: model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[balance]))  # noqa: B023
    return outcome


def ranks_without_validation_batches_are_told_so() -> dict:
    x, y = data()
    rank = hvd.rank()
    told: list[dict[str, list[float]]] = []
    empty = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda one, target: rank == 0).batch(4)
    outcome = {}
    for name, validation in {
        "none": (x, y) if rank == 0 else None,
        "one sample": (x[:1][rank::2], y[:1][rank::2]),
        "empty": empty,
        "all, of unknown length": tf.data.Dataset.from_tensor_slices((x[rank::2], y[rank::2]))
        .filter(lambda one, target: True)
        .batch(4),
    }.items():
        model = network()
        model.compile("sgd", "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        batches = resize_batches((x, y), balance)
        fit = {"validation_data": validation, "epochs": 2, "verbose": 0, "shuffle": False}
        outcome[name] = _said(lambda: told.append(model.fit(batches, callbacks=[balance], **fit).history))  # noqa: B023
    return outcome | {"val_loss": [history.get("val_loss") for history in told]}


def _said(fit: Callable[[], Any]) -> str:
    try:
        fit()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def what_cannot_be_fitted() -> dict:
    """Attempt and refusal, before the first round."""
    x, y = data()

    def fit(data: Any = None, **compiled: Any) -> None:
        model = network()
        model.compile(**({"optimizer": "sgd", "loss": "mse"} | compiled))
        balance = LoadBalance(global_batch=BATCH)
        batches = resize_batches((x, y), balance)
        model.fit(batches if data is None else data, verbose=0, callbacks=[balance])

    def forgotten() -> None:
        model = network()
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0, callbacks=[LoadBalance(global_batch=BATCH)])

    def horovods_own() -> None:
        import horovod.tensorflow.keras as horovod

        fit(optimizer=horovod.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    return _refusals(
        {
            "forgotten resize_batches": forgotten,
            "batches from elsewhere": lambda: fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4)),
            "XLA": lambda: fit(jit_compile=True),
            "steps_per_execution": lambda: fit(steps_per_execution=2),
            "horovod's own optimizer": horovods_own,
        }
    )


def what_cannot_work() -> dict:
    x, y = data()
    balance = LoadBalance(global_batch=BATCH)
    return _refusals(
        {
            "small batch": lambda: LoadBalance(global_batch=1),
            "policy": lambda: LoadBalance("lbbsp", global_batch=BATCH),
            "local layers": lambda: LoadBalance(
                sync="d-psgd", global_batch=BATCH, local_layers=[keras.layers.Dense(1)]
            ),
            "lists": lambda: resize_batches(([[1.0]], [[2.0]]), balance),
            "lengths": lambda: resize_batches((x, y[:-1]), balance),
            "balance": lambda: resize_batches((x, y), 32),
            "prefetch": lambda: resize_batches((x, y), balance, prefetch=-1),
            "shuffled batches": lambda: resize_batches((x, y), balance).shuffle(3),
            "batched again": lambda: resize_batches((x, y), balance).batch(3),
            "warm-up": lambda: LearningRateWarmup(0.1, warmup_epochs=0),
            "schedule": lambda: LearningRateSchedule(0.1, 0.5, start_epoch=3, end_epoch=3),
        }
    )


def _refusals(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    return {name: _said(attempt) for name, attempt in attempts.items()}
