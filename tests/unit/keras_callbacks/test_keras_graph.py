"""The graph of a step: what leaves together and waits for what, what changes gradients, and what metrics are.

Read off the graph, without a clock, on whichever Keras is installed as tf.keras.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.policies import BSP
from keras_callbacks import LoadBalance, keras_versions, resize_batches
from keras_callbacks.keras_versions import gradients_pass_through, tf_variables
from keras_callbacks.metrics.traced_step import figures_in, independent_of_the_batch, updates_in, variables_of, weigh
from keras_callbacks.start import start_from_rank_0
from keras_callbacks.step.graph import GraphRound
from keras_callbacks.step.graph_synchroniser import GraphAllreduce, buckets
from keras_callbacks.tensorflow_wire import TensorFlowWire
from tests.unit.keras_callbacks.small import SEVERAL, Stepping, X, fit, keras, network

MIB = 2**18
"""float32 numbers"""
SHARE = [0.5, 2.0, 4.0, 1.0, 0.0]


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


def kinds(*dtypes, length=4):
    return [tf.TensorSpec((length,), dtype) for dtype in dtypes]


F16, F32, F64, LARGE = tf.float16, tf.float32, tf.float64, tf.TensorSpec((2 * MIB,), tf.float32)


@pytest.mark.parametrize(
    ("specs", "expected", "of_the_last"),
    [
        ([*kinds(F32), LARGE, *kinds(F32), LARGE], [[3], [1], [2, 0, "table"]], F32),
        ([LARGE, *kinds(F32), LARGE, *kinds(F32)], [[2], [3, 1, "samples"], [0], ["table"]], F64),
        (kinds(F16, F32, F64, F16), [[2, "samples"], [1], [3, 0], ["table"]], F64),
        (kinds(F32, F32), [[1, 0, "table"]], F32),
        (kinds(F64, F64), [[1, 0, "table"]], F64),
        (kinds(*[F32] * 40, length=MIB // 2), None, F32),
    ],
    ids=["large ones alone", "the last leave first", "types apart", "one bucket", "of doubles", "many"],
)
def test_a_bucket_waits_for_its_own_gradients_alone_and_the_table_for_all(specs, expected, of_the_last):
    """Not fused with what leaves beside it, if the table is of another type."""
    found = of(*specs)
    holds = [each for each, _, _ in found]
    if expected is None:
        assert len(found) > 3
        assert sorted(i for each in holds for i in each if isinstance(i, int)) == list(range(40))
    else:
        assert holds == expected
    for each, waits_for, _ in found[:-1]:
        assert waits_for == set(each) - {"samples"}
    assert holds[-1][-1] == "table"
    assert found[-1][1:] == (set(range(len(specs))), of_the_last)


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


class OwnUpdate(keras.optimizers.SGD):
    """Something of the user's between the loss and the update, in either Keras."""

    def apply_gradients(self, *args, **options):
        return super().apply_gradients(*args, **options)

    def compute_gradients(self, *args, **options):
        return super().compute_gradients(*args, **options)


def weighs_the_loss(optimizer):
    return not {"scale_loss", "compute_gradients"}.isdisjoint(optimizer.__dict__)


def test_the_loss_is_weighed_only_where_its_gradients_are_what_is_applied():
    model = network(keras.Model)
    _, balance = fit(model)
    assert weighs_the_loss(model.optimizer)
    balance.release()
    assert not weighs_the_loss(model.optimizer)
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    own, layers = network(keras.Model), keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    layers.add(keras.layers.Dense(1))
    layers.compile("sgd", "mse")
    for model, options in (
        (network(Stepping), {}),
        (network(keras.Model, OwnUpdate(0.1)), {}),
        (network(keras.Model, scaled), {}),
        (own, {"policy": SEVERAL}),  # whose weight is known at the end alone
        (layers, {"local_layers": layers.layers[:1]}),  # whose gradients are not averaged
    ):
        fit(model, **options)
        assert not weighs_the_loss(model.optimizer)


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


