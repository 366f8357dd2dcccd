"""The part of ``keras_behaviour.py`` about data that are read from front to end, of a length that nobody knows."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import BATCH, FEATURES, SAMPLES, UNEQUAL, Start, data, on_rank_0, spread

from hvd_hetero.policies import NonBlocking
from hvd_hetero.session import balancer_of
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
SHARDS = (slice(0, 37), slice(37, SAMPLES))  # of 37 and 13 samples


def watched(seen: list[tuple[int, list[int]]], balance: LoadBalance) -> Any:
    """A model that notes the rounds it is trained in, and the numbers of the samples: the last of their features."""

    class Watched(keras.Model):
        def train_step(self, batch):
            tf.numpy_function(note, [batch[0][:, -1]], [])
            return super().train_step(batch)

    def note(numbers):
        if balancer_of(balance).gradient.factor > 0:  # otherwise it stands in for no data
            seen.append((balance.rounds, [int(i) for i in numbers]))

    inputs = keras.layers.Input((FEATURES + 1,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs[:, :FEATURES])
    return Watched(inputs, keras.layers.Dense(1)(hidden))


def numbered() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    return np.concatenate([x, np.arange(SAMPLES, dtype="float32")[:, None]], 1), y


def unknown(part: slice = slice(None)) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tuple(a[part] for a in numbered())).filter(lambda x, y: x[0] > -1e9)


def outcome(policy: Any, samples: Any, *, stream: str | None = None, seed: int | None = None, **fit: Any) -> dict:
    """A fit on a stream, and what one process makes of the same rounds."""
    seen: list[tuple[int, list[int]]] = []
    balance = LoadBalance(policy, global_batch=BATCH)
    model = watched(seen, balance)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")  # with metrics, a step of one's own is traced twice
    batches = resize_batches(samples, balance, stream=stream, shuffle=seed is not None, seed=seed or 0)
    fit = {"epochs": 3, "verbose": 0, "shuffle": False} | fit
    history = model.fit(batches, callbacks=[balance, Start()], **fit).history
    rounds: list[list[int]] = [[] for _ in range(balance.rounds)]
    for rank in hvd.allgather_object(seen):
        for number, samples_seen in rank:
            rounds[number] += samples_seen
    x, y = numbered()

    def single() -> list[np.ndarray]:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        one = keras.models.clone_model(model)
        one.set_weights(Start.weights)
        optimizer.build(one.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
        def update(numbers: tf.Tensor) -> None:  # not fit, which would trace each size of a batch again
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((one(tf.gather(x, numbers), training=True) - tf.gather(y, numbers)) ** 2)
            gradients = tape.gradient(loss, one.trainable_variables)
            optimizer.apply_gradients(zip(gradients, one.trainable_variables, strict=True))

        for numbers in rounds:
            update(tf.constant(numbers, tf.int64))
        return one.get_weights()

    pairs = zip(model.get_weights(), on_rank_0(single), strict=True)
    return {
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
        "spread": spread(model),
        "sizes": [len(numbers) for numbers in rounds],
        "visits": np.bincount([i for numbers in rounds for i in numbers], minlength=SAMPLES).tolist(),
        "order": [i for numbers in rounds for i in numbers],
        "loss": history["loss"],
        "val_loss": history.get("val_loss"),
    }


def streams_of_unknown_length_end() -> dict:
    """Streams that all ranks read alike, and shards of unequal length: each sample once, all ranks end together."""
    x, y = numbered()
    part = unknown(SHARDS[hvd.rank()])

    def generate() -> Any:
        yield from zip(x, y, strict=True)

    signature = (tf.TensorSpec((FEATURES + 1,), tf.float32), tf.TensorSpec((1,), tf.float32))
    generated = tf.data.Dataset.from_generator(generate, output_signature=signature)
    mine = slice(hvd.rank(), None, hvd.size())
    return {
        "whole": outcome(UNEQUAL, unknown(), validation_data=(x[mine], y[mine])),
        "generator, shuffled": outcome("lb-bsp", generated, seed=3, epochs=3, initial_epoch=1),
        "shards, non-blocking": outcome(NonBlocking(2), part, stream="shard"),
    }
