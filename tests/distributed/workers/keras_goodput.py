"""The part of ``keras_behaviour.py`` about noise of gradients and batches that adapt.

One process goes through the same rounds: the samples that each rank has seen, as a layer took them down. It computes
the gradient of each rank's part by itself, and from these all else: noise scale, gain, and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import on_rank_0, spread

from hvd_hetero.measurement import gradient_noise
from hvd_hetero.policies import BSP, Goodput, goodput
from keras_callbacks import LoadBalance, resize_batches, weighted_gradients

keras = tf.keras
SAMPLES, START, EPOCHS, WORDS = 61, 8, 2, 5
RATE, FALLS = 0.05, 0.5
RNG = np.random.default_rng(3)
X = RNG.integers(0, WORDS, (SAMPLES, 2))
Y = np.sin(X.sum(1)) + 0.5 * RNG.normal(size=SAMPLES)
TOKENS = RNG.integers(1, 5, SAMPLES)
NUMBERS = np.arange(SAMPLES)


class Changing(Goodput):
    """Another batch in every round, whatever it costs."""

    def __init__(self, learning_rate: str) -> None:
        super().__init__(start=START, least=6, most=16, learning_rate=learning_rate)

    def chosen(self, total, between, seconds):
        return {8: 12, 12: 6, 6: 16, 16: 8}[total]


def staying() -> Goodput:
    """A batch that stays: the noise is measured, and decides nothing."""
    return Goodput(start=10, least=10, most=10, learning_rate="constant")


class Splits(EveryRoundAnother):
    shares_alone = True


class Seen(keras.layers.Layer):
    """Takes down the numbers of the samples that pass in training, by rounds."""

    balance: LoadBalance
    numbers: dict[int, list[int]]

    def call(self, inputs, training=None):
        words, numbers = inputs
        if training:
            tf.numpy_function(self._note, [numbers], [])
        return words

    def _note(self, numbers):
        if Seen.balance.samples:  # else one stands in
            Seen.numbers.setdefault(Seen.balance.rounds, []).extend(numbers.tolist())


class Rates(keras.callbacks.Callback):
    """Takes down the learning rate as callbacks see it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))


@contextmanager
def often(every: int = 1) -> Iterator[None]:
    """The batch is reconsidered in every round, and the noise is measured in one of ``every``."""
    before = gradient_noise._NUMBERS_PER_ROUND, gradient_noise._LONGEST_INTERVAL, goodput._ROUNDS_PER_DECISION
    gradient_noise._NUMBERS_PER_ROUND, gradient_noise._LONGEST_INTERVAL, goodput._ROUNDS_PER_DECISION = 1, every, 1
    try:
        yield
    finally:
        gradient_noise._NUMBERS_PER_ROUND, gradient_noise._LONGEST_INTERVAL, goodput._ROUNDS_PER_DECISION = before


def network() -> Any:
    words, number = keras.layers.Input((2,), dtype="int64"), keras.layers.Input((), dtype="int64")
    rows = keras.layers.Embedding(WORDS, 3)(Seen()([words, number]))  # a gradient of rows, of which some occur twice
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Flatten()(rows))
    return keras.Model([words, number], keras.layers.Dense(1)(hidden))