def test_what_all_start_from_travels_in_one_message_for_each_type():
    """And each variable has its own numbers afterwards."""
    shapes = [("float32", (3, 2)), ("int64", ()), ("float32", ()), ("float64", (0,)), ("bool", (2,)), ("float32", (4,))]
    variables = [tf.Variable(tf.cast(tf.fill(shape, i + 1), dtype)) for i, (dtype, shape) in enumerate(shapes)]
    sent = []

    class Negated(TensorFlowWire):
        def broadcast(self, tensor, root_rank, name):
            sent.append(tensor.dtype.name)
            return tf.logical_not(tensor) if tensor.dtype == tf.bool else -tensor

    expected = [~v.numpy() if v.dtype == tf.bool else -v.numpy() for v in variables]
    start_from_rank_0(variables[:2], variables[2:], Negated(), "test")
    assert sent == ["float32", "int64", "float64", "bool"]
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_large_variables_travel_apart(monkeypatch):
    monkeypatch.setattr("keras_callbacks.step.graph_synchroniser._MESSAGE_BYTES", 40)
    numbers = [tf.Variable(tf.zeros(n)) for n in (4, 5, 2, 20, 1, 1)]
    assert [[int(v.shape[0]) for v in bucket] for bucket in buckets(numbers)] == [[4, 5], [2], [20], [1, 1]]


@tf.custom_gradient
def with_more(x):
    return tf.identity(x), lambda upstream: upstream + 1.0


@pytest.mark.parametrize(
    ("function", "dtype", "gradient", "weighed"),
    [
        (lambda x: x**2, tf.float32, [1.5, 2.0], True),
        (lambda x: x**2, tf.bfloat16, [6.0, 8.0], False),
        (with_more, tf.float32, [2.0, 2.0], False),
        (tf.function(with_more), tf.float32, [2.0, 2.0], False),
    ],
    ids=["plain", "of few digits", "a backward pass of one's own", "in a function"],
)
def test_a_loss_is_weighed_where_its_gradient_is_in_proportion_to_it(function, dtype, gradient, weighed):
    """In the middle of a round in which this rank weighs a quarter."""
    graph_round, x = GraphRound(None, None), tf.Variable([3.0, 4.0])
    graph_round._state = tf.constant([0.0, 1.0, 0.0, 0.25, 1.0, 4.0, 1.0, 0.0, 1.0], tf.float64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = graph_round.weigh(tf.cast(tf.reduce_sum(function(x)), dtype))
        return tape.gradient(loss, x)

    assert step().numpy().tolist() == gradient
    assert graph_round._weighed == weighed


def test_a_batch_of_another_size_than_was_cut_counts_as_it_came():
    """In the gradient's weight, in the average of metrics, and in that of weights after local updates."""
    balance = LoadBalance("bsp", global_batch=4)
    x = np.ones((8, 2), "float32")
    resize_batches((x, x[:, :1]), balance)
    session = balance._session
    assert session.course.queue.prepare(new=True) == 4
    session.calls.begin_round(3)
    assert session.calls.samples == 3
    assert session.calls.weights() == [0.75, 3, 4, 1.0, 0.0]


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


class Clipping(keras.Model):
    """Changes gradients in a train step of its own."""

    how = staticmethod(lambda gradients: gradients)
    perturbs, penalty = False, 0.0

    def gradients(self, x, y):
        with tf.GradientTape() as outer, tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((self(x) - y) ** 2)
            if self.penalty:
                loss += self.penalty * tf.sqrt(tf.reduce_sum(tape.gradient(loss, x) ** 2))
        return outer.gradient(loss, self.trainable_variables), loss

    def train_step(self, batch):
        gradients, loss = self.gradients(*batch)
        if self.perturbs:  # SAM
            steps = [0.05 * g / tf.linalg.global_norm(gradients) for g in gradients]
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_add(step)
            gradients, loss = self.gradients(*batch)
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(self.how(gradients), self.trainable_variables, strict=True))
        return {"own": loss}


@tf.custom_gradient
def straight_through(weight):
    return tf.sign(weight), lambda upstream: tf.where(tf.abs(weight) < 1.0, upstream, 0.0)


class Binary(keras.layers.Dense):
    def call(self, x):
        return x @ straight_through(tf.convert_to_tensor(self.kernel))


def clipping(**how):
    inputs = keras.layers.Input((2,))
    hidden = Binary(3, use_bias=False)(keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
    model = Clipping(inputs, keras.layers.Dense(1)(hidden))
    vars(model).update(how)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ({"how": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0]}, "bsp"),
        ({"how": lambda gradients: [tf.clip_by_value(g, -0.1, 0.1) for g in gradients]}, "bsp"),
        ({"how": lambda gradients: [tf.where(tf.math.is_nan(g), 0.0, g) for g in gradients]}, SEVERAL),
        ({"perturbs": True}, SEVERAL),
    ],
    ids=["by norm", "by value", "without NaN", "SAM"],
)
def test_gradients_that_a_step_changes_before_they_are_summed_are_told_of_once(how, policy, caplog):
    fit(clipping(**how), policy)
    (warning,) = [r.getMessage() for r in caplog.records if "changes gradients" in r.getMessage()]
    assert "use its clipnorm, global_clipnorm or clipvalue" in warning


