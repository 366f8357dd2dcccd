"""What the behaviour tests for Keras have in common: data, a network, and a fit on all ranks or on one."""

from __future__ import annotations

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


def alone(model: Any, start: list[np.ndarray], optimizer: Any, **compiled: Any) -> Any:
    """A copy of a model at its start, to train in this process alone."""
    copy = keras.models.clone_model(model)
    copy.set_weights(start)
    copy.compile(optimizer, **({"loss": "mse"} | compiled))
    return copy


class Start(keras.callbacks.Callback):
    """Takes down the weights that training starts with."""

    weights: list[np.ndarray] = []  # noqa: RUF012 - one test at a time

    def on_train_begin(self, logs=None):
        Start.weights = self.model.get_weights()


def against_one_process(
    optimizer: Callable[[], Any], *, compiled: dict, arrays: Any, epochs: int = 2, **fit: Any
) -> dict:
    """The largest relative difference from training one process by Keras alone on the same global batches."""
    model = network(outputs=arrays[1].shape[-1])
    _, balance = trained(
        model, optimizer(), policy=UNEQUAL, epochs=epochs, callbacks=[Start()], compiled=compiled, arrays=arrays,
        resized={"seed": 4}, **fit,
    )  # fmt: skip

    def single() -> list[np.ndarray]:
        one = alone(model, Start.weights, optimizer(), **compiled)
        batches = None
        for epoch in range(epochs):
            order = np.arange(len(arrays[0]))
            np.random.Generator(np.random.PCG64([4, epoch])).shuffle(order)
            part = tf.data.Dataset.from_tensor_slices(tuple(a[order] for a in arrays)).batch(BATCH)
            batches = part if batches is None else batches.concatenate(part)
        one.fit(batches, epochs=1, verbose=0, shuffle=False, **fit)
        return one.get_weights()

    pairs = zip(model.get_weights(), on_rank_0(single), strict=True)
    return {
        "difference": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
        "spread": spread(model),
        "rounds": balance.rounds,
    }
