"""Loops of the user's own: what they sum, join and are traced for; on one rank, without horovodrun."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance, average_by_samples, resize_batches, weighted_gradients  # noqa: E402

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

    with pytest.raises(tf.errors.UnknownError, match=r"weighted_gradients.*sum of the"):
        (tf.function(step) if graph else step)(*next(balance.batches(resize_batches((X, Y), balance))))


@pytest.mark.parametrize("how", ["signature", "retracing"])
def test_a_step_is_traced_once_or_twice_for_batches_of_all_sizes(how):
    model, balance, traces = network(), LoadBalance("bsp", global_batch=9), []
    optimizer = keras.optimizers.SGD()
    balance.start(model, optimizer)
    x = np.repeat(np.arange(1, 6, dtype="float32"), 18).reshape(45, 2)  # five rounds
    batches = resize_batches((x, x[:, :1]), balance).map(
        lambda x, y: (x[: tf.cast(y[0, 0], tf.int32)], y[: tf.cast(y[0, 0], tf.int32)])
    )
    options = {"input_signature": batches.element_spec} if how == "signature" else {"reduce_retracing": True}

    @tf.function(**options)
    def step(x, y):
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    sizes = []
    for x, y in balance.batches(batches):
        step(x, y)
        sizes.append(len(x))
        assert balance.samples == 9
    assert sizes == [1, 2, 3, 4, 5]
    assert len(traces) == (1 if how == "signature" else 2)


def test_figures_are_averaged_by_name():
    found = average_by_samples({"a": 2.0, "b": tf.constant([1.0, 3.0]), "c": np.ones(2)}, 3)
    assert list(found) == ["a", "b", "c"]
    assert isinstance(found["a"], float)
    assert found["a"] == 2.0
    assert found["b"].tolist() == [1.0, 3.0]
    assert found["c"].tolist() == [1.0, 1.0]
    assert average_by_samples(keras.metrics.Mean()(4.0), 1) == 4.0
    with pytest.raises(ValueError, match=r"samples.* 0 .*every rank"):
        average_by_samples(float("nan"), 0)


def test_data_resized_anew_for_every_epoch_of_a_loop_come_in_another_order_each_time():
    model, balance, x = network(), LoadBalance("bsp", global_batch=8), np.arange(16, dtype="float32").reshape(8, 2)
    balance.start(model, model.optimizer)
    orders = []
    for _ in range(3):
        for inputs, y in balance.batches(resize_batches((x, Y), balance, shuffle=True)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs) - y) ** 2)
            weighted_gradients(tape, loss, model.trainable_variables, balance)
            orders.append(str(inputs.numpy()))
    assert len(set(orders)) == 3
