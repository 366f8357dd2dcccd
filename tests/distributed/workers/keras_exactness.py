"""The part of ``keras_policies.py`` about exact gradients: several policies, compared with a single-process run.

The first feature of a sample is its index, which the model ignores, so what was visited is written down by the model
itself, in training. (The train step is Keras's own, so that the loss is weighted where it can be.) The oracle shares no
code with the project: rank 0 gathers the indices that the ranks really saw and repeats the training on their union,
round by round, with plain Keras and a GradientTape.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother

from hvd_hetero.communication import bucket_sizes as division
from hvd_hetero.policies import BSP, Policy, StaticAllocation
from hvd_hetero.session import balancer_of
from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.step import graph_synchroniser

keras = tf.keras
# Bytes, and gradients of a bucket: a small model takes all ways.
division.ALONE_FROM_BYTES, division.BUCKET_GRADIENTS, graph_synchroniser._BRANCH_ABOVE_BYTES = 200, 2, 100
EPOCHS = 2
GLOBAL_BATCH = 12
SAMPLES = 12 * 8 + 2  # two more than eight rounds: in the eighth, since three ranks need three
FEATURES = 6


class Net(keras.Model):
    """Dense layers around a convolution, and a layer that is frozen; takes a note of every batch it is trained on."""

    def __init__(self, saw: Callable[[np.ndarray], None] | None = None) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(8, activation="tanh")
        self.frozen = keras.layers.Dense(8, trainable=False)
        self.convolution = keras.layers.Conv1D(2, 3, activation="tanh")
        self.flat = keras.layers.Flatten()
        self.outer = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-3))
        self.saw = saw

    def call(self, x, training=None):
        if training and self.saw is not None:
            tf.numpy_function(self.saw, [x[:, 0]], [])
        hidden = self.inner(x[:, 1:])
        hidden = hidden + 0.1 * self.frozen(hidden)
        return self.outer(self.flat(self.convolution(hidden[:, :, None])))


# Epsilon is raised: with the default, Adam divides gradients that are nearly zero by themselves, which makes a
# last bit of the sum an update of full size.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, epsilon=1e-4),
}


@dataclass
class Outcome:
    net: Net
    start: list[np.ndarray]
    seen: dict[int, list[int]]
    """this rank's samples, per round"""
    rounds: int
    sizes: list[int]
    loss: list[float]


def samples(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(7).normal(size=(SAMPLES, 1 + FEATURES))
    y = np.sin(x[:, 1:].sum(1, keepdims=True))
    x[:, 0] = np.arange(SAMPLES)
    return x.astype(dtype), y.astype(dtype)


def train(policy: Policy, optimizer: str, dtype: str, prefetch: int, built: bool) -> Outcome:
    keras.backend.set_floatx(dtype)
    keras.mixed_precision.set_global_policy(dtype)
    keras.utils.set_random_seed(100 + hvd.rank())  # ranks start apart: the broadcast has something to do
    seen: dict[int, list[int]] = {}
    sizes: set[int] = set()
    start: list[np.ndarray] = []

    def saw(indices: np.ndarray) -> None:
        if balancer_of(balance).gradient.factor > 0:  # otherwise it stands in for no data
            seen.setdefault(balance.rounds, []).extend(int(i) for i in indices)
            sizes.add(len(indices))

    class Start(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            start.extend(self.model.get_weights())

    balance = LoadBalance(policy, global_batch=GLOBAL_BATCH)
    net = Net(saw)
    if built:  # or LoadBalance traces a step to build it, which takes as long as the fit's own trace
        net(samples(dtype)[0][:1])
    net.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    data = resize_batches(samples(dtype), balance, shuffle=True, seed=5, prefetch=prefetch)
    history = net.fit(data, epochs=EPOCHS, callbacks=[balance, Start()], verbose=0, shuffle=False)
    return Outcome(net, start, seen, balance.rounds, sorted(sizes), history.history["loss"])


@cache
def reference(rounds: tuple[tuple[int, ...], ...], optimizer: str, dtype: str, start: bytes) -> list[np.ndarray]:
    """The weights of one process after these rounds; ``start`` has those before them. Most cases share theirs."""
    x, y = (tf.constant(a) for a in samples(dtype))
    net = Net()
    net(x[:1])
    net.set_weights(pickle.loads(start))
    updates = OPTIMIZERS[optimizer]()
    updates.build(net.trainable_variables)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def update(indices: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            error = net(tf.gather(x, indices), training=True) - tf.gather(y, indices)
            loss = tf.reduce_mean(error**2) + tf.add_n(net.losses)
        variables = net.trainable_variables
        updates.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for indices in rounds:
        update(tf.constant(indices, tf.int64))
    return net.get_weights()


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest relative difference over the weights."""
    pairs = zip(a, b, strict=True)
    return max(float(np.abs(p - q).max() / max(np.abs(q).max(), 1e-6)) for p, q in pairs)  # biases begin at zero


def case(
    policy: Callable[[], Policy], optimizer: str = "momentum", dtype: str = "float64", prefetch: int = 0,
    built: bool = True,
) -> dict:  # fmt: skip
    outcome = train(policy(), optimizer, dtype, prefetch, built)
    flat = np.concatenate([w.ravel() for w in outcome.net.get_weights()])
    of_ranks = hvd.allgather_object((outcome.seen, flat, outcome.loss, outcome.sizes))
    if hvd.rank() != 0:
        return {}
    parts, everywhere, losses, sizes = zip(*of_ranks, strict=True)
    rounds = [sorted(i for part in parts for i in part.get(r, [])) for r in range(outcome.rounds)]
    weights, whole = outcome.net.get_weights(), tuple(map(tuple, rounds))
    return {
        "difference": difference(weights, reference(whole, optimizer, dtype, pickle.dumps(outcome.start))),
        "moved": difference(weights, outcome.start),
        "between_ranks": float(np.abs(np.stack(everywhere) - everywhere[0]).max()),
        "loss_between_ranks": float(np.abs(np.stack(losses) - np.array(losses[0])).max()),
        "samples": SAMPLES,
        "rounds": rounds,
        "idle": [outcome.rounds - len(part) for part in parts],
        "sizes": sizes,
        "weighs_the_loss": not {"scale_loss", "compute_gradients"}.isdisjoint(outcome.net.optimizer.__dict__),
    }


def one() -> EveryRoundAnother:
    return EveryRoundAnother(1)


def several() -> EveryRoundAnother:
    return EveryRoundAnother(4)


CASES: dict[str, Callable[[], Any]] = {
    "bsp": lambda: case(BSP, built=False),
    "static, one rank without data": lambda: case(lambda: StaticAllocation([0, 3, 1]), prefetch=1),
    "every round another": lambda: case(one, prefetch=2),
    "every round another, in micro-batches, adamw": lambda: case(several, "adamw", built=False),
    "every round another, adamw, float32": lambda: case(one, "adamw", "float32", prefetch=1),
}
