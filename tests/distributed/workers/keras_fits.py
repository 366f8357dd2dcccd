"""What the behaviour tests for Keras have in common: data, a network, and a fit on all ranks or on one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_hetero.policies import StaticAllocation
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
FEATURES, SAMPLES, BATCH = 4, 50, 8  # seven rounds an epoch, the last one of two samples
UNEQUAL = StaticAllocation([3, 1])  # always one rank with more, in micro-batches


def data(outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(7).normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True) + np.arange(outputs)).astype("float32")


def network(*, outputs: int = 1, **options: Any) -> Any:
    inputs = keras.layers.Input((FEATURES,))
    hidden = keras.layers.Dense(6, activation="tanh", **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs, dtype="float32")(hidden))


def spread(model: Any) -> float:
    """The largest difference of a weight between two ranks."""
    flat = np.concatenate([w.ravel() for w in model.get_weights()])
    every = np.stack(hvd.allgather_object(flat))
    return float(np.abs(every - every[0]).max())


def on_rank_0(oracle: Callable[[], Any]) -> Any:
    """What it returns there, on all ranks, which leave the processors to it meanwhile."""
    return hvd.broadcast_object(oracle() if hvd.rank() == 0 else None, root_rank=0)


def trained(
    model: Any, optimizer: Any, *, policy: Any = "lb-bsp", epochs: int = 2, callbacks: Any = (), arrays: Any = None,
    compiled: dict | None = None, resized: dict | None = None, **fit: Any,
) -> tuple[dict[str, list[float]], LoadBalance]:  # fmt: skip
    model.compile(optimizer, **({"loss": "mse"} if compiled is None else compiled))
    balance = LoadBalance(policy, global_batch=BATCH)
    batches = resize_batches(data() if arrays is None else arrays, balance, shuffle=True, **(resized or {}))
    fit = {"verbose": 0, "shuffle": False, **fit}
    history = model.fit(batches, epochs=epochs, callbacks=[balance, *callbacks], **fit)
    return history.history, balance


class Start(keras.callbacks.Callback):
    """Takes down the weights that training starts with."""

    weights: list[np.ndarray] = []  # noqa: RUF012 - one test at a time

    def on_train_begin(self, logs=None):
        Start.weights = self.model.get_weights()


def apart(one: Any, other: Any) -> float:
    """The largest difference, in parts of the largest number."""
    return float(np.abs(np.subtract(one, other)).max(initial=0.0) / max(np.abs(other).max(initial=0.0), 1e-6))


def weights_of(model: Any) -> list[np.ndarray]:
    """Without what metrics have counted, which tf_keras has among the weights."""
    parts = [layer for layer in model.layers if not isinstance(layer, keras.metrics.Metric)]
    return [weight for part in parts for weight in part.get_weights()]


def differences(model: Any, weights: list[np.ndarray], history: dict, of_one: dict, rounds: int) -> dict:
    """Of a model and its history from those of one process."""
    history, of_one = ({re.sub(r"_\d+$", "", name): v for name, v in each.items()} for each in (history, of_one))
    return {
        "weights": max(apart(a, b) for a, b in zip(weights_of(model), weights, strict=True)),
        "history": {name: apart(history[name], of_one[name]) for name in of_one if name in history},
        "keys": [sorted(history), sorted(of_one)],
        "alike": len(set(map(str, hvd.allgather_object({k: [float(v) for v in vs] for k, vs in history.items()})))),
        "spread": spread(model),
        "rounds": rounds,
    }


def against_one_process(
    make: Callable[[int], Any], data: Any, policy: Any, *, whole: Any = None, validation: Any = None,
    callbacks: Callable[[], list] = list, resized: dict | None = None, **fit: Any,
) -> dict:  # fmt: skip
    """A fit on all ranks, and one in this process alone on the same batches: samples come in their own order.

    ``make`` makes a compiled model of this rank. ``validation`` of a slice gives a rank its part, and one process all.
    ``whole``: what one process gets, if not the same.
    """
    fit = {"epochs": 2, "verbose": 0, "shuffle": False, **fit}
    given = data if whole is None else whole
    sizes: list[tuple[int, ...]] = []

    def validated(part: slice) -> dict:
        return {} if validation is None else {"validation_data": validation(part)}

    keras.utils.set_random_seed(3 + hvd.rank())
    model = make(hvd.rank())
    balance = LoadBalance(policy, global_batch=BATCH)
    balance.on_round(lambda record: sizes.append(tuple(record["samples"])))
    batches = resize_batches(data, balance, **(resized or {}))
    mine = validated(slice(hvd.rank(), None, hvd.size()))
    history = model.fit(batches, callbacks=[balance, Start(), *callbacks()], **mine, **fit).history
    balance.close()

    def alone() -> tuple[dict, list[np.ndarray]]:
        keras.utils.set_random_seed(3)
        one = make(0)
        samples = given if isinstance(given, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(given)
        told = one.fit(samples.batch(BATCH), callbacks=callbacks(), **validated(slice(None)), **fit).history
        return told, weights_of(one)

    of_one, weights = on_rank_0(alone)
    moved = [apart(a, b) for a, b in zip(model.get_weights(), Start.weights, strict=True)]
    found = differences(model, weights, history, of_one, balance.rounds)
    return found | {"moved": max(moved), "splits": len(set(sizes)), "loss": of_one.get("loss")}
