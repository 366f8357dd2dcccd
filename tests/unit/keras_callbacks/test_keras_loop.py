"""Loops of the user's own: what they sum, join and are traced for; on one rank, without horovodrun."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance, resize_batches, weighted_gradients  # noqa: E402

keras = tf.keras
X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def network():
    inputs = keras.layers.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("graph", [False, True], ids=["eagerly", "in a tf.function"])
def test_a_loop_that_sums_gradients_twice_in_a_round_is_told_so(graph):
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    balance.start(model, model.optimizer)

    def step(x, y):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            weighted_gradients(tape, loss, model.trainable_variables, balance)

    with pytest.raises(tf.errors.UnknownError, match=r"weighted_gradients was called twice for one batch.*sum of the"):
        (tf.function(step) if graph else step)(*next(balance.batches(resize_batches((X, Y), balance))))
