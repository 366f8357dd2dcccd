"""What leaves in the graph together, and what it waits for: read off the graph, without a clock."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.policies import BSP  # noqa: E402
from keras_callbacks import LoadBalance, keras_versions, resize_batches  # noqa: E402
from keras_callbacks.keras_versions import gradients_pass_through  # noqa: E402
from keras_callbacks.start import average, start_alike  # noqa: E402
from keras_callbacks.step.graph import GraphRound  # noqa: E402
from keras_callbacks.step.graph_synchroniser import GraphAllreduce, correction_of, parcels  # noqa: E402
from keras_callbacks.tensorflow_wire import TensorFlowWire  # noqa: E402

keras = tf.keras
MIB = 2**18
"""float32 numbers"""
SHARE = [0.5, 2.0, 4.0, 1.0, 0.0]


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def collectives(*lengths):
    return of(*(tf.TensorSpec((length,), tf.float32) for length in lengths))


def all_reduce():
    return GraphAllreduce(LoadBalance("bsp", global_batch=4)._session.calls)


def graph_of(*specs, weighed=False):
    synchroniser = all_reduce()
    round_ = tf.function(lambda *g: synchroniser(list(g), tf.constant(SHARE, tf.float64), weighed=weighed))
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
            holds = [numbers.get(source(t).name, KINDS.get(source(t).type)) for t in operation.inputs]
            waits_for = {numbers[o.name] for o in ancestors(operation) if o.name in numbers}
            found.append((holds, waits_for, operation.inputs[0].dtype))
    return found


KINDS = {"PyFunc": "table", "EagerPyFunc": "table", "Const": "samples"}


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
        assert waits_for == set(holds) - {"samples"}
    holds, waits_for, _ = found[-1]
    assert holds[-1] == "table"
    assert waits_for == set(range(40))
    assert sorted(i for held, _, _ in found for i in held if isinstance(i, int)) == list(range(40))


def test_the_last_variables_leave_first():
    assert collectives(8, 2 * MIB, 8, 2 * MIB)[0][0] == [3]


def test_a_large_gradient_travels_by_itself_and_does_not_take_the_table():
    found = collectives(2 * MIB, 8, 2 * MIB, 8)
    assert [holds for holds, _, _ in found] == [[2], [3, 1, "samples"], [0], ["table"]]
    assert found[-1][2] == tf.float64, "of another type, so that Horovod does not fuse it with what leaves beside it"


def test_gradients_of_different_types_do_not_share_a_collective():
    found = of(*(tf.TensorSpec((4,), dtype) for dtype in (tf.float16, tf.float32, tf.float64, tf.float16)))
    assert [holds for holds, _, _ in found] == [[2, "samples"], [1], [3, 0], ["table"]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_table_is_fused_with_a_small_last_bucket(dtype):
    (only,) = of(tf.TensorSpec((4, 4), dtype), tf.TensorSpec((4,), dtype))
    assert only == ([1, 0, "table"], {0, 1}, dtype), "which tells how many samples there were"


def waits_of_updates(*lengths):
    """By gradient, the numbers of the collectives that its update waits for, and of how many there are."""
    graph = graph_of(*(tf.TensorSpec((length,), tf.float32) for length in lengths))
    order = [o for o in graph.get_operations() if o.type == "HorovodGroupedAllreduce"]
    results = [t.op.inputs[0].op for t in graph.outputs]  # what a graph gives back waits for all that it has to do
    waits = [{i for i, o in enumerate(order) if o in ancestors(result)} for result in results]
    return waits, len(order)


def test_updates_wait_for_their_own_bucket_and_the_one_with_the_samples_and_for_nothing_else():
    waits, collectives = waits_of_updates(*[MIB // 2] * 40)
    assert all(len(w) <= 2 and 0 in w for w in waits)
    assert set.union(*waits) == set(range(collectives))


def test_where_no_bucket_takes_the_samples_updates_wait_for_the_table():
    waits, collectives = waits_of_updates(2 * MIB, 2 * MIB)
    assert all(collectives - 1 in w for w in waits)


@pytest.mark.parametrize(
    ("planned", "samples", "expected"), [(4, 4, 1.0), (4, 3, 4 / 3), (0, 3, 1.0), (4, 0, 1.0)],
    ids=["as planned", "fewer", "not to be corrected", "none at all"],
)  # fmt: skip
def test_a_sum_that_plans_have_weighted_becomes_the_mean_over_what_was_done(planned, samples, expected):
    found = correction_of(tf.constant(planned, tf.float64), tf.constant(samples, tf.float32))
    assert float(found) == expected


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
def test_rows_are_gathered_as_they_are_and_wait_for_nothing_else(weighed):
    rows = tf.IndexedSlicesSpec((1000, 8), indices_dtype=tf.int32)
    graph = graph_of(rows, tf.TensorSpec((4,), tf.float32), weighed=weighed)
    gathers = [o for o in graph.get_operations() if o.type == "HorovodAllgather"]
    sent = sorted((o.inputs[0].shape.as_list(), o.inputs[0].dtype) for o in gathers)
    assert sent == [([None], tf.int32), ([None, 8], tf.float32)]
    whole = graph.inputs[-1]
    for gather in gathers:
        assert "HorovodAllgather" in gather.name, "by which elastic mode knows it"
        assert whole.op not in ancestors(gather)
    (reduced,) = [o for o in graph.get_operations() if o.type == "HorovodGroupedAllreduce"]
    assert sum(int(t.shape.num_elements()) for t in reduced.inputs) < 1000, "no table travels with the rest"


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_a_rank_that_holds_nothing_sends_no_rows(weighed, weight):
    synchroniser = all_reduce()
    synchroniser._mean = lambda tensors, after, of=list, *_, **options: (of(tensors), tf.constant(1.0, tf.float64))
    rows = tf.IndexedSlices(tf.constant([[1.0], [float("nan")], [4.0]]), tf.constant([5, 2, 5]), tf.constant([9, 1]))
    (got,) = synchroniser([rows], tf.constant([weight, 4 * weight, 4], tf.float64), weighed=weighed)
    assert got.indices.numpy().tolist() == ([5, 2, 5] if weight else [])
    assert got.values.shape == ((3, 1) if weight else (0, 1))
    if weight:
        assert got.values[2, 0] == (4.0 if weighed else 1.0)


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["large", "small"])
@pytest.mark.parametrize("weighed", [False, True])
def test_what_weighs_nothing_is_zero_even_where_it_is_not_a_number(monkeypatch, weighed, small):
    monkeypatch.setattr("keras_callbacks.step.graph_synchroniser._SMALL", small)
    synchroniser = all_reduce()
    synchroniser._mean = lambda tensors, after, of=list, *_, **options: (of(tensors), tf.constant(1.0, tf.float64))
    gradients = [tf.constant([1.0, float("nan")]), tf.constant([float("inf")], tf.float16)]

    def sent(weight):
        share = tf.constant([weight, 4 * weight, 4], tf.float64)
        return [g.numpy().tolist() for g in synchroniser(gradients, share, weighed=weighed)]

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


def weighs_the_loss(optimizer):
    return not {"scale_loss", "compute_gradients"}.isdisjoint(optimizer.__dict__)


def test_the_loss_is_weighed_where_its_gradients_are_what_is_applied():
    model, balance = trained()
    assert weighs_the_loss(model.optimizer)
    balance.release()
    assert not weighs_the_loss(model.optimizer)


def test_the_loss_is_left_alone_where_something_of_the_users_would_see_it():
    inputs = keras.layers.Input((2,))
    layer = keras.layers.Dense(1)
    assert not weighs_the_loss(trained(OwnStep(inputs, layer(inputs)))[0].optimizer)
    assert not weighs_the_loss(trained(optimizer=OwnUpdate(0.1))[0].optimizer)
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert not weighs_the_loss(trained(optimizer=scaled)[0].optimizer)
    several = BSP(max_micro_batch=2)  # whose weight is known at the end alone
    assert not weighs_the_loss(trained(policy=several)[0].optimizer)
    hidden = keras.layers.Dense(2)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden(inputs)))
    assert not weighs_the_loss(trained(model, local_layers=[hidden])[0].optimizer), "whose gradients are not averaged"


@pytest.mark.parametrize("largest", [None, 3, 2])
def test_layers_of_a_ranks_own_learn_from_the_mean_over_its_samples_in_however_many_micro_batches(largest):
    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 2)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    alone, together = model(), model()
    for each in (alone, together):
        each.compile(keras.optimizers.SGD(0.1), "mse")
    alone.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    balance = LoadBalance(BSP(max_micro_batch=largest), global_batch=4, local_layers=[together.layers[0]])
    together.fit(resize_batches((x, y), balance), verbose=0, shuffle=False, callbacks=[balance])
    for mine, theirs in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def variables_of_several_types():
    kinds = [("float32", (3, 2)), ("int64", ()), ("float32", ()), ("float64", (0,)), ("bool", (2,)), ("float32", (4,))]
    return [tf.Variable(tf.cast(tf.fill(shape, i + 1), dtype)) for i, (dtype, shape) in enumerate(kinds)]


def test_what_all_start_from_travels_in_one_message_for_each_type():
    """And each variable has its own numbers afterwards."""
    variables, sent = variables_of_several_types(), []

    class Negated(TensorFlowWire):
        def broadcast(self, tensor, root_rank, name):
            sent.append(tensor.dtype.name)
            return tf.logical_not(tensor) if tensor.dtype == tf.bool else -tensor

    expected = [~v.numpy() if v.dtype == tf.bool else -v.numpy() for v in variables]
    start_alike(variables[:2], variables[2:], Negated(), "test")
    assert sent == ["float32", "int64", "float64", "bool"]
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_means_are_taken_of_many_variables_at_once():
    weights, asked = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0], [4.0]])], []

    class OfTwoRanks(TensorFlowWire):
        """The other has nothing but zeros."""

        def sum(self, value, name):
            asked.append(name)
            return tf.constant(2.0) if name.endswith("ranks") else value

    average(weights, OfTwoRanks(), "test")
    assert asked == ["test.mean.ranks", "test.mean.0"]
    assert [w.numpy().ravel().tolist() for w in weights] == [[0.5, 1.0], [1.5, 2.0]]


def test_large_variables_travel_apart(monkeypatch):
    monkeypatch.setattr("keras_callbacks.step.graph_synchroniser._PARCEL", 40)
    numbers = [tf.Variable(tf.zeros(n)) for n in (4, 5, 2, 20, 1, 1)]
    assert [[int(v.shape[0]) for v in parcel] for parcel in parcels(numbers)] == [[4, 5], [2], [20], [1, 1]]


class Round(GraphRound):
    """In the middle of a round in which this rank weighs a quarter."""

    def __init__(self):
        super().__init__(None, None)
        self._state = tf.constant([0.0, 1.0, 1.0, 0.0, 0.25, 1.0, 4.0, 1.0], tf.float64)


def gradient_of(function, dtype=tf.float32):
    """Of a loss in the graph that goes through ``weigh``, and whether that says that it has weighed it."""
    graph_round, x = Round(), tf.Variable([3.0, 4.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = graph_round.weigh(tf.cast(function(x), dtype))
        return tape.gradient(loss, x)

    return step().numpy().tolist(), graph_round._weighed


def test_gradients_of_a_weighed_loss_are_weighted():
    assert gradient_of(lambda x: tf.reduce_sum(x**2)) == ([1.5, 2.0], True)


@tf.custom_gradient
def with_more(x):
    return tf.identity(x), lambda upstream: upstream + 1.0


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["plain", "in a function"])
def test_a_backward_pass_that_somebody_has_written_is_given_what_one_rank_would_give_it(wrap):
    """It need not be in proportion to that: a multiple of the loss would not give the same multiple of the gradient."""
    assert gradient_of(lambda x: tf.reduce_sum(wrap(with_more)(x))) == ([2.0, 2.0], False)


def test_a_loss_of_few_digits_is_not_multiplied_by_a_weight_that_would_be_rounded():
    assert gradient_of(lambda x: tf.reduce_sum(x**2), tf.bfloat16) == ([6.0, 8.0], False)


def test_a_step_that_fails_while_it_is_traced_leaves_nothing_behind():
    graph_round = Round()
    graph_round._calls = SimpleNamespace(policy=BSP())
    graph_round._begin = lambda data: (tf.zeros(10), data)

    def fails(data):
        raise ValueError("a mistake")

    with pytest.raises(Exception, match="a mistake"):
        graph_round.train_step(fails, SimpleNamespace(observed=lambda step, data, weight, again: step(data)))(None)
    loss = tf.constant(2.0)
    assert graph_round.weigh(loss) is loss, "as that of an evaluation"


def test_a_batch_of_another_size_than_was_cut_counts_as_it_came():
    """In the gradient's weight, in the average of metrics, and in that of weights after local updates."""
    balance = LoadBalance("bsp", global_batch=4)
    x = np.ones((8, 2), "float32")
    resize_batches((x, x[:, :1]), balance)
    session = balance._session
    assert session.course.queue.prepare(new=True) == 4
    session.calls.begin_round(3)
    assert session.calls.samples == 3
    assert session.calls.share() == [0.75, 3, 4, 1.0, 0.0]


