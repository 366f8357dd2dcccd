"""The part of ``keras_behaviour.py`` about what Horovod's own tests of its Keras side expect."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import Start, on_rank_0

from hvd_hetero.policies import StaticAllocation
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
BATCH = 8


def spread(arrays: list[np.ndarray]) -> float:
    every = np.stack(hvd.allgather_object(np.concatenate([np.asarray(a).ravel() for a in arrays])))
    return float(np.abs(every - every[0]).max())


def fit(model: Any, arrays: Any, policy: Any = "bsp", callbacks: Any = (), *, local: Any = (), **options: Any) -> Any:
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


def embeddings(shares: list[int], options: dict[str, Any]) -> dict:
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
        model = keras.Model(inputs, keras.layers.Embedding(50, 4)(inputs))
        kinds = {"Adam": keras.optimizers.Adam, "AdamW": keras.optimizers.AdamW}
        model.compile(kinds[options["name"]](0.1, **options), "mse")
        return model

    def alone() -> tuple[np.ndarray, bool]:
        single = network()
        for batch in range(8):
            rows = slice(batch % 4 * BATCH, (batch % 4 + 1) * BATCH)
            single.train_on_batch(x[rows], y[rows])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((single(x) - y) ** 2)
        (gradient,) = tape.gradient(loss, single.trainable_variables)
        return single.get_weights()[0], isinstance(gradient, tf.IndexedSlices)

    model = network()
    start = model.get_weights()[0]
    fit(model, (x, y), StaticAllocation(shares), epochs=2)
    expected, sparse = on_rank_0(alone)
    (found,) = model.get_weights()
    return {
        "difference": float(np.abs(found - expected).max()),
        "spread": spread([found]),
        "sparse": sparse,
        "moved": float(np.abs(found - start).min(axis=1).max()),
    }


def layers_of_a_ranks_own() -> dict:
    """Neither broadcast nor synchronised, for two of three layers; the other one is both."""
    x = np.random.default_rng(7).random((2 * BATCH, 3)).astype("float32")
    outcome = {}
    model = linear(1e-3, layers=3)
    own = model.layers[2:]  # the last ones, which gradients reach though all weights are zero
    fit(model, (x, x), StaticAllocation([3, 1]), [Start()], local=own)
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
    fit(model, (x, x), StaticAllocation([1] + [0] * (hvd.size() - 1)), local=[own])
    outcome["without data"] = {"untouched": bool(all((w == hvd.rank()).all() for w in own.get_weights()))}
    return outcome


CASES: dict[str, Any] = {
    "embeddings, Adam": partial(embeddings, [3, 1], {"name": "Adam"}),
    "embeddings, Adam, clipped": partial(embeddings, [1, 1], {"name": "Adam", "clipnorm": 0.02}),
    "embeddings, AdamW": partial(embeddings, [1, 0], {"name": "AdamW", "weight_decay": 0.01}),
    "own layers": layers_of_a_ranks_own,
}
