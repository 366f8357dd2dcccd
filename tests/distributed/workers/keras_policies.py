"""One rank of the test of Keras under policies: early ends, supersteps, local updates, averages with neighbours.

The oracle trains all ranks' models in one process, on the samples that each rank really saw, by the recurrences of the
papers written down again: with S_i samples of rank i, S of all, and g_i the mean gradient of rank i,

    allreduce    x   <- x - lr sum_i (S_i / S) g_i
    neighbours   x_i <- sum_j W_ij x_j - lr (n S_i / S) g_i
    local        x_i <- x_i - lr g_i for each micro-batch;  then x <- sum_i (S_i / S) x_i
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras_exactness
import numpy as np
import plain_graphs
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_exactness import SAMPLES, Net, samples
from pool import serve
from told_speeds import supersteps

from hvd_hetero.policies import LBNonBlocking, NonBlocking, Policy
from hvd_hetero.session import balancer_of
from hvd_hetero.topology.mixing import resolve_mixing
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
RATE = 0.05
EPOCHS = 2
SLOW_S = 0.02  # more for every micro-batch of rank 0: rounds end early only where ranks differ


def train(policy: Policy, sync: str) -> tuple[Net, list[np.ndarray], dict[int, list[list[int]]], LoadBalance]:
    """The net, its start, and the micro-batches of each round."""
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    keras.utils.set_random_seed(100 + hvd.rank())
    seen: dict[int, list[list[int]]] = {}
    start: list[np.ndarray] = []

    def saw(indices: np.ndarray) -> None:
        if balancer_of(balance).gradient.factor > 0:
            seen.setdefault(balance.rounds, []).append([int(i) for i in indices])
        time.sleep(SLOW_S * (hvd.rank() == 0))

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            start.extend(self.model.get_weights())

    balance = LoadBalance(policy, global_batch=12, sync=sync)
    net = Net(saw)
    net.compile(keras.optimizers.SGD(RATE), "mse")
    data = resize_batches(samples("float64"), balance, shuffle=True, seed=5)
    net(samples("float64")[0][:1])  # or LoadBalance traces a step to build it
    net.fit(data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[balance, Watch()])
    return net, start, seen, balance


def gradients(net: Net) -> Callable[[list[np.ndarray], list[int]], list[np.ndarray]]:
    """The mean gradient at given weights of given samples; traced once."""
    x, y = (tf.constant(a) for a in samples("float64"))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def found(indices: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            error = net(tf.gather(x, indices), training=True) - tf.gather(y, indices)
            loss = tf.reduce_mean(error**2) + tf.add_n(net.losses)
        return tape.gradient(loss, net.trainable_variables)

    def at(weights: list[np.ndarray], indices: list[int]) -> list[np.ndarray]:
        for variable, value in zip(net.trainable_variables, weights, strict=True):
            variable.assign(value)
        return [g.numpy() for g in found(tf.constant(indices, tf.int64))]

    return at


def step(x: list[np.ndarray], g: list[np.ndarray], factor: float = 1.0) -> list[np.ndarray]:
    return [a - RATE * factor * b for a, b in zip(x, g, strict=True)]


def mean(models: list[list[np.ndarray]], shares: np.ndarray) -> list[np.ndarray]:
    return [sum(s * w for s, w in zip(shares, each, strict=True)) for each in zip(*models, strict=True)]


def oracle(
    start: list[np.ndarray], rounds: list[list[list[list[int]]]], kind: str, sync: str
) -> list[list[np.ndarray]]:
    """All ranks' trained weights after the rounds; ``rounds[r][i]`` are the micro-batches of rank i in round r."""
    net = Net()
    net(samples("float64")[0][:1])
    net.set_weights(start)
    gradient = gradients(net)
    workers = len(rounds[0])
    mixing = resolve_mixing(sync, workers)
    models = [[v.numpy() for v in net.trainable_variables] for _ in range(workers)]
    for number, parts in enumerate(rounds):
        done = np.array([sum(map(len, part)) for part in parts])
        shares = done / done.sum()
        if kind == "local":
            for i, part in enumerate(parts):
                for micro_batch in part:
                    models[i] = step(models[i], gradient(models[i], micro_batch))
            models = [mean(models, shares)] * workers
            continue
        found = [
            gradient(models[i], [j for each in part for j in each]) if part else [np.zeros_like(w) for w in models[i]]
            for i, part in enumerate(parts)
        ]
        if mixing is None:
            models = [step(models[0], mean(found, shares))] * workers
            continue
        mixed = []
        for i in range(workers):
            row = mixing.row(i, number)
            mixed.append(mean(models, np.array([row.get(j, 0.0) for j in range(workers)])))
        models = [step(mixed[i], found[i], workers * shares[i]) for i in range(workers)]
    return models


def case(make: Callable[[], Policy], sync: str = "allreduce", kind: str = "gradients") -> dict[str, Any]:
    net, start, seen, balance = train(make(), sync)
    gathered = hvd.allgather_object(seen)
    rounds = [[part.get(r, []) for part in gathered] for r in range(balance.rounds)]
    mine = [v.numpy() for v in net.trainable_variables]
    everywhere = np.stack(hvd.allgather_object(np.concatenate([w.ravel() for w in mine])))
    visits = sorted(i for r in rounds for part in r for micro_batch in part for i in micro_batch)
    outcome = {
        "spread": float(np.abs(everywhere - everywhere[0]).max()),
        "rate": float(tf.convert_to_tensor(net.optimizer.learning_rate)),
        "once": visits == sorted([*range(SAMPLES)] * EPOCHS),
        "rounds": balance.rounds,
        "most": max(len(part) for r in rounds for part in r),
        "least": min(len(part) for r in rounds for part in r),
        "moved": max(float(np.abs(a - b).max()) for a, b in zip(net.get_weights(), start, strict=True)),
    }
    if hvd.rank() == 0:  # all hold the same weights
        outcome |= compared(mine, start, rounds, kind, sync)
    return outcome


def compared(mine: list[np.ndarray], *trained: Any) -> dict[str, float]:
    models = oracle(*trained)
    expected = mean(models, np.full(len(models), 1 / len(models)))
    scale = max(float(np.abs(w).max()) for w in expected)
    return {
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(mine, expected, strict=True)) / scale,
        "apart": max(float(np.abs(a - b).max()) for a, b in zip(models[0], models[-1], strict=True)),
    }


CASES: dict[str, Callable[[], Any]] = {
    "elastic-bsp, local": lambda: case(lambda: supersteps(updates="local"), kind="local"),
    "d-psgd, every round another": lambda: case(lambda: EveryRoundAnother(4), "d-psgd"),
    "lb-non-blocking": lambda: case(lambda: LBNonBlocking(micro_batches=3)),
    "non-blocking, matcha": lambda: case(lambda: NonBlocking(3), "matcha"),
}


def as_users_run_it(case: Callable[[], Any]) -> Any:
    """With optimised graphs, if the argument says so."""
    plain_graphs.optimise(sys.argv[1:] == ["optimised graphs"])
    try:
        return case()
    finally:
        plain_graphs.optimise(False)


if __name__ == "__main__":
    serve(hvd, CASES | {name: partial(as_users_run_it, case) for name, case in keras_exactness.CASES.items()})
