"""One rank of the behaviour tests for Keras: what users do in ``fit`` and around it, each in a function of its own."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_exactness import EveryRoundAnother

from hvd_hetero.policies import NonBlocking, StaticAllocation
from hvd_hetero.testing import report
from keras_callbacks import (
    LearningRateSchedule,
    LearningRateWarmup,
    LoadBalance,
    resize_batches,
    weighted_gradients,
)

keras = tf.keras
FEATURES, SAMPLES, BATCH = 4, 50, 8  # seven rounds an epoch, the last one of two samples
UNEQUAL = StaticAllocation([3, 1])  # always one rank with more, in micro-batches


def data(outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(7).normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True) + np.arange(outputs)).astype("float32")


def network(*, outputs: int = 1, **options: Any) -> Any:
    inputs = keras.layers.Input((FEATURES,))
    hidden = keras.layers.Dense(6, activation="tanh", **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs, dtype="float32")(hidden))


def spread(model: Any) -> float:
    """The largest difference of a weight between two ranks."""
    flat = np.concatenate([w.ravel() for w in model.get_weights()])
    every = np.stack(hvd.allgather_object(flat))
    return float(np.abs(every - every[0]).max())


def trained(
    model: Any, optimizer: Any, *, policy: Any = "lb-bsp", epochs: int = 2, callbacks: Any = (), arrays: Any = None,
    compiled: dict | None = None, resized: dict | None = None, **fit: Any,
) -> tuple[dict[str, list[float]], LoadBalance]:  # fmt: skip
    model.compile(optimizer, **({"loss": "mse"} if compiled is None else compiled))
    balance = LoadBalance(policy, global_batch=BATCH)
    batches = resize_batches(data() if arrays is None else arrays, balance, shuffle=True, **(resized or {}))
    fit = {"verbose": 0, "shuffle": False, **fit}
    history = model.fit(batches, epochs=epochs, callbacks=[balance, *callbacks], **fit)
    return history.history, balance


def alone(model: Any, start: list[np.ndarray], optimizer: Any, **compiled: Any) -> Any:
    """A copy of a model at its start, to train in this process alone."""
    copy = keras.models.clone_model(model)
    copy.set_weights(start)
    copy.compile(optimizer, **({"loss": "mse"} | compiled))
    return copy


class Start(keras.callbacks.Callback):
    """Takes down the weights that training starts with."""

    weights: list[np.ndarray] = []  # noqa: RUF012 - one test at a time

    def on_train_begin(self, logs=None):
        Start.weights = self.model.get_weights()


def against_one_process(
    optimizer: Callable[[], Any], *, compiled: dict, arrays: Any, epochs: int = 2, **fit: Any
) -> dict:
    """The largest relative difference from training one process by Keras alone on the same global batches."""
    model = network(outputs=arrays[1].shape[-1])
    _, balance = trained(
        model, optimizer(), policy=UNEQUAL, epochs=epochs, callbacks=[Start()], compiled=compiled, arrays=arrays,
        resized={"seed": 4}, **fit,
    )  # fmt: skip
    single = alone(model, Start.weights, optimizer(), **compiled)
    batches = None
    for epoch in range(epochs):
        order = np.arange(len(arrays[0]))
        np.random.Generator(np.random.PCG64([4, epoch])).shuffle(order)
        one = tf.data.Dataset.from_tensor_slices(tuple(a[order] for a in arrays)).batch(BATCH)
        batches = one if batches is None else batches.concatenate(one)
    single.fit(batches, epochs=1, verbose=0, shuffle=False, **fit)
    pairs = zip(model.get_weights(), single.get_weights(), strict=True)
    return {
        "difference": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
        "spread": spread(model),
        "rounds": balance.rounds,
    }


def nothing_is_traced_again_after_the_first_round() -> dict:
    traces = []

    class Counted(keras.Model):
        def train_step(self, batch):
            traces.append(balance.rounds if balance.fitting else -1)
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


def metrics_are_those_of_all_samples() -> dict:
    """Also those that are no mean; compared with one evaluation of the same frozen model on all samples."""
    x, y = data()
    labels = (y > 0).astype("float32")
    model = network()
    model.trainable = True
    metrics = [keras.metrics.AUC(name="auc", from_logits=True), "mae"]
    history, _ = trained(
        model, keras.optimizers.SGD(0.0), policy=UNEQUAL, epochs=1, arrays=(x, labels),
        compiled={"loss": "mse", "metrics": metrics}, validation_data=(x[hvd.rank() :: 2], labels[hvd.rank() :: 2]),
    )  # fmt: skip
    single = alone(model, model.get_weights(), "sgd", metrics=[keras.metrics.AUC(name="auc", from_logits=True), "mae"])
    whole = single.evaluate(x, labels, verbose=0, return_dict=True)
    return {
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


def checkpoints_hold_what_was_trained_and_load_without_the_package(folder: Path) -> dict:
    path = str(folder / "model.keras")
    model = network()
    callbacks = [keras.callbacks.ModelCheckpoint(path)] if hvd.rank() == 0 else []  # as is the custom
    trained(model, keras.optimizers.Adam(0.01), callbacks=callbacks)
    outcome = {"optimizer": type(model.optimizer).__name__}
    hvd.broadcast_object(None, root_rank=0, name="saved")
    loaded = keras.models.load_model(path)
    pairs = zip(loaded.get_weights(), model.get_weights(), strict=True)
    outcome["difference"] = max(float(np.abs(a - b).max()) for a, b in pairs)
    outcome["loaded optimizer"] = type(loaded.optimizer).__name__
    loaded.optimizer.build(loaded.trainable_variables)
    outcome["moments"] = float(sum(np.abs(v.numpy()).sum() for v in loaded.optimizer.variables[1:]))
    _, balance = resumed = trained(loaded, loaded.optimizer, epochs=1)
    assert resumed
    outcome |= {"spread": spread(loaded), "rounds": balance.rounds}
    return outcome


def loss_scales_skip_a_step_alike_on_all_ranks() -> dict:
    """A gradient that overflows on one rank alone: all skip the update, halve the scale, and go on together."""
    scaled = keras.mixed_precision.LossScaleOptimizer
    x, y = data()
    y[11] = 1e38  # in the global batch of one round, on one rank
    model = network()
    optimizer = scaled(keras.optimizers.SGD(0.01), initial_scale=1024.0)
    _, balance = trained(model, optimizer, policy=UNEQUAL, epochs=1, arrays=(x, y))
    scale = float(optimizer.dynamic_scale if hasattr(optimizer, "dynamic_scale") else optimizer.loss_scale)
    finite = all(bool(np.isfinite(w).all()) for w in model.get_weights())
    return {"scale": scale, "finite": finite, "spread": spread(model), "rounds": balance.rounds}


def mixed_precision() -> dict:
    model = network(dtype="mixed_float16")
    history, _ = trained(model, keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.05)), epochs=6)
    return {"first": history["loss"][0], "last": history["loss"][-1], "spread": spread(model)}


def options_of_the_optimizer_and_of_fit_match_one_process() -> dict:
    x, y = data()
    _, two = data(2)
    sgd = keras.optimizers.SGD
    weights = np.random.default_rng(3).uniform(0.2, 2.0, SAMPLES).astype("float32")
    labels = (y[:, 0] > 0).astype("int64")[:, None]
    cases = {
        "clipnorm": ((lambda: sgd(0.1, clipnorm=0.05)), {}, (x, y), {}),
        "global_clipnorm": ((lambda: sgd(0.1, global_clipnorm=0.05)), {}, (x, y), {}),
        "clipvalue": ((lambda: sgd(0.1, clipvalue=0.01)), {}, (x, y), {}),
        "ema": ((lambda: sgd(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)), {}, (x, y), {}),
        "schedule": ((lambda: sgd(keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5))), {}, (x, y), {}),
        "sample_weight": ((lambda: sgd(0.1)), {}, (x, y, weights), {}),
        "class_weight": ((lambda: sgd(0.1)), {}, (x, labels), {"class_weight": {0: 0.3, 1: 2.0}}),
        "two outputs": ((lambda: sgd(0.1)), {}, (x, two), {}),
    }
    return {
        name: against_one_process(optimizer, compiled={"loss": "mse", **compiled}, arrays=arrays, **fit)
        for name, (optimizer, compiled, arrays, fit) in cases.items()
    }


def several_outputs_by_name() -> dict:
    x, y = data()
    inputs = keras.layers.Input((FEATURES,), name="features")
    hidden = keras.layers.Dense(5, activation="relu")(inputs)
    a, b = keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)
    model = keras.Model(inputs, {"a": a, "b": b})
    history, _ = trained(
        model, "adam", policy=UNEQUAL, arrays=({"features": x}, {"a": y, "b": -y}),
        compiled={"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 1.0, "b": 0.5}},
    )  # fmt: skip
    return {"keys": sorted(history), "spread": spread(model)}


def a_train_step_of_ones_own() -> dict:
    class Own(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"own": loss}

    inputs = keras.layers.Input((FEATURES,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    history, _ = trained(model, "sgd", policy=UNEQUAL)
    return {"logs": hvd.allgather_object(history["own"]), "spread": spread(model)}


def running_statistics_and_seeds_stay_with_a_rank_without_data() -> dict:
    inputs = keras.layers.Input((FEATURES,))
    normal = keras.layers.BatchNormalization()
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(normal(inputs))))
    before = [w.numpy() for w in normal.non_trainable_variables]
    trained(model, "sgd", policy=StaticAllocation([0, 1]), epochs=1)
    moved = max(float(np.abs(w.numpy() - b).max()) for w, b in zip(normal.non_trainable_variables, before, strict=True))
    return {"moved": hvd.allgather_object(moved)}


def an_epoch_to_start_with_is_that_epoch() -> dict:
    """Resuming at epoch 1 gives the samples, and so the weights, of having trained epoch 0 before."""
    model = network()
    trained(model, keras.optimizers.SGD(0.1), policy=UNEQUAL, epochs=3, callbacks=[Start()])
    through = model.get_weights()
    model.set_weights(Start.weights)
    trained(model, keras.optimizers.SGD(0.1), policy=UNEQUAL, epochs=1)
    trained(model, keras.optimizers.SGD(0.1), policy=UNEQUAL, epochs=3, initial_epoch=1)
    pairs = zip(through, model.get_weights(), strict=True)
    return {"difference": max(float(np.abs(a - b).max()) for a, b in pairs)}


def plateaus_and_logs(folder: Path) -> dict:
    callbacks = [keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0)]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.CSVLogger(str(folder / "log.csv")))
    model = network()
    trained(model, keras.optimizers.SGD(0.1), epochs=4, callbacks=callbacks)
    written = (folder / "log.csv").read_text().splitlines() if hvd.rank() == 0 else []
    rate = float(tf.convert_to_tensor(model.optimizer.learning_rate))
    return {"rates": hvd.allgather_object(rate), "spread": spread(model), "written": len(written)}


def a_dataset_of_samples_is_shared_out() -> dict:
    """Each rank its shard; every sample is seen equally often where ranks get equal batches."""
    seen: list[int] = []

    class Watched(keras.Model):
        def train_step(self, batch):
            tf.numpy_function(lambda i: seen.extend(i.ravel().tolist()), [batch[1]], [])
            return super().train_step(batch)

    inputs = keras.layers.Input((FEATURES,))
    model = Watched(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    outcome = {}
    for name, policy in (("equal", "bsp"), ("unequal", UNEQUAL)):
        seen.clear()
        balance = LoadBalance(policy, global_batch=10)
        samples = tf.data.Dataset.from_tensor_slices((data()[0], np.arange(SAMPLES)[:, None]))
        batches = resize_batches(samples, balance, shuffle=True)
        model.fit(batches, epochs=2, verbose=0, callbacks=[balance])
        outcome[name] = {
            "seen": hvd.allgather_object(list(seen)),
            "rounds": balance.rounds,
            "steps": int(batches.cardinality()),
        }
    return outcome


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


def two_trainings_one_after_the_other_and_one_without() -> dict:
    model = network()
    _, balance = trained(model, "sgd", epochs=1)
    try:
        model.fit(*data(), verbose=0)
        refusal = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        refusal = f"{type(error).__name__}: {error}"
    balance.release()
    if hvd.rank() == 0:
        model.fit(*data(), verbose=0)  # on this rank alone
    history, _ = trained(model, model.optimizer, epochs=1)
    return {"refusal": refusal, "spread": spread(model), "loss": history["loss"][0]}


def ranks_with_other_rates_or_data_are_found_out() -> dict:
    outcome = {}
    for what in ("rate", "data"):
        model = network()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        batches = resize_batches(data(), balance, shuffle=True, seed=hvd.rank() if what == "data" else 0)

        class Other(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2 and hvd.rank() == 1 and what == "rate":  # noqa: B023
                    self.model.optimizer.learning_rate = 0.05

        try:
            model.fit(batches, verbose=0, callbacks=[balance, Other()])
            outcome[what] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            outcome[what] = f"{type(error).__name__}: {error}"
    return outcome


def what_cannot_work() -> dict:
    """Attempt and refusal. None of them reaches a collective."""
    x, y = data()

    def fit(data: Any = None, **compiled: Any) -> None:
        model = network()
        model.compile(**({"optimizer": "sgd", "loss": "mse"} | compiled))
        balance = LoadBalance(global_batch=BATCH)
        batches = resize_batches((x, y), balance)
        model.fit(batches if data is None else data, verbose=0, callbacks=[balance])

    def forgotten() -> None:
        model = network()
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0, callbacks=[LoadBalance(global_batch=BATCH)])

    def horovods_own() -> None:
        import horovod.tensorflow.keras as horovod

        fit(optimizer=horovod.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    balance = LoadBalance(global_batch=BATCH)
    attempts: dict[str, Callable[[], Any]] = {
        "forgotten resize_batches": forgotten,
        "XLA": lambda: fit(jit_compile=True),
        "steps_per_execution": lambda: fit(steps_per_execution=2),
        "horovod's own optimizer": horovods_own,
        "small batch": lambda: LoadBalance(global_batch=1),
        "policy": lambda: LoadBalance("lbbsp", global_batch=BATCH),
        "local layers": lambda: LoadBalance(sync="d-psgd", global_batch=BATCH, local_layers=[keras.layers.Dense(1)]),
        "lists": lambda: resize_batches(([[1.0]], [[2.0]]), balance),
        "lengths": lambda: resize_batches((x, y[:-1]), balance),
        "balance": lambda: resize_batches((x, y), 32),
        "prefetch of a dataset": lambda: resize_batches(
            tf.data.Dataset.from_tensor_slices(x), LoadBalance(global_batch=BATCH), prefetch=1
        ),
        "prefetch": lambda: resize_batches((x, y), balance, prefetch=-1),
        "prefetch of what is not known": lambda: resize_batches(
            (x, y), LoadBalance(NonBlocking(2), global_batch=BATCH), prefetch=1
        ),
        "shuffled batches": lambda: resize_batches((x, y), balance).shuffle(3),
        "batched again": lambda: resize_batches((x, y), balance).batch(3),
        "warm-up": lambda: LearningRateWarmup(0.1, warmup_epochs=0),
        "schedule": lambda: LearningRateSchedule(0.1, 0.5, start_epoch=3, end_epoch=3),
    }
    refusals = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            refusals[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            refusals[name] = f"{type(error).__name__}: {error}"
    return refusals


def main() -> None:
    hvd.init()
    outcome: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if hvd.rank() == 0 else ""
        folder = hvd.broadcast_object(folder, root_rank=0, name="folder")
        chosen = sys.argv[1].split(",")
        for name in chosen:
            test = globals()[name]
            keras.utils.set_random_seed(100 + hvd.rank())
            takes = test.__code__.co_argcount
            try:
                outcome[name] = test(Path(folder)) if takes else test()
            except Exception:  # noqa: BLE001 - one that all ranks meet leaves the other tests their say
                outcome[name] = {"failed": traceback.format_exc()}
            print(name, flush=True)
        hvd.broadcast_object(None, root_rank=0, name="end")
    report(outcome)


if __name__ == "__main__":
    main()
