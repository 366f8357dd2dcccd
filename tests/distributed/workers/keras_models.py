"""The part of ``keras_behaviour.py`` about models, optimizers and train steps of many kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_fits import FEATURES, UNEQUAL, against_one_process, data, network, spread, trained
from told_speeds import supersteps

from hvd_hetero.policies import StaticAllocation

keras = tf.keras


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


@keras.utils.register_keras_serializable()
class Clips(keras.optimizers.SGD):
    """In an ``apply_gradients`` of its own."""

    def apply_gradients(self, grads_and_vars, **options):
        gradients, variables = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.05)
        return super().apply_gradients(zip(clipped, variables, strict=True), **options)


# Several options at a time, which have nothing to do with each other: a fit takes as long with one as with three.


def ema_class_weights_and_an_update_of_ones_own() -> dict:
    x, y = data()
    labels = (y > 0).astype("int64")
    ema = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}

    def make(rank: int) -> Any:
        model = network()
        model.compile(Clips(0.1, global_clipnorm=0.04, **ema), "mse")
        return model

    return against_one_process(make, (x, labels), UNEQUAL, class_weight={0: 0.3, 1: 2.0})


def local_updates_follow_a_schedule() -> dict:
    """Ranks that make different numbers of updates are at different places of a schedule, and nothing is wrong."""
    model = network()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    _, balance = trained(model, keras.optimizers.SGD(rate), policy=supersteps(updates="local"), epochs=3)
    return {
        "updates": hvd.allgather_object(int(model.optimizer.iterations)),
        "rounds": balance.rounds,
        "spread": spread(model),
    }


def running_statistics_and_seeds_stay_with_a_rank_without_data() -> dict:
    inputs = keras.layers.Input((FEATURES,))
    normal = keras.layers.BatchNormalization()
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(normal(inputs))))
    before = [w.numpy() for w in normal.non_trainable_variables]
    trained(model, "sgd", policy=StaticAllocation([0, 1]), epochs=1)
    moved = max(float(np.abs(w.numpy() - b).max()) for w, b in zip(normal.non_trainable_variables, before, strict=True))
    return {"moved": hvd.allgather_object(moved)}