@pytest.mark.parametrize(
    "how",
    [{}, {"how": lambda gradients: [0.5 * g - tf.reduce_mean(g) for g in gradients]}, {"penalty": 0.1}],
    ids=["as they are", "scaled and centred", "penalised"],
)
def test_gradients_that_a_step_leaves_or_scales_are_not_told_of(how, caplog):
    fit(clipping(**how))
    assert not [r for r in caplog.records if "changes gradients" in r.getMessage()]


@pytest.mark.parametrize(
    ("policy", "labels", "share", "gradient"),
    [
        ("bsp", [1.0] * 8, 1e-3, 2e-3),  # so little a share that the sum is not clipped
        (SEVERAL, [0.5] * 2 + [2.49] * 6, 1.0, 0.015),  # means of 3 and -0.98
    ],
    ids=["one", "several"],
)
def test_an_apply_gradients_of_ones_own_gets_the_sum(policy, labels, share, gradient):
    class Own(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **options):
            pairs = [(tf.clip_by_value(g, -0.1, 0.1), v) for g, v in grads_and_vars]
            return super().apply_gradients(pairs, **options)

    inputs = keras.layers.Input((2,))
    model = Clipping(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.set_weights([np.ones((2, 1), "float32")])
    model.compile(Own(0.5))
    balance = LoadBalance(policy, global_batch=8)
    plain = balance._session.calls.weights
    balance._session.calls.weights = lambda: [share, *plain()[1:]]
    data = X, np.float32(labels)[:, None]
    model.fit(resize_batches(data, balance), verbose=0, shuffle=False, callbacks=[balance])
    assert 1.0 - model.get_weights()[0][0, 0] == pytest.approx(0.5 * gradient, rel=1e-3), "not clipped before"
    balance.release()
    assert not {"apply", "apply_gradients"} & vars(model.optimizer).keys()


class Kept(keras.metrics.Metric):
    """Keeps one number, which ``change`` makes again of it and of what comes."""

    def __init__(self, change):
        super().__init__(name="kept")
        self.change = change
        self.kept = self.add_weight(name="kept", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(self.change(self.kept, y_pred))

    def result(self):
        return self.kept


def reductions(metric):
    """By the numbers of the metric's variables; those that the step does not assign are left out."""

    def update():
        y = tf.constant([[0.25], [0.75]])
        metric.update_state(tf.round(y), y)

    update()  # some variables exist only then
    variables = tf_variables(metric.variables)
    graph = tf.function(update).get_concrete_function().graph
    found = updates_in(graph, variables_of(graph, variables))
    return [found[v._unique_id].kind for v in variables if v._unique_id in found]


@pytest.mark.parametrize(
    ("update", "counts"),
    [
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch)), True),
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch), sample_weight=0.5), True),
        (lambda mean, batch: mean.update_state(batch), False),
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch), sample_weight=tf.shape(batch)[0]), False),
    ],
    ids=["its mean", "its mean with a weight", "its samples", "its mean with its length as weight"],
)
def test_a_mean_of_batches_is_told_from_a_mean_of_samples_and_grows_by_its_share(update, counts):
    mean = keras.metrics.Mean()
    variables = tf_variables(mean.variables)

    @tf.function
    def step(batch):
        update(mean, batch)
        graph = tf.compat.v1.get_default_graph()
        updates = updates_in(graph, variables_of(graph, variables))
        assert any(u.counts_batches for u in updates.values()) == counts
        weigh(updates.values(), tf.constant(0.25))

    step.get_concrete_function(tf.TensorSpec([None]))
    step(tf.constant([1.0, 2.0, 6.0]))
    assert float(mean.result()) == pytest.approx(3.0)
    alone = keras.metrics.Mean()
    update(alone, tf.constant([1.0, 2.0, 6.0]))
    expected = [float(v.numpy()) / 4 for v in tf_variables(alone.variables)]
    assert [float(v.numpy()) for v in variables] == pytest.approx(expected)