def token_mean(y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    target, tokens = y[:, :1], y[:, 1:]
    return tf.reduce_sum(tokens * (target - found) ** 2) / tf.reduce_sum(tokens)


def number_of_tokens(x: Any, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(y[:, 1])


def momentum() -> Any:
    return keras.optimizers.SGD(RATE, momentum=0.9)


def begin(policy: Any, batch: Any) -> tuple[LoadBalance, Any, list[Any]]:
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    keras.utils.set_random_seed(7)
    balance = LoadBalance(policy, global_batch=batch)
    Seen.balance, Seen.numbers = balance, {}
    scales: list[Any] = []
    balance.on_round(lambda record: scales.append(record.get("noise_scale")))
    return balance, network(), scales


def fitted(
    policy: Any, batch: Any, power: float = 0.0, optimizer: Callable[[], Any] = momentum, *,
    tokens: np.ndarray | None = None, every: int = 1,
) -> dict[str, Any]:  # fmt: skip
    balance, model, scales = begin(policy, batch)
    counts = np.ones(SAMPLES) if tokens is None else tokens
    weigh = {} if tokens is None else {"weight_of": number_of_tokens}
    data = ((X, NUMBERS), np.stack([Y, counts], axis=1))
    model.compile(optimizer(), loss=token_mean)
    start, rates = model.get_weights(), Rates()
    falls = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * FALLS if epoch else rate)
    with often(every):
        batches = resize_batches(data, balance, shuffle=True, **weigh)
        model.fit(batches, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[falls, rates, balance])
    return judged(balance, model, scales, start, rates.seen, optimizer, power, counts, every)


def loop() -> dict[str, Any]:
    balance, model, scales = begin("lb-bsp", Changing("adascale"))
    updates, rates = momentum(), []
    balance.start(model, updates)
    start = model.get_weights()
    data = resize_batches(
        ((X, NUMBERS), np.stack([Y, TOKENS], axis=1)), balance, shuffle=True, weight_of=number_of_tokens
    )

    @tf.function(input_signature=data.element_spec)
    def step(x: Any, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = token_mean(y, model(x, training=True))
        gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
        updates.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with often():
        for _ in range(EPOCHS):
            for batch in balance.batches(data):
                step(*batch)
                rates.append(float(tf.convert_to_tensor(updates.learning_rate)))
    return judged(balance, model, scales, start, rates, momentum, 1.0, TOKENS)


def judged(
    balance: LoadBalance, model: Any, scales: list[Any], start: Any, rates: list[float], optimizer: Callable[[], Any],
    power: float, counts: np.ndarray, every: int = 1,
) -> dict[str, Any]:  # fmt: skip
    balance.close()
    seen = hvd.allgather_object([Seen.numbers.get(round, []) for round in range(balance.rounds)])
    rounds = [*zip(*seen, strict=True)]
    wanted = on_rank_0(lambda: one_process(start, rounds, optimizer(), rates, power, counts, every))
    visited = [number for parts in rounds for part in parts for number in part]
    epochs = [sorted(visited[begin : begin + SAMPLES]) for begin in range(0, len(visited), SAMPLES)]
    pairs = [*zip(model.get_weights(), wanted["weights"], strict=True)]
    return {
        "weights": max(float(np.abs(a - b).max()) for a, b in pairs),
        "moved": max(float(np.abs(a - b).max()) for a, b in zip(start, wanted["weights"], strict=True)),
        "spread": spread(model),
        "epochs of each sample once": sum(epoch == NUMBERS.tolist() for epoch in epochs),
        "epochs": len(epochs),
        "batches": sorted({sum(map(len, parts)) for parts in rounds}),
        "progress": [balance.progress, wanted["progress"]],
        "rates": sorted(set(rates), reverse=True),
        "scales": [scales, wanted["scales"]],
        "rounds": len(rounds),
    }


def one_process(
    start: Any,
    rounds: Sequence[Any],
    optimizer: Any,
    rates: Sequence[float],
    power: float,
    counts: np.ndarray,
    every: int,
) -> dict[str, Any]:
    """Weights, progress, and the noise scale as each round begins: infinite if noise hides the gradient."""
    model = network()
    model.set_weights(start)

    def gradients(part: Any) -> tuple[list[Any], np.ndarray]:
        with tf.GradientTape() as tape:
            y = tf.constant(np.stack([Y[part], counts[part]], axis=1))
            loss = token_mean(y, model([tf.constant(X[part]), tf.constant(NUMBERS[part])]))
        found = tape.gradient(loss, model.trainable_variables)
        return found, np.concatenate([tf.convert_to_tensor(g).numpy().ravel() for g in found])

    variances: list[float] = []
    squares: list[float] = []
    scales: list[float | None] = []
    progress = 0.0
    for number, (parts, rate) in enumerate(zip(rounds, rates, strict=True)):
        whole = [sample for part in parts for sample in part]
        known = sum(squares) > 0.0
        scale = sum(variances) / sum(squares) if known else math.inf
        scales.append(scale if squares else None)
        worth = 1.0
        if squares:
            worth = (scale / START + 1) / (scale / len(whole) + 1) if known else len(whole) / START
        progress += worth
        update, mean = gradients(whole)
        held = [part for part in parts if part]
        if number % every == 0 and len(held) > 1:
            shares = [len(whole) * counts[part].sum() / counts[whole].sum() for part in held]
            apart = (b * np.square(gradients(part)[1] - mean).sum() for b, part in zip(shares, held, strict=True))
            variances.append(float(sum(apart) / (len(held) - 1)))
            squares.append(float(np.square(mean).sum() - variances[-1] * (1 / len(whole) - 1 / SAMPLES)))
        optimizer.learning_rate = rate * worth**power
        optimizer.apply_gradients(zip(update, model.trainable_variables, strict=True))
    return {"weights": model.get_weights(), "scales": scales, "progress": progress}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "adascale": lambda: fitted("lb-bsp", Changing("adascale"), 1.0),
    "square-root, micro-batches": lambda: fitted(
        BSP(max_micro_batch=3), Changing("square-root"), 0.5, lambda: keras.optimizers.Adam(RATE)
    ),
    "adascale of tokens, a loop": loop,
    "noise, micro-batches": lambda: fitted(Splits(4), staying(), every=2),
    "noise of tokens": lambda: fitted(Splits(1), staying(), tokens=TOKENS, every=2),
}
