"""One rank of the behaviour tests for Keras: what users do in ``fit`` and around it, each in a function of its own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras_conformance
import keras_devices
import keras_differences
import keras_elastic
import keras_goodput
import keras_history
import keras_models
import keras_ports
import keras_starts
import keras_streams
import keras_weights
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import BATCH, FEATURES, UNEQUAL, data, network, on_rank_0, spread, trained
from pool import serve

from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras


def nothing_is_traced_again_after_the_first_round() -> dict:
    traces = []

    class Counted(keras.Model):
        def train_step(self, batch):
            traces.append(balance.rounds if balance._session.course.fitting else -1)
            return super().train_step(batch)

    counts = {}
    for name, policy in (("one", EveryRoundAnother(1)), ("several", EveryRoundAnother(4))):
        traces.clear()
        inputs = keras.layers.Input((FEATURES,))
        model = Counted(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        balance = LoadBalance(policy, global_batch=BATCH)
        sizes = set()
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: sizes.add(balance.plan))  # noqa: B023
        batches = resize_batches(data(), balance)
        model.fit(batches, epochs=3, verbose=0, callbacks=[balance, note])
        model.fit(batches, epochs=2, verbose=0, callbacks=[balance, note])
        counts[name] = {
            "late": sum(t > 0 for t in traces),
            "first": sum(t == 0 for t in traces),
            "rounds": balance.rounds,
            "plans": len(sizes),
        }
    return counts


class Kept(keras.metrics.Metric):
    """Keeps one number, which ``change`` makes again of it and of the predictions."""

    def __init__(self, name: str, change: Any) -> None:
        super().__init__(name=name)
        self.change = change
        self.kept = self.add_weight(name=name, initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.kept.assign(self.change(tf.convert_to_tensor(self.kept), y_pred))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.kept)


def metrics_are_those_of_all_samples() -> dict:
    """Also those that are no mean; compared with one evaluation of the same frozen model on all samples."""

    def largest() -> Kept:
        return Kept("largest", lambda kept, new: tf.maximum(kept, tf.reduce_max(new)))

    def least() -> Kept:
        return Kept("least", lambda kept, new: tf.minimum(kept, tf.reduce_min(new)))

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    logging.getLogger("keras_callbacks.metrics.of_all_ranks").addHandler(Heard())
    x, y = data()
    labels = (y > 0).astype("float32")
    model = network()
    model.trainable = True
    latest = Kept("latest", lambda kept, new: tf.reduce_max(new))
    metrics = [keras.metrics.AUC(name="auc", from_logits=True), "mae", largest(), least(), latest]
    history, _ = trained(
        model, keras.optimizers.SGD(0.0), policy=UNEQUAL, epochs=1, arrays=(x, labels),
        compiled={"loss": "mse", "metrics": metrics}, validation_data=(x[hvd.rank() :: 2], labels[hvd.rank() :: 2]),
    )  # fmt: skip

    def alone() -> dict[str, float]:
        single = network()
        single.set_weights(model.get_weights())
        known = [keras.metrics.AUC(name="auc", from_logits=True), "mae", largest(), least()]
        single.compile("sgd", "mse", metrics=known)
        return single.evaluate(x, labels, verbose=0, return_dict=True)

    whole = on_rank_0(alone)
    return {
        "latest": [history["latest"][0], history["val_latest"][0]],
        "warnings": heard,
        "train": {k: history[k][0] for k in whole},
        "validation": {k: history[f"val_{k}"][0] for k in whole},
        "whole": whole,
    }


def ranks_stop_together() -> dict:
    """One model, traced once. Of each fit: epochs, rounds, and the difference between ranks."""

    class Stop(keras.callbacks.Callback):
        """Stops rank 1."""

        def on_train_batch_end(self, batch, logs=None):
            if how == "in the middle" and hvd.rank() == 1 and batch == 2:
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if how == "at the end" and hvd.rank() == 1 and epoch == 1:
                self.model.stop_training = True

    alike = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e3)
    model, outcome, rounds = network(), {}, 0
    model.compile("sgd", "mse")
    balance = LoadBalance(UNEQUAL, global_batch=BATCH)
    batches = resize_batches(data(), balance, shuffle=True)
    for how in ("alike", "in the middle", "at the end"):
        callbacks = [Stop(), balance, *([alike] if how == "alike" else [])]
        losses = model.fit(batches, epochs=5, verbose=0, callbacks=callbacks).history["loss"]
        outcome[how] = [len(losses), balance.rounds - rounds, spread(model)]
        rounds = balance.rounds
    return outcome


def eager_training() -> dict:
    model = network()
    _, balance = trained(model, "sgd", policy=UNEQUAL, epochs=1, compiled={"loss": "mse", "run_eagerly": True})
    return {"spread": spread(model), "rounds": balance.rounds}


PARTS = (keras_devices, keras_differences, keras_models, keras_starts, keras_streams)


def cases() -> dict[str, Callable[[], Any]]:
    """The functions of this file and its parts, and what some of these name."""
    known = {name: value for part in PARTS for name, value in vars(part).items()} | globals()
    found = {name: value for name, value in known.items() if callable(value)}
    for part in (keras_history, keras_ports, keras_conformance, keras_elastic, keras_weights, keras_goodput):
        found |= part.CASES
    return {name: partial(in_float32, value) for name, value in found.items()}


def in_float32(case: Callable[..., Any]) -> Any:
    """Unless the case says otherwise. One that takes a folder gets one that ranks share."""
    keras.backend.set_floatx("float32")
    keras.mixed_precision.set_global_policy("float32")
    keras.utils.set_random_seed(100 + hvd.rank())
    if not (hasattr(case, "__code__") and case.__code__.co_argcount):
        return case()
    with tempfile.TemporaryDirectory() as mine:
        folder = hvd.broadcast_object(mine, root_rank=0, name="folder")
        outcome = case(Path(folder))
        hvd.broadcast_object(None, root_rank=0, name="end")
    return outcome


if __name__ == "__main__":
    keras_devices.make_place()
    serve(hvd, cases())