def test_figures_are_told_again_of_another_state_unless_the_batch_has_a_part_in_them():
    mean, other, weight = keras.metrics.Mean(), keras.metrics.Mean(), tf.Variable(2.0)
    made, seed = {}, tf.Variable(1.0)

    @tf.function
    def step(batch):
        before = other.result()
        mean.update_state(batch)
        other.update_state(batch)
        figures = {
            "mean": mean.result(),
            "of both": {"root": tf.sqrt(mean.result() + other.result())},
            "constant": tf.constant(3.0),
            "of the batch": tf.reduce_max(batch),
            "mixed": mean.result() + batch[0],
            "before": before,
            "weight": weight + 0.0,
            "in a function": tf.function(lambda: 2 * mean.result())(),
            "in a branch": tf.cond(batch[0] > 0, mean.result, lambda: tf.constant(0.0)),
            "of the batch in a function": tf.function(lambda: tf.convert_to_tensor(weight) * batch[0] + seed)(),
        }
        figures = tf.nest.map_structure(tf.identity, figures)
        graph = tf.compat.v1.get_default_graph()
        known = [*tf_variables([*mean.variables, *other.variables]), weight, seed]
        handles = variables_of(graph, known)
        metrics = tf_variables([*mean.variables, *other.variables])
        made["told"] = figures_in(graph, figures, handles, updates_in(graph, handles), [weight], metrics)
        return figures

    step(tf.constant([1.0, 3.0]))
    told = made["told"]
    assert set(told.of_state) == {"mean", "of both", "constant"}
    assert told.partly_of_state == ["mixed", "before", "in a function", "in a branch"]
    for metric in (mean, other):
        metric.reset_state()
    mean.update_state([7.0])
    other.update_state([9.0])
    again = told.compute()
    assert float(again["mean"]) == 7.0
    assert float(again["of both"]["root"]) == 4.0
    assert float(again["constant"]) == 3.0


def test_what_a_step_advances_alike_on_all_ranks_is_told_from_what_depends_on_the_batch():
    names = ["weight", "teacher", "count", "statistic", "follower_of_statistic", "mixed", "noise", "idle"]
    found = {}

    @tf.function
    def step(batch):
        v["weight"].assign_sub(0.1 * batch)
        v["teacher"].assign(0.9 * v["teacher"] + 0.1 * v["weight"] * v["count"])
        v["count"].assign_add(1.0)
        v["statistic"].assign(0.9 * v["statistic"] + 0.1 * batch)
        v["follower_of_statistic"].assign(0.5 * v["statistic"])
        v["mixed"].assign(v["weight"] * batch)
        v["noise"].assign(v["noise"] + tf.random.uniform([]))
        graph = tf.compat.v1.get_default_graph()
        handles = variables_of(graph, v.values())
        found["all"] = independent_of_the_batch(graph, handles, updates_in(graph, handles), v.values(), [v["weight"]])

    v = {name: tf.Variable(1.0) for name in names}
    step.get_concrete_function(tf.TensorSpec([]))
    assert [name for name in names if any(each is v[name] for each in found["all"])] == ["teacher", "count"]


@pytest.mark.parametrize(
    ("change", "reduction"),
    [
        (lambda kept, new: tf.convert_to_tensor(kept) + tf.reduce_sum(new), "sum"),
        (lambda kept, new: tf.reduce_sum(new) + tf.convert_to_tensor(kept), "sum"),
        (lambda kept, new: tf.convert_to_tensor(kept) - tf.reduce_sum(new), "sum"),
        (lambda kept, new: tf.maximum(tf.convert_to_tensor(kept), tf.reduce_max(new)), "max"),
        (lambda kept, new: tf.cast(tf.minimum(tf.reduce_min(new), tf.convert_to_tensor(kept)), tf.float32), "min"),
        (lambda kept, new: 0.9 * tf.convert_to_tensor(kept) + 0.1 * tf.reduce_mean(new), "unknown"),
        (lambda kept, new: tf.reduce_max(new), "unknown"),
    ],
    ids=["sum", "sum the other way round", "difference", "maximum", "minimum", "moving average", "the latest"],
)
def test_an_update_says_what_is_kept(change, reduction):
    assert reductions(Kept(change)) == [reduction]


@pytest.mark.parametrize(
    "name",
    [
        "Mean", "Sum", "MeanSquaredError", "BinaryAccuracy", "AUC", "Precision", "Recall", "TruePositives", "BinaryIoU",
        "R2Score", "RootMeanSquaredError", "SensitivityAtSpecificity", "F1Score",
    ],
)  # fmt: skip
def test_all_that_keras_itself_keeps_is_a_sum(name):
    cls = getattr(keras.metrics, name)
    metric = cls(0.5) if name == "SensitivityAtSpecificity" else cls()
    if name in ("Mean", "Sum"):
        update = metric.update_state
        metric.update_state = lambda y_true, y_pred: update(y_pred)
    found = reductions(metric)
    assert found
    assert set(found) == {"sum"}
