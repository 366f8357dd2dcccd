"""The part of ``keras_behaviour.py`` about elastic state: commit, restore, sync, and what a fit does after resets."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from keras_callbacks.elastic import KerasState

keras = tf.keras
BATCH, SAMPLES, EPOCHS = 8, 44, 3  # six rounds an epoch, the last one short


def network(number: float, optimizer: Any) -> Any:
    """All weights the same number."""
    start = keras.initializers.Constant(number)
    layer = keras.layers.Dense(2, kernel_initializer=start, bias_initializer=start)
    model = keras.Sequential([keras.layers.Input((2,)), layer])
    model.compile(optimizer, "mse")
    return model


def snapshot(state: KerasState) -> dict[str, Any]:
    optimizer = state.model.optimizer
    rate, scale = optimizer.learning_rate, getattr(optimizer, "dynamic_scale", getattr(optimizer, "loss_scale", 0.0))
    return {
        "weight": sorted({float(x) for w in state.model.get_weights() for x in w.ravel()}),
        "rate": round(float(tf.convert_to_tensor(rate)), 6),
        "scale": float(tf.convert_to_tensor(scale)),
        "epoch": state.epoch,
        "batch": state.batch,
        "best": state.best,
    }


def state_is_committed_restored_and_synchronised() -> dict:
    """What the state holds after each call; every rank begins with numbers of its own."""
    rank = hvd.rank()
    inner = keras.optimizers.Adam(0.001 * (rank + 1))
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1024.0 * (rank + 1))
    model = network(1.0 + rank, optimizer)
    state = KerasState(model, batch=20 + rank, epoch=10 + rank, best=0.5 + rank)
    outcome = {"made": snapshot(state)}

    def change() -> None:
        model.set_weights([np.full_like(w, 7.0) for w in model.get_weights()])
        optimizer.learning_rate = 0.25
        state.batch, state.epoch, state.best = 21, 11, 0.25

    state.sync()
    outcome["synchronised"] = snapshot(state)
    change()
    state.restore()
    outcome["restored"] = snapshot(state)
    change()
    state.commit()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    state.restore()
    outcome["committed"] = snapshot(state)
    return outcome


CASES: dict[str, Any] = {
    "elastic state": state_is_committed_restored_and_synchronised,
}
