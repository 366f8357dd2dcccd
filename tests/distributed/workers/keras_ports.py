"""The part of ``keras_behaviour.py`` about scripts that others have written: small ones of the same shape, ported.

Each is trained on all ranks and, by Keras alone, in one process, in float64. What is random in the originals is made of
the samples, and batch norm is left out, since neither is the same whatever the split. Ranks start with other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import BATCH, SAMPLES, against_one_process, differences, on_rank_0, weights_of

from keras_callbacks import LearningRateWarmup, LoadBalance, average_by_samples, resize_batches, weighted_gradients

keras = tf.keras
PIXELS, CLASSES, EPOCHS = 6, 3, 2


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    x = rng.uniform(size=(SAMPLES, PIXELS, PIXELS, 1))
    return x, rng.integers(0, CLASSES, SAMPLES)


def noise(images: Any) -> Any:
    """What looks random, and is the same for a sample wherever it is trained on."""
    return tf.sin(1e4 * images)


def network(inputs: Any, units: int, **options: Any) -> Any:
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.layers.Dense(units, **options)(hidden)


class DDIM(keras.Model):
    """As keras.io's: an adapted normalization, and a frozen copy of the network that follows it; no ``call``."""

    def __init__(self):
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        images, variances = keras.layers.Input((PIXELS, PIXELS, 1)), keras.layers.Input((1,))
        features = keras.layers.Concatenate()([keras.layers.Flatten()(images), variances])
        predicted = network(keras.layers.LayerNormalization()(features), PIXELS**2)
        self.network = keras.Model([images, variances], keras.layers.Reshape((PIXELS, PIXELS, 1))(predicted))
        self.follower = keras.models.clone_model(self.network)
        self.follower.trainable = False
        self.steps = self.add_weight(name="steps", shape=(), initializer="zeros", trainable=False)

    def compile(self, **options):
        super().compile(**options)
        self.error = keras.losses.MeanAbsoluteError()
        self.noise_loss = keras.metrics.Mean(name="n_loss")
        self.image_loss = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss, self.image_loss]

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        noises = noise(images)
        angles = tf.abs(noises[:, 0, :1, 0])
        noise_rates, signal_rates = tf.sin(angles), tf.cos(angles)
        wide = [rates[:, :, None, None] for rates in (noise_rates, signal_rates)]
        noisy = wide[1] * images + wide[0] * noises
        with tf.GradientTape() as tape:
            found = self.network([noisy, noise_rates**2], training=True)
            noise_loss = self.error(noises, found)
            image_loss = self.error(images, (noisy - wide[0] * found) / wide[1])
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss.update_state(noise_loss)
        self.image_loss.update_state(image_loss)
        self.steps.assign_add(1.0)
        share = 1 / (1 + self.steps)  # more at first, as is usual
        for weight, mean in zip(self.network.weights, self.follower.weights, strict=True):
            mean.assign((1 - share) * mean + share * weight)
        return {metric.name: metric.result() for metric in self.metrics}


class Distiller(keras.Model):
    """As keras.io's: a student learns from labels and from a teacher, by a ``compute_loss``."""

    def __init__(self):
        super().__init__()
        images = keras.layers.Input((PIXELS, PIXELS, 1))
        self.teacher = keras.Model(images, network(images, CLASSES))
        self.teacher.trainable = False
        self.student = keras.Model(images, network(images, CLASSES))
        self.by_labels = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.by_teacher = keras.losses.KLDivergence()

    def call(self, images):
        return self.student(images)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
        soft = [tf.nn.softmax(logits / 3.0) for logits in (self.teacher(x, training=False), y_pred)]
        return 0.1 * self.by_labels(y, y_pred) + 0.9 * self.by_teacher(*soft)


class OlderDistiller(Distiller):
    """As keras.io's of before: by a ``train_step``, which returns losses that no tracker has seen."""

    call = keras.Model.call
    compute_loss = keras.Model.compute_loss

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            logits = self.student(images, training=True)
            by_labels = self.by_labels(labels, logits)
            soft = [tf.nn.softmax(each / 3.0) for each in (self.teacher(images, training=False), logits)]
            by_teacher = self.by_teacher(*soft)
            loss = 0.1 * by_labels + 0.9 * by_teacher
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables, strict=True))
        return {"student_loss": by_labels, "distillation_loss": by_teacher}


