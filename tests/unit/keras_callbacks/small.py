"""A network of one layer, data of eight samples, and a fit of both: for tests on one rank."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvd_hetero.policies import BSP
from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
SEVERAL = BSP(max_micro_batch=2)


class Stepping(keras.Model):
    """A train step of its own, which calls the optimizer so many times."""

    times = 1

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(batch[0]) - batch[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for _ in range(self.times):
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


def network(kind=Stepping, optimizer="sgd", **compiled):
    inputs = keras.layers.Input((2,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse", **compiled)
    return model


def fit(
    model=None, policy="bsp", *, data=(X, Y), change=lambda batches: batches, resized=None, epochs=1,
    steps_per_epoch=None, callbacks=(), **options,
):  # fmt: skip
    """Return the history of a fit, and its balance. ``options`` of LoadBalance; ``change`` follows resize_batches."""
    model = network() if model is None else model
    balance = LoadBalance(policy, **{"global_batch": 4} | options)
    batches = change(resize_batches(data, balance, **resized or {}))
    told = model.fit(
        batches, epochs=epochs, steps_per_epoch=steps_per_epoch, verbose=0, shuffle=False,
        callbacks=[balance, *callbacks],
    )  # fmt: skip
    return told.history, balance
