"""One rank of the conformance tests: what Horovod's own tests of its Keras side expect, of this package's names."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras_elastic
import numpy as np
import tensorflow as tf
from keras_fits import Start, on_rank_0
from pool import serve

from hvd_hetero.policies import StaticAllocation
from keras_callbacks import LearningRateSchedule, LearningRateWarmup, LoadBalance, resize_batches

keras = tf.keras
BATCH = 8


def everywhere(arrays: list[np.ndarray]) -> np.ndarray:
    """The concatenated arrays of all ranks, a row per rank."""
    return np.stack(hvd.allgather_object(np.concatenate([np.asarray(a).ravel() for a in arrays])))


def spread(arrays: list[np.ndarray]) -> float:
    every = everywhere(arrays)
    return float(np.abs(every - every[0]).max())


def fit(model: Any, arrays: Any, policy: Any = "bsp", callbacks: Any = (), **options: Any) -> Any:
    local = options.pop("local_layers", ())
    balance = LoadBalance(policy, global_batch=BATCH, local_layers=local)
    batches = resize_batches(arrays, balance)
    return model.fit(batches, verbose=0, shuffle=False, callbacks=[balance, *callbacks], **options).history


def linear(rate: float = 1.0, layers: int = 1, **options: Any) -> Any:
    """Dense layers without activations, all weights the rank's number at first."""
    start = keras.initializers.Constant(float(hvd.rank()))
    inputs = keras.layers.Input((3,))
    x = inputs
    for _ in range(layers):
        x = keras.layers.Dense(3, kernel_initializer=start, bias_initializer=start, **options)(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def learning_rates_warm_up_and_follow_a_schedule() -> dict:
    rates, steps = [], []

    class Note(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            rates.append(logs["learning_rate"])

    x = np.random.default_rng(7).random((5 * BATCH, 3)).astype("float32")
    initial = 0.1 * hvd.size()
    callbacks = [
        LearningRateWarmup(initial, warmup_epochs=3),
        LearningRateSchedule(initial, 1e-1, start_epoch=3, end_epoch=5),
        LearningRateSchedule(initial, 1e-2, start_epoch=5, end_epoch=7),
        LearningRateSchedule(initial, lambda epoch: epoch, start_epoch=7, end_epoch=10),
        Note(),
    ]
    model = linear(initial)
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    history = fit(model, (x, x), "lb-bsp", callbacks, epochs=10)
    return {
        "initial": initial,
        "rates": rates,
        "warm-up": steps[:15],
        "loss spread": spread([np.array(history["loss"]), np.array(history["mae"])]),
    }


def embeddings(policy: Any, optimizer: Any) -> dict:
    """Gradients of embeddings, which have rows only where the rank's batch has words; against Keras in one process.

    Keras keeps the parts of a word that occurs twice apart, and clips by the norm of the parts; Keras 3 also takes the
    second moments of Adam from their squares.
    """
    rng = np.random.default_rng(3)
    x = rng.integers(50, size=(4 * BATCH, 10)).astype("int32")
    y = rng.random((4 * BATCH, 10, 4)).astype("float32")

    def network() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.layers.Input((10,), dtype="int32")
        return keras.Model(inputs, keras.layers.Embedding(50, 4)(inputs))

    def alone() -> tuple[np.ndarray, bool]:
        single = network()
        single.compile(optimizer(), "mse")
        for batch in range(8):
            rows = slice(batch % 4 * BATCH, (batch % 4 + 1) * BATCH)
            single.train_on_batch(x[rows], y[rows])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((single(x) - y) ** 2)
        (gradient,) = tape.gradient(loss, single.trainable_variables)
        return single.get_weights()[0], isinstance(gradient, tf.IndexedSlices)

    model = network()
    start = model.get_weights()[0]
    model.compile(optimizer(), "mse")
    fit(model, (x, y), policy, epochs=2)
    expected, sparse = on_rank_0(alone)
    (found,) = model.get_weights()
    return {
        "difference": float(np.abs(found - expected).max()),
        "spread": spread([found]),
        "sparse": sparse,
        "moved": float(np.abs(found - start).min(axis=1).max()),
    }


def an_optimizer_keeps_its_class_and_its_configuration() -> dict:
    model = linear()
    optimizer = keras.optimizers.Adam(0.01, beta_1=0.8, clipnorm=1.0)
    before = optimizer.get_config()
    model.compile(optimizer, "mse")
    fit(model, (np.ones((BATCH, 3), "float32"),) * 2)
    copy = type(optimizer).from_config(optimizer.get_config())
    return {
        "class": type(optimizer).__name__,
        "same": all(optimizer.get_config()[k] == v for k, v in before.items() if k != "learning_rate"),
        "copy": copy.get_config() == optimizer.get_config(),
    }


def layers_of_a_ranks_own() -> dict:
    """Neither broadcast nor synchronised, for two of three layers; the other one is both."""
    x = np.random.default_rng(7).random((2 * BATCH, 3)).astype("float32")
    outcome = {}
    model = linear(1e-3, layers=3)
    own = model.layers[2:]  # the last ones, which gradients reach though all weights are zero
    fit(model, (x, x), StaticAllocation([3, 1]), [Start()], local_layers=own)
    for when, weights in (("start", Start.weights), ("end", model.get_weights())):
        shared, mine = weights[:2], weights[2:]  # a kernel and a bias of each layer
        outcome[when] = {
            "shared": spread(shared),
            "own": spread(mine),
            "untouched": bool(all((w == hvd.rank()).all() for w in mine)),
            "root's": bool(all((w == 0).all() for w in shared)),
        }
    model = linear(1e-3, layers=3)
    own = model.layers[-1]
    fit(model, (x, x), StaticAllocation([1] + [0] * (hvd.size() - 1)), local_layers=[own])
    outcome["without data"] = {"untouched": bool(all((w == hvd.rank()).all() for w in own.get_weights()))}
    return outcome


def frozen_weights_and_state_are_broadcast_too() -> dict:
    model = linear(layers=4, trainable=False)
    inputs = model.inputs
    outputs = keras.layers.Dense(3)(keras.layers.BatchNormalization()(model.output))
    whole = keras.Model(inputs, outputs)
    whole.compile(keras.optimizers.Adam(0.0), "mse")
    fit(whole, (np.ones((BATCH, 3), "float32"),) * 2)
    frozen = model.get_weights()
    return {"root's": bool(all((w == 0).all() for w in frozen)), "spread": spread(frozen)}


CASES: dict[str, Any] = {
    "learning rates": learning_rates_warm_up_and_follow_a_schedule,
    **{
        f"embeddings, {name}": lambda optimizer=optimizer, shares=shares: embeddings(
            StaticAllocation(shares), optimizer
        )
        for name, shares, optimizer in (
            ("Adam", [3, 1], lambda: keras.optimizers.Adam(0.1)),
            ("Adam, clipped", [1, 1], lambda: keras.optimizers.Adam(0.1, clipnorm=0.02)),
            ("AdamW", [1, 0], lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01)),
        )
    },
    "configuration": an_optimizer_keeps_its_class_and_its_configuration,
    "own layers": layers_of_a_ranks_own,
    "broadcast": frozen_weights_and_state_are_broadcast_too,
    **keras_elastic.CASES,
}


def before() -> None:
    keras.utils.set_random_seed(100 + hvd.rank())


if __name__ == "__main__":
    serve(hvd, CASES, before)