def test_autograph_converts_the_users_step_and_what_it_calls_but_nothing_of_this_package():
    """As tf_keras has it convert a train step; converting this package took two seconds of each rank."""
    called_from = []

    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            rate = tf.constant(1.0)
            if grads[0] > 0:  # of a tensor, which only AutoGraph makes a branch of a graph
                rate = tf.constant(2.0)
            return rate

    def receive(gradients, variables, update):
        called_from.append(inspect.currentframe().f_back.f_code.co_filename)
        return update(gradients)

    optimizer = Own()
    gradients_pass_through(optimizer, receive, None)
    variables = [tf.Variable(1.0)]
    step = tf.function(lambda gradient: optimizer.apply([gradient], variables))
    assert [float(step(tf.constant(gradient))) for gradient in (-1.0, 1.0)] == [1.0, 2.0]
    assert set(called_from) == {keras_versions.__file__}


def test_in_an_eager_step_the_users_optimizer_runs_as_it_is_written():
    """So that a debugger stops in it, and it takes no longer."""
    frames = []

    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            frames.append(inspect.currentframe().f_code.co_filename)

    optimizer = Own()
    gradients_pass_through(optimizer, lambda gradients, variables, update: update(gradients), None)
    optimizer.apply([tf.constant(1.0)], [tf.Variable(1.0)])
    assert frames == [__file__]
