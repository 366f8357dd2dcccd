"""What leaves in the graph together, and what it waits for: read off the graph, without a clock."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.policies import BSP  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches  # noqa: E402
from keras_callbacks.exchange import AllReduce  # noqa: E402
from keras_callbacks.graph import backwards_times  # noqa: E402

keras = tf.keras
MIB = 2**18
"""float32 numbers"""


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def collectives(*lengths):
    return of(*(tf.TensorSpec((length,), tf.float32) for length in lengths))


def graph_of(*specs, weighed=False):
    exchange = AllReduce(LoadBalance("bsp", global_batch=4))
    round_ = tf.function(lambda *g: exchange(list(g), tf.constant(0.5, tf.float64), weighed=weighed))
    return round_.get_concrete_function(*specs).graph


def of(*specs):
    """Each collective of a round with such gradients: what it holds, what it waits for, and its type.

    Gradients are told by their numbers, the table by "table".
    """
    graph = graph_of(*specs)
    numbers = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}
    found = []
    for operation in graph.get_operations():
        if operation.type == "HorovodGroupedAllreduce":
            assert "HorovodAllreduce" in operation.name, "by which elastic mode knows it"
            holds = [numbers.get(source(t).name, "table") for t in operation.inputs]
            waits_for = {numbers[o.name] for o in ancestors(operation) if o.name in numbers}
            found.append((holds, waits_for, operation.inputs[0].dtype))
    return found


def source(tensor):
    """The gradient, or the call, that a tensor is the first operand of."""
    while tensor.op.inputs and tensor.op.type not in ("PyFunc", "EagerPyFunc"):
        tensor = tensor.op.inputs[0]
    return tensor.op


def ancestors(operation):
    seen, open_ = set(), [operation]
    while open_:
        new = [t.op for t in open_[-1].inputs] + list(open_.pop().control_inputs)
        open_ += [o for o in new if o not in seen]
        seen.update(new)
    return seen


def test_a_bucket_waits_for_its_own_gradients_alone_and_the_table_for_all():
    found = collectives(*[MIB // 2] * 40)
    assert len(found) > 3
    for holds, waits_for, _ in found[:-1]:
        assert "table" not in holds
        assert waits_for == set(holds)
    holds, waits_for, _ = found[-1]
    assert holds[-1] == "table"
    assert waits_for == set(range(40))
    assert sorted(i for held, _, _ in found for i in held if i != "table") == list(range(40))


def test_the_last_variables_leave_first():
    assert collectives(8, 2 * MIB, 8, 2 * MIB)[0][0] == [3]


def test_a_large_gradient_travels_by_itself_and_does_not_take_the_table():
    found = collectives(2 * MIB, 8, 2 * MIB, 8)
    assert [holds for holds, _, _ in found] == [[2], [3, 1], [0], ["table"]]
    assert found[-1][2] == tf.float64, "of another type, so that Horovod does not fuse it with what leaves beside it"


def test_gradients_of_different_types_do_not_share_a_collective():
    found = of(*(tf.TensorSpec((4,), dtype) for dtype in (tf.float16, tf.float32, tf.float64, tf.float16)))
    assert [holds for holds, _, _ in found] == [[2], [1], [3, 0], ["table"]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_table_is_fused_with_a_small_last_bucket(dtype):
    (only,) = of(tf.TensorSpec((4, 4), dtype), tf.TensorSpec((4,), dtype))
    assert only == ([1, 0, "table"], {0, 1}, dtype)


def test_weighted_gradients_are_not_multiplied_again_and_wait_for_their_bucket_alone():
    graph = graph_of(*[tf.TensorSpec((2 * MIB,), tf.float32)] * 3, weighed=True)
    assert not [o.name for o in graph.get_operations() if "Mul" in o.type]
    gradients = {t.op.name for t in graph.inputs}
    waits = [
        len(gradients & {o.name for o in ancestors(operation)})
        for operation in graph.get_operations()
        if operation.type == "HorovodGroupedAllreduce"
    ]
    assert waits == [1, 1, 1, 3], "each gradient by itself, and the table after all of them"


@pytest.mark.parametrize("weighed", [False, True])
def test_what_weighs_nothing_is_zero_even_where_it_is_not_a_number(weighed):
    exchange = AllReduce(LoadBalance("bsp", global_batch=4))
    exchange._sum_with_table = lambda tensors, after, of=list: (of(tensors), tf.constant(1.0, tf.float64))
    gradients = [tf.constant([1.0, float("nan")]), tf.constant([float("inf")], tf.float16)]

    def sent(weight):
        return [g.numpy().tolist() for g in exchange(gradients, tf.constant(weight, tf.float64), weighed=weighed)]

    assert sent(0.0) == [[0.0, 0.0], [0.0]]
    assert sent(0.25)[0][0] == (1.0 if weighed else 0.25)
    assert np.isnan(sent(0.25)[0][1]), "what weighs something shows that it is wrong"


def trained(model=None, *, policy="bsp", optimizer="sgd", **options):
    """A model after a fit of two rounds."""
    if model is None:
        inputs = keras.layers.Input((2,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.get(optimizer), "mse")
    balance = LoadBalance(policy, global_batch=4, **options)
    x = np.ones((8, 2), "float32")
    model.fit(resize_batches((x, x[:, :1]), balance), verbose=0, shuffle=False, callbacks=[balance])
    return model, balance


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnUpdate(keras.optimizers.SGD):
    """Something of the user's between the loss and the update, in either Keras."""

    def apply_gradients(self, *args, **options):
        return super().apply_gradients(*args, **options)

    def compute_gradients(self, *args, **options):
        return super().compute_gradients(*args, **options)


def weighs_the_loss(model):
    return "compute_loss" in model.__dict__


def test_the_loss_is_weighed_where_its_gradients_are_what_is_applied():
    model, balance = trained()
    assert weighs_the_loss(model)
    balance.release()
    assert not weighs_the_loss(model)


def test_the_loss_is_left_alone_where_something_of_the_users_would_see_it():
    inputs = keras.layers.Input((2,))
    layer = keras.layers.Dense(1)
    assert not weighs_the_loss(trained(OwnStep(inputs, layer(inputs)))[0])
    assert not weighs_the_loss(trained(optimizer=OwnUpdate(0.1))[0])
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert not weighs_the_loss(trained(optimizer=scaled)[0])
    assert not weighs_the_loss(trained(policy=BSP(max_micro_batch=2))[0]), "whose weight is known at the end alone"
    hidden = keras.layers.Dense(2)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden(inputs)))
    assert not weighs_the_loss(trained(model, local_layers=[hidden])[0]), "whose gradients are not averaged"


def test_a_loss_of_the_users_own_is_asked_and_given_back():
    inputs = keras.layers.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    asked = []

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, **_):
        asked.append(y_pred.shape)
        return tf.reduce_mean((y_pred - y) ** 2)

    object.__setattr__(model, "compute_loss", compute_loss)
    _, balance = trained(model)
    assert asked
    balance.release()
    assert model.compute_loss is compute_loss


def test_the_loss_is_told_as_it_is_and_its_gradient_weighted():
    x = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        loss = backwards_times(tf.constant(0.25, tf.float64), tf.reduce_sum(x**2))
    assert float(loss) == 25.0
    assert tape.gradient(loss, x).numpy().tolist() == [1.5, 2.0]
