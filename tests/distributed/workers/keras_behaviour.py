"""One rank of the behaviour tests for Keras: what users do in ``fit`` and around it, each in a function of its own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras_devices
import keras_history
import keras_models
import keras_ports
import keras_refusals
import keras_starts
import keras_streams
import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import BATCH, FEATURES, SAMPLES, UNEQUAL, data, network, on_rank_0, spread, trained
from pool import serve

from keras_callbacks import LoadBalance, resize_batches, weighted_gradients

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


def early_stopping_stops_all_ranks_together() -> dict:
    history, balance = trained(
        network(), keras.optimizers.SGD(0.0), epochs=9, policy=UNEQUAL,
        callbacks=[keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e-3)],
    )  # fmt: skip
    return {"epochs": len(history["loss"]), "rounds": balance.rounds}


def a_rank_that_stops_in_the_middle_takes_the_others_with_it() -> dict:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvd.rank() == 1 and batch == 2:
                self.model.stop_training = True

    model = network()
    history, balance = trained(model, "sgd", epochs=5, callbacks=[Stop()])
    return {"epochs": len(history["loss"]), "rounds": balance.rounds, "spread": spread(model)}


def a_rank_that_stops_at_the_end_of_an_epoch_takes_the_others_with_it() -> dict:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if hvd.rank() == 1 and epoch == 1:
                self.model.stop_training = True

    model = network()
    model.compile("sgd", "mse")
    balance = LoadBalance(global_batch=BATCH)
    history = model.fit(resize_batches(data(), balance), epochs=5, verbose=0, callbacks=[Stop(), balance])
    return {"epochs": len(history.history["loss"]), "rounds": balance.rounds, "spread": spread(model)}


def an_epoch_to_start_with_is_that_epoch() -> dict:
    """Resuming at epoch 1 with the weights that epoch 0 ended with gives the samples, and so the weights, of three."""

    class FirstEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                ended_with.extend(self.model.get_weights())

    ended_with: list[np.ndarray] = []
    model = network()
    trained(model, keras.optimizers.SGD(0.1), policy=UNEQUAL, epochs=3, callbacks=[FirstEpoch()])
    through = model.get_weights()
    model.set_weights(ended_with)
    trained(model, keras.optimizers.SGD(0.1), policy=UNEQUAL, epochs=3, initial_epoch=1)
    pairs = zip(through, model.get_weights(), strict=True)
    return {"difference": max(float(np.abs(a - b).max()) for a, b in pairs)}


def a_dataset_of_samples_is_shared_out() -> dict:
    """All ranks read the whole, and each sample goes to one of them."""
    seen: list[int] = []

    class Watched(keras.Model):
        def train_step(self, batch):
            tf.numpy_function(lambda i: seen.extend(i.ravel().tolist()), [batch[1]], [])
            return super().train_step(batch)

    inputs = keras.layers.Input((FEATURES,))
    model = Watched(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    balance = LoadBalance(UNEQUAL, global_batch=10)
    samples = tf.data.Dataset.from_tensor_slices((data()[0], np.arange(SAMPLES)[:, None]))
    batches = resize_batches(samples, balance, shuffle=True)
    model.fit(batches, epochs=2, verbose=0, callbacks=[balance])
    return {
        "seen": hvd.allgather_object(seen),
        "rounds": balance.rounds,
        "steps": int(batches.cardinality()),
    }


def a_loop_of_ones_own() -> dict:
    """weighted_gradients, in a tf.function and without, gives what fit gives."""
    weights = []
    for compiled in (True, False, None):
        keras.utils.set_random_seed(5 + hvd.rank())
        model, optimizer = network(), keras.optimizers.SGD(0.1)
        balance = LoadBalance(UNEQUAL, global_batch=BATCH)
        batches = resize_batches(data(), balance, shuffle=True)
        if compiled is None:
            model.compile(optimizer, "mse")
            model.fit(batches, epochs=2, verbose=0, callbacks=[balance], shuffle=False)
        else:
            optimizer.build(model.trainable_variables)
            balance.start(model, optimizer)

            def step(x, y, model=model, optimizer=optimizer, balance=balance):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            run = tf.function(step, reduce_retracing=True) if compiled else step
            for _ in range(2):
                for x, y in balance.batches(batches):
                    run(x, y)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    return {
        "compiled": float(np.abs(weights[0] - weights[2]).max()),
        "eager": float(np.abs(weights[1] - weights[2]).max()),
        "spread": spread(model),
    }


def eager_training() -> dict:
    model = network()
    _, balance = trained(model, "sgd", policy=UNEQUAL, epochs=1, compiled={"loss": "mse", "run_eagerly": True})
    return {"spread": spread(model), "rounds": balance.rounds}


PARTS = (keras_devices, keras_history, keras_models, keras_ports, keras_refusals, keras_starts, keras_streams)


def functions() -> dict[str, Callable[[], Any]]:
    """All that this file and its parts define; those that take a folder get one that ranks share."""
    known = {name: value for part in PARTS for name, value in vars(part).items()} | globals()
    found = {name: partial(in_a_folder, value) for name, value in known.items() if callable(value)}
    return found | keras_ports.CASES


def in_a_folder(case: Callable[..., Any]) -> Any:
    keras.utils.set_random_seed(100 + hvd.rank())
    if not case.__code__.co_argcount:
        return case()
    with tempfile.TemporaryDirectory() as mine:
        folder = hvd.broadcast_object(mine, root_rank=0, name="folder")
        outcome = case(Path(folder))
        hvd.broadcast_object(None, root_rank=0, name="end")
    return outcome


if __name__ == "__main__":
    keras_devices.make_place()
    serve(hvd, functions())