def convolutional() -> Any:
    """As Horovod's, which is built by its first batch; without dropout."""
    return keras.Sequential([
        keras.layers.Conv2D(4, [3, 3], activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Flatten(),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ])  # fmt: skip


def fits(
    kind: Callable[[], Any], policy: Callable[[], Any], data: Any, *, adapt: bool = False, validate: bool = False,
    callbacks: Callable[[], list] = list, **compiled: Any,
) -> dict:  # fmt: skip
    def make(rank: int) -> Any:
        made = kind()
        made.compile(optimizer=keras.optimizers.AdamW(0.01, epsilon=1e-4), **compiled)
        if adapt:
            made.normalizer.adapt(data[rank :: hvd.size()])
        return made

    parts = (lambda part: tuple(a[part] for a in data)) if validate else None
    return against_one_process(make, data, policy(), validation=parts, callbacks=callbacks)


def loop(policy: Callable[[], Any], data: Any, *, compiled: bool = True) -> dict:
    """As Horovod's tensorflow2_mnist.py: the loop is the script's own, and the first batch builds the model."""
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def train(seed: int, balance: LoadBalance | None) -> tuple[Any, list[float]]:
        keras.utils.set_random_seed(seed)
        model, optimizer, losses = convolutional(), keras.optimizers.Adam(0.01, epsilon=1e-4), []

        def step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            if balance is None:
                gradients = tape.gradient(loss, model.trainable_variables)
            else:
                gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        run = tf.function(step, reduce_retracing=True) if compiled else step
        if balance is not None:
            balance.start(model, optimizer)
            batches = resize_batches(data, balance)
        for _ in range(EPOCHS):
            if balance is None:
                plain = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
                losses += [[len(labels), float(run(images, labels))] for images, labels in plain]
            else:
                for images, labels in balance.batches(batches):
                    losses.append([balance.samples, float(run(images, labels))])
        return model, losses

    def alone() -> tuple[list[np.ndarray], np.ndarray]:
        model, losses = train(5, None)
        return weights_of(model), np.array(losses)

    single, plain = on_rank_0(alone)
    balance = LoadBalance(policy(), global_batch=BATCH)
    shared, mine = train(5 + hvd.rank(), balance)
    every = np.array(hvd.allgather_object(mine))  # ranks, rounds, samples and loss
    assert every[..., 0].sum(0).tolist() == plain[:, 0].tolist()
    means = (every[..., 0] * every[..., 1]).sum(0) / plain[:, 0]
    seen, total = np.array(mine)[:, 0].sum(), np.array(mine).prod(axis=1).sum()
    joined = average_by_samples({"mean": total / seen}, int(seen))["mean"]
    history = {"loss": means, "mean": [joined]}
    whole = {"loss": plain[:, 1], "mean": [np.average(plain[:, 1], weights=plain[:, 0])]}
    return differences(shared, single, history, whole, balance.rounds)


def in_float64(script: Callable[..., dict], *args: Any, **options: Any) -> Callable[[], dict]:
    """What one process gives, and what ranks make of the same script."""

    def case() -> dict:
        keras.backend.set_floatx("float64")
        keras.mixed_precision.set_global_policy("float64")
        return script(*(arg() if arg is stream else arg for arg in args), **options)

    return case


def stream() -> tf.data.Dataset:
    tf.random.set_seed(0)  # of which the order of a shuffle is made, too
    return tf.data.Dataset.from_tensor_slices(samples()).shuffle(SAMPLES, seed=4, reshuffle_each_iteration=False)


UNEVEN = partial(EveryRoundAnother, 1)  # one micro-batch of any size, or none
CASES = {
    "ddim": in_float64(fits, DDIM, UNEVEN, samples()[0], adapt=True),
    "distillation": in_float64(fits, Distiller, UNEVEN, samples(), metrics=["accuracy"], validate=True),
    "distillation by train_step": in_float64(fits, OlderDistiller, UNEVEN, samples()),
    "tensorflow2_keras_mnist": in_float64(
        fits, convolutional, UNEVEN, stream, loss="sparse_categorical_crossentropy", metrics=["accuracy"],
        callbacks=lambda: [LearningRateWarmup(0.02, warmup_epochs=2)],
    ),
    "tensorflow2_mnist": in_float64(loop, UNEVEN, samples()),
    "tensorflow2_mnist, eagerly": in_float64(loop, UNEVEN, samples(), compiled=False),
}  # fmt: skip
