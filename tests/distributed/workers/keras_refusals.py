"""The part of ``keras_behaviour.py`` about what is refused, and about ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from keras_fits import BATCH, data, network, spread, trained

from hvd_hetero.policies import NonBlocking
from keras_callbacks import LearningRateSchedule, LearningRateWarmup, LoadBalance, resize_batches

keras = tf.keras


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
    for what in ("rate", "data", "weights", "epochs", "shapes", "layers"):
        alone = hvd.rank() == 1
        model = network(outputs=1 + (what == "shapes" and alone))
        if what == "layers" and alone:
            model = keras.Sequential([model, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        balance = LoadBalance("bsp", global_batch=BATCH)
        batches = resize_batches(data(), balance, shuffle=True, seed=hvd.rank() if what == "data" else 0)

        class Other(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2 and alone and what == "rate":  # noqa: B023
                    self.model.optimizer.learning_rate = 0.05
                if batch == 2 and alone and what == "weights":  # noqa: B023
                    self.model.set_weights([w + 1.0 for w in self.model.get_weights()])

        try:
            epochs = 1 + (what == "epochs" and alone)
            model.fit(batches, epochs=epochs, verbose=0, callbacks=[balance, Other()])
            outcome[what] = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            outcome[what] = f"{type(error).__name__}: {error}"
    return outcome | {name: _without_samples(known) for name, known in (("no file", True), ("all filtered", False))}


def _without_samples(known: bool) -> str:
    """What a fit says whose shard on rank 1 has no sample, as is known beforehand, or not."""
    model = network()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    balance = LoadBalance("bsp", global_batch=BATCH)
    samples, alone = tf.data.Dataset.from_tensor_slices(data()), hvd.rank() == 1
    mine = samples.take(0 if alone else -1) if known else samples.filter(lambda x, y: not alone)
    try:
        model.fit(resize_batches(mine, balance, stream="shard"), verbose=0, callbacks=[balance])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def what_cannot_work() -> dict:
    """Attempt and refusal, before the first round."""
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
        "batches from elsewhere": lambda: fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4)),
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
