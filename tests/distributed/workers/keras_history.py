"""The part of ``keras_behaviour.py`` about what ``fit`` tells: figures of all ranks' samples, under whatever names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import BATCH, FEATURES, SAMPLES, UNEQUAL, against_one_process, data, differences, network, on_rank_0

from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
PER_EPOCH = -(-SAMPLES // BATCH)
MICRO_BATCHES, IDLE = "micro-batches", "one rank idle for an epoch, then another in every round"
POLICIES = {MICRO_BATCHES: lambda: UNEQUAL, IDLE: lambda: EveryRoundAnother(1, idle=PER_EPOCH)}


def compared(make: Callable[[int], Any], arrays: Any, policy: str) -> dict:
    whole = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
    return against_one_process(make, arrays, POLICIES[policy](), validation=lambda _: whole)


class Trackers(keras.Model):
    """Tells its trackers under names of its own, as keras.io's VAE does; one of them is no attribute of the model."""

    def __init__(self, *args: Any, elsewhere: Callable[[], Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.total = keras.metrics.Mean(name="total_loss")
        self.reconstruction = keras.metrics.Mean(name="reconstruction_loss")
        self.by_samples = keras.metrics.Mean(name="by_samples")
        self.elsewhere = elsewhere

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.reconstruction, self.by_samples]

    def update(self, batch: Any, *, training: bool) -> tuple[Any, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            each = tf.reduce_sum((self(x, training=training) - y) ** 2, axis=1)
            loss = tf.reduce_mean(each) + 0.5
        self.total.update_state(loss)
        self.reconstruction.update_state(loss - 0.5)
        self.by_samples.update_state(each)
        return loss, tape

    def told(self, loss: Any) -> dict[str, Any]:
        return {
            "loss": self.total.result(),
            "reconstruction_loss": self.reconstruction.result(),
            "by_samples": self.by_samples.result(),
            "root": tf.sqrt(self.total.result() + self.by_samples.result()),
            "of the batch": loss,
            "constant": tf.constant(3.0),
        }

    def train_step(self, batch: Any) -> dict[str, Any]:
        loss, tape = self.update(batch, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))  # noqa: B905
        self.elsewhere().update_state(loss)  # which nobody resets at the beginning of an epoch
        return {**self.told(loss), "elsewhere": self.elsewhere().result()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        loss, _ = self.update(batch, training=False)
        return self.told(loss)


def a_step_tells_trackers_under_names_of_its_own(policy: str) -> dict:
    def make(rank: int) -> Any:
        tracker = keras.metrics.Mean(name="elsewhere")
        inputs = keras.layers.Input((FEATURES,))
        model = Trackers(inputs, keras.layers.Dense(2)(inputs), elsewhere=lambda: tracker)
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return compared(make, data(2), policy)


def several_outputs_tell_a_loss_each(policy: str) -> dict:
    x, y = data(2)

    def make(rank: int) -> Any:
        inputs = keras.layers.Input((FEATURES,), name="features")
        a, b = keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)
        model = keras.Model(inputs, {"a": a, "b": b})
        model.compile(
            keras.optimizers.SGD(0.05), {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 0.5},
            metrics={"a": ["mae"], "b": ["mse"]},
        )  # fmt: skip
        return model

    return compared(make, ({"features": x}, {"a": y[:, :1], "b": y[:, 1:]}), policy)


def a_second_compile_makes_metrics_anew(policy: str) -> dict:
    x, y = data()

    def make(rank: int) -> Any:
        inputs = keras.layers.Input((FEATURES,))
        model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(inputs))
        for _ in range(2):
            metrics = [keras.metrics.AUC(), keras.metrics.Precision()]
            model.compile(keras.optimizers.SGD(0.05), "binary_crossentropy", metrics=metrics)
        return model

    return compared(make, (x, (y > 0).astype("float32")), policy)


def data_that_end_before_steps_per_epoch_end_the_epoch() -> dict:
    """Keras warns that they do, and ends the epoch. Repeated as often as needed, they do not."""
    x, y = data()
    plain = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    outcome = {}
    for name, repeats, steps in (("once", 1, 10), ("repeated", 2, 7)):
        keras.utils.set_random_seed(3)
        model = network()
        start = model.get_weights()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        balance = LoadBalance(UNEQUAL, global_batch=BATCH)
        batches = resize_batches((x, y), balance)
        batches, whole = (d if repeats == 1 else d.repeat(repeats) for d in (batches, plain))
        options = {"epochs": 2, "steps_per_epoch": steps, "verbose": 0, "shuffle": False}
        told = model.fit(batches, callbacks=[balance], **options).history

        def single() -> tuple[dict, list[np.ndarray]]:
            one = network()
            one.set_weights(start)  # noqa: B023
            one.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
            return one.fit(whole, **options).history, one.get_weights()  # noqa: B023

        expected, weights = on_rank_0(single)
        outcome[name] = differences(model, weights, told, expected, balance.rounds)
        outcome[name]["epochs"] = [len(told["loss"]), len(expected["loss"])]
    return outcome


def figures_that_cannot_be_joined_are_named() -> dict:
    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    tracker, moving = keras.metrics.Mean(name="tracker"), tf.Variable(0.0, trainable=False)

    class Moving(keras.Model):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))  # noqa: B905
            tracker.update_state(loss)
            moving.assign(0.9 * moving + 0.1 * loss)
            self.own.update_state(loss)
            hidden, alone = tf.function(self.own.result)(), tf.function(lambda: 2 * loss)()
            return {"moving": moving, "mixed": tracker.result() + loss, "hidden": hidden, "alone": alone}

    heard: list[str] = []
    handler = Heard()
    logging.getLogger("keras_callbacks.metrics.of_all_ranks").addHandler(handler)
    inputs = keras.layers.Input((FEATURES,))
    model = Moving(inputs, keras.layers.Dense(1)(inputs))
    model.own = keras.metrics.Mean(name="own")
    model.compile(keras.optimizers.SGD(0.05))
    balance = LoadBalance("bsp" if hvd.size() == 1 else UNEQUAL, global_batch=BATCH)
    told = model.fit(resize_batches(data(), balance), epochs=2, verbose=0, shuffle=False, callbacks=[balance]).history
    logging.getLogger("keras_callbacks.metrics.of_all_ranks").removeHandler(handler)
    told = {key: [float(v) for v in values] for key, values in told.items()}
    return {"alike": len(set(map(str, hvd.allgather_object(told)))), "warnings": heard}


CASES: dict[str, Callable[[], dict]] = {
    "data_that_end_before_steps_per_epoch_end_the_epoch": data_that_end_before_steps_per_epoch_end_the_epoch,
    "figures_that_cannot_be_joined_are_named": figures_that_cannot_be_joined_are_named,
} | {
    f"{case.__name__}, {policy}": partial(case, policy)
    for case in (
        a_step_tells_trackers_under_names_of_its_own, several_outputs_tell_a_loss_each,
        a_second_compile_makes_metrics_anew,
    )
    for policy in POLICIES
}  # fmt: skip
