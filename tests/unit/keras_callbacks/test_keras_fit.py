"""What ranks start from, what a fit and a loop of one's own do beyond Keras, and what users hold; on one rank."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import Goodput
from hvd_hetero.telemetry import Telemetry, read_ledger
from keras_callbacks import (
    LearningRateSchedule,
    LearningRateWarmup,
    LoadBalance,
    average_by_samples,
    resize_batches,
    weighted_gradients,
)
from keras_callbacks.elastic import KerasState
from keras_callbacks.metrics.of_all_ranks import JoinedMetrics
from keras_callbacks.start import CommonStart, broadcast_adapted_layers
from keras_callbacks.tensorflow_wire import TensorFlowWire
from tests.unit.keras_callbacks import small
from tests.unit.keras_callbacks.small import keras, network

Callback = keras.callbacks.Callback
EIGHT = small.X, small.Y
ADAPTS = Goodput(start=4, least=2, most=8)
X, Y = np.random.default_rng(0).normal(size=(10, 2)).astype("float32"), np.ones((10, 1), "float32")


def fit(model, change=lambda batches: batches):
    model.compile("sgd", "mse")
    _, balance = small.fit(model, data=(X, Y), change=change)
    assert balance.rounds == 3
    assert not balance._session.common_start.lacks(model.weights)


class Parts(keras.Model):
    """Built by its first batch, in a train step of its own: ``outputs`` are compared with the labels."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])

    def outputs(self, x, y):
        return self.inner(x)

    def trained(self):
        return self.inner.trainable_weights

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.outputs(x, y) - y) ** 2)
        weights = self.trained()
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own": loss}


class OfLabels(Parts):
    def outputs(self, x, y):
        return self.inner(tf.concat([x, y], -1))


class Judged(Parts):
    """Needs more than its call."""

    def __init__(self):
        super().__init__()
        self.judge = keras.layers.Dense(1)

    def call(self, inputs):
        return self.inner(inputs)

    def outputs(self, x, y):
        return self.judge(self(x))

    def trained(self):
        return self.trainable_weights


@pytest.mark.parametrize(("kind", "features"), [(Parts, 2), (OfLabels, 3), (Judged, 2)])
def test_a_model_is_built_as_its_train_step_builds_it(kind, features):
    model = kind()
    fit(model)
    assert model.inner.layers[0].kernel.shape == (features, 2)


class Decorated(Parts):
    """A train step whose update is in a tf.function of its own."""

    @tf.function
    def train_step(self, batch):
        return super().train_step(batch)


def test_a_function_around_the_optimizer_that_was_traced_before_is_told_so():
    with pytest.raises(ValueError, match=r"tf\.function.*Build all layers before"):
        fit(Decorated())
    built = Decorated()
    built.inner.build((None, 2))
    fit(built)
    trained = Decorated()
    trained.compile("sgd", "mse")
    trained.fit(X, Y, batch_size=10, verbose=0)
    trained.fit(X[:4], Y[:4], batch_size=4, verbose=0)  # the second shape has it traced for any
    balance = LoadBalance("bsp", global_batch=4)
    with pytest.raises(ValueError, match=r"tf\.function.*traced"):
        trained.fit(resize_batches((X, Y), balance), verbose=0, shuffle=False, callbacks=[balance])


def test_numbers_that_a_trace_has_swallowed_are_told_of():
    model = keras.Sequential([keras.layers.Normalization(mean=1.0, variance=2.0, name="normal"), keras.layers.Dense(1)])
    if "tf_keras" in keras.Model.__module__:
        fit(model)
        return
    with pytest.raises(ValueError, match=r"'normal'.*Input"):
        fit(model)
    model = keras.Sequential([keras.layers.Input((2,)), *model.layers])
    fit(keras.models.clone_model(model))


class Late(Parts):
    late = None

    def outputs(self, x, y):
        self.late = keras.layers.Dense(1) if self.late is None else self.late
        return self.late(self.inner(x))


def test_a_layer_that_is_made_in_the_course_of_training_is_found_out():
    model = Late()
    model.inner.build((None, 2))
    with pytest.raises(HeteroError, match=r"2 variables.*layers"):
        fit(model)


def test_building_computes_nothing():
    """A call before the first step would move seeds and counters on, which one process does not do."""
    called = []

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, inputs):
            tf.numpy_function(lambda x: called.append(len(x)), [inputs], [])
            return self.inner(inputs)

    fit(Counting())
    assert called == [4, 4, 2]


def test_a_model_that_its_first_batch_builds_sees_what_a_map_has_made_of_it():
    model = keras.Sequential([keras.layers.Dense(1)])
    fit(model, lambda batches: batches.map(lambda x, y: (tf.concat([x, x], 1), y)))
    assert model.layers[0].kernel.shape == (4, 1)


def test_what_cannot_be_built_says_why_and_what_to_do():
    class Broken(keras.Model):
        def train_step(self, batch):
            raise TypeError("no such thing")

    with pytest.raises(ValueError, match=r"(?s)TypeError:.*no such thing.*Input"):
        fit(Broken())


def test_a_loop_builds_its_model_and_broadcasts_what_is_new_at_the_beginning_of_an_epoch(monkeypatch):
    model, balance = keras.Sequential([keras.layers.Dense(1)]), LoadBalance("bsp", global_batch=4)
    starts, session = [], balance._session
    plain, norms = session.start, []
    monkeypatch.setattr(session, "start", lambda *pair: starts.append(pair) or plain(*pair))
    start_rounds = session.calls.start
    monkeypatch.setattr(session.calls, "start", lambda *pair: norms.append(pair[1]) or start_rounds(*pair))
    balance.start(model, optimizer := keras.optimizers.Adam())
    batches = resize_batches((X, Y), balance)
    next(balance.batches(batches))
    assert len(starts) == 2
    assert not session.common_start.lacks([*model.weights, *norms[-1]])
    assert len(norms[-1]) == 2, "ranks that part are found out"
    next(balance.batches(batches))
    assert len(starts) == 2, "nothing is new"
    model.add(keras.layers.Dense(1))
    next(balance.batches(batches))
    assert starts == [(model, optimizer)] * 3
    assert len(norms[-1]) == 4


def codebook():
    """A model whose layers hold variables of TensorFlow, as keras.io's VQ-VAE does, wherever they keep them."""

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.inner = tf.Variable([5.0])

    class Codes(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.codes = tf.Variable([[1.0, 2.0]], trainable=True)
            self.several, self.named = [tf.Variable(3.0)], {"scale": tf.Variable(4.0)}
            self.module, self.words = Module(), tf.Variable(["a"], trainable=False)

        def call(self, x):
            return x * self.codes * self.named["scale"]

        def values(self):
            plain = (self.codes, self.several[0], self.named["scale"], self.module.inner)
            return [float(tf.reduce_sum(v)) for v in plain]

    inputs, layer = keras.layers.Input((2,)), Codes()
    return keras.Model(inputs, keras.layers.Dense(1)(layer(inputs))), layer


class OneMore(TensorFlowWire):
    """Rank 0 has one more of everything."""

    def broadcast(self, tensor, root_rank, name):
        return tensor + tf.ones_like(tensor)


@pytest.mark.parametrize("local", [False, True], ids=["shared", "local"])
def test_plain_variables_of_layers_become_rank_0s_unless_they_are_of_local_layers(local):
    model, layer = codebook()
    kernel = model.layers[-1].kernel.numpy()
    start = CommonStart(OneMore(), "plain", [layer] if local else [])
    start.give(model, keras.optimizers.SGD())
    assert layer.values() == ([3.0, 3.0, 4.0, 5.0] if local else [5.0, 4.0, 5.0, 6.0])
    assert layer.words.numpy().tolist() == [b"a"]
    assert not start.lacks([layer.codes])
    np.testing.assert_allclose(model.layers[-1].kernel.numpy(), kernel + 1, rtol=1e-6)


def test_plain_variables_go_back_to_the_last_commit():
    model, layer = codebook()
    model.compile("sgd", "mse")
    state = KerasState(model)
    state.commit()
    layer.codes.assign([[8.0, 9.0]])
    state.restore()
    assert layer.values()[0] == 3.0


def adapted():
    inputs = keras.layers.Input((2,))
    normal, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
    given = keras.layers.Normalization(mean=X.mean(), variance=1.0)
    normal.adapt(X)
    bins.adapt(X)
    parts = [layer(inputs) for layer in (normal, given, bins)]
    return keras.Model(inputs, parts), normal, given, bins


def test_numbers_that_adapt_has_found_become_rank_0s_also_in_functions_that_were_traced():
    model, normal, given, bins = adapted()
    before = model.predict(X, verbose=0)

    class FromRank0(TensorFlowWire):
        def broadcast_object(self, obj, root_rank, name):
            return [{name: number + 1 for name, number in layer.items()} for layer in obj]

    expected = [np.ravel(n) + 1 for n in (normal.mean, given.mean, bins.bin_boundaries)]
    broadcast_adapted_layers(model, FromRank0(), "numbers")
    after = model.predict(X, verbose=0)
    for found, wanted in zip((normal.mean, given.mean, bins.bin_boundaries), expected, strict=True):
        assert np.ravel(found) == pytest.approx(wanted)
    np.testing.assert_allclose(after[1], (before[1] - 1) / np.sqrt(2), rtol=1e-5)
    assert (after[2] != before[2]).any()


def test_numbers_that_are_rank_0s_already_leave_traced_functions_alone():
    model = adapted()[0]
    model.predict(X, verbose=0)
    function = model.predict_function
    broadcast_adapted_layers(model, TensorFlowWire(), "same")
    assert model.predict_function is function is not None


@pytest.mark.parametrize("named", [False, True], ids=["one output", "outputs by name"])
def test_metrics_are_made_before_the_step_is_traced_which_is_traced_once(named):
    """Keras by itself traces a step twice in whose first trace variables are made."""
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x, training=None):
            if training:
                traces.append(x.shape)
            return x

    inputs = keras.layers.Input((2,))
    outputs = keras.layers.Dense(1, name="out")(Counted()(inputs))
    metrics = {"out": ["mae", "accuracy"]} if named else ["mae", "accuracy"]
    model = keras.Model(inputs, {"out": outputs} if named else outputs)
    model.compile(keras.optimizers.Adam(), "mse", metrics=metrics)
    balance = LoadBalance("bsp", global_batch=4)
    batches = resize_batches((X, {"out": Y} if named else Y), balance)
    told = model.fit(batches, verbose=0, shuffle=False, callbacks=[balance]).history
    assert len(traces) == 1
    assert {name.removeprefix("out_") for name in told} >= {"mae", "loss"}


@pytest.mark.parametrize("graph", [False, True], ids=["eagerly", "in a tf.function"])
def test_a_loop_that_sums_gradients_twice_in_a_round_is_told_so(graph):
    model, balance = network(keras.Model), LoadBalance("bsp", global_batch=4)
    balance.start(model, model.optimizer)

    def step(x, y):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            weighted_gradients(tape, loss, model.trainable_variables, balance)

    with pytest.raises(tf.errors.UnknownError, match=r"weighted_gradients.*sum of the"):
        (tf.function(step) if graph else step)(*next(balance.batches(resize_batches(EIGHT, balance))))


@pytest.mark.parametrize("how", ["signature", "retracing"])
def test_a_step_is_traced_once_or_twice_for_batches_of_all_sizes(how):
    model, balance, traces = network(keras.Model), LoadBalance("bsp", global_batch=9), []
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
    model, balance = network(keras.Model), LoadBalance("bsp", global_batch=8)
    x = np.arange(16, dtype="float32").reshape(8, 2)
    balance.start(model, model.optimizer)
    orders = []
    for _ in range(3):
        for inputs, y in balance.batches(resize_batches((x, EIGHT[1]), balance, shuffle=True)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs) - y) ** 2)
            weighted_gradients(tape, loss, model.trainable_variables, balance)
            orders.append(str(inputs.numpy()))
    assert len(set(orders)) == 3


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_load_balance_has_what_users_call_and_what_keras_calls():
    for_users = public(dir(LoadBalance)) - public(dir(Callback))
    assert for_users == {
        "policy",
        "rounds",
        "plan",
        "batch_size",
        "samples",
        "start",
        "batches",
        "release",
        "on_round",
        "close",
        "progress",
    }
    balance = LoadBalance("bsp", global_batch=4)
    assert public(vars(balance)) == public(vars(Callback()))


def test_a_ledger_names_each_sample_of_each_epoch(tmp_path):
    path = tmp_path / "run.jsonl"
    _, balance = small.fit(policy=small.SEVERAL, epochs=2, telemetry=Telemetry(path, ledger=True))
    balance.close()
    parts = [*read_ledger(path)]
    assert {len(part.indices) for part in parts} == {2}
    for epoch in (0, 1):
        assert sorted(i for part in parts if part.epoch == epoch for i in part.indices) == list(range(8))


def test_fit_hands_each_round_to_a_function_and_goes_on_where_it_fails(tmp_path, caplog, capfd):
    seen, called = [], []

    def fails(record):
        called.append(record["round"])
        raise RuntimeError("no connection")

    balance = LoadBalance("bsp", global_batch=8, telemetry=tmp_path / "run.jsonl", progress=True)
    balance.on_round(fails)
    balance.on_round(lambda record: seen.append((record["round"], record["samples"])))
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = resize_batches((np.ones((20, 2), "float32"), np.ones((20, 1), "float32")), balance)
    with caplog.at_level(logging.WARNING):
        model.fit(data, epochs=2, verbose=0, callbacks=[balance])
    balance.close()
    assert called == [0]
    assert seen == [(0, [8]), (1, [8]), (2, [4]), (3, [8]), (4, [8]), (5, [4])]
    assert "no connection" in caplog.text
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 7
    assert "hvd-hetero: round 0 of epoch 0" in capfd.readouterr().err


def rates(*schedules, epochs, steps=4):
    """The rate before every step."""
    optimizer = SimpleNamespace(learning_rate=0.0)
    found = []
    for schedule in schedules:
        schedule.set_model(SimpleNamespace(optimizer=optimizer))
        schedule.set_params({"steps": steps})
    for epoch in range(epochs):
        for schedule in schedules:
            schedule.on_epoch_begin(epoch)
        for step in range(steps or 1):
            for schedule in schedules:
                schedule.on_train_batch_begin(step)
            found.append(optimizer.learning_rate)
    return found


def test_a_staircase_changes_once_an_epoch():
    assert rates(LearningRateSchedule(0.5, lambda epoch: 2.0**-epoch), epochs=2) == [0.5] * 4 + [0.25] * 4


def test_a_smooth_schedule_changes_with_every_step():
    smooth = LearningRateSchedule(1.0, lambda epoch: epoch, staircase=False)
    assert rates(smooth, epochs=2) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_schedules_follow_one_another_and_the_last_rate_stays():
    one, two = LearningRateSchedule(1.0, 0.1, end_epoch=1), LearningRateSchedule(1.0, 0.01, start_epoch=1, end_epoch=2)
    assert rates(one, two, epochs=3, steps=1) == [0.1, 0.01, 0.01]


def test_a_smooth_schedule_needs_the_length_of_an_epoch():
    smooth = LearningRateSchedule(1.0, lambda epoch: epoch, staircase=False)
    smooth.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.0)))
    smooth.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        smooth.on_train_batch_begin(1)


def test_a_warm_up_ends_with_the_first_step_at_the_full_rate():
    assert rates(LearningRateWarmup(0.5, warmup_epochs=1), epochs=2, steps=2)[2:] == [0.5, 0.5]
    warm_up = LearningRateWarmup(0.5, warmup_epochs=1)
    optimizer = SimpleNamespace(learning_rate=0.0)
    warm_up.set_model(SimpleNamespace(optimizer=optimizer))
    warm_up.set_params({"steps": 2})
    warm_up.on_epoch_begin(1)
    optimizer.learning_rate = 0.1  # by another callback
    warm_up.on_train_batch_begin(1)
    warm_up.on_epoch_begin(2)
    assert optimizer.learning_rate == 0.1


def test_a_loop_with_a_batch_that_stays_gets_the_optimizer_back_at_its_own_rate():
    model, optimizer = network(), keras.optimizers.SGD(0.1)
    before = LoadBalance("bsp", global_batch=ADAPTS)
    before.start(model, optimizer)
    before._session.calls.rate_factor.assign(3.0)
    LoadBalance("bsp", global_batch=4).start(model, optimizer)
    (weights, *_), gradients = model.get_weights(), [tf.ones_like(v) for v in model.trainable_variables]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert np.allclose(weights - model.get_weights()[0], 0.1)


def test_a_fit_of_another_model_begins_its_progress_anew_and_one_of_the_same_goes_on():
    balance = LoadBalance("bsp", global_batch=ADAPTS)
    batches, told = resize_batches(EIGHT, balance), []
    for model in (first := network(), first, network()):
        model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[balance])
        told.append((balance.progress, balance.rounds))
    assert told == [(4.0, 4), (8.0, 8), (4.0, 12)]


def test_a_counter_that_is_told_of_goes_on_as_in_one_process():
    """Whatever this rank's share of the rounds, since the step goes by it."""

    class Annealing(small.Stepping):
        def train_step(self, batch):
            self.count.assign_add(1.0)
            return super().train_step(batch) | {"strength": tf.minimum(1.0, self.count / 10.0)}

    model = network(Annealing)
    model.count = tf.Variable(0.0, trainable=False)
    balance = LoadBalance("bsp", global_batch=4)
    session = balance._session
    weights = session.calls.weights
    session.calls.weights = lambda: [0.5, *weights()[1:]]
    batches = resize_batches(EIGHT, balance)
    history = model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[balance]).history
    assert float(model.count) == 4.0
    assert history["strength"] == pytest.approx([0.2, 0.4])


def test_compiles_metrics_in_a_dictionary_of_their_own_are_those_of_all_ranks():
    """As Keras's guide writes an eager train_step: of two ranks with four samples each, the other is off by 2."""
    model = network(metrics=["mae"], run_eagerly=True)
    model.evaluate(X[:4], model.predict(X[:4], verbose=0), verbose=0)

    def both(mine, name):
        states, batches, samples = mine
        others = [np.asarray(8.0 if state == 0.0 else state, state.dtype) for state in states]
        return [mine, (others, batches, samples)]

    figures = JoinedMetrics(model, SimpleNamespace(allgather_object=both), "figures", gathers=False, warned=set())
    told = figures.of_all_ranks({"loss": 0.0, "compile_metrics": {"mae": 0.0}}, 4)
    assert float(told["mae"]) == pytest.approx(1.0)
    assert "compile_metrics" not in told


@pytest.mark.parametrize("stream", [False, True], ids=["arrays", "dataset"])
def test_data_resized_anew_for_every_fit_of_one_epoch_come_in_another_order_each_time(stream):
    x = np.arange(8, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, x)) if stream else (x, x)

    def orders(fits, epochs):
        seen, balance = [], LoadBalance("bsp", global_batch=4)
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        plain = model.train_step
        model.train_step = lambda batch: seen.append(batch[0].numpy().ravel().tolist()) or plain(batch)
        for _ in range(fits):
            batches = resize_batches(data, balance, shuffle=True)
            resize_batches(data, balance)  # which is not trained on, and so does not count
            model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=[balance])
        return seen

    one_by_one = orders(3, 1)
    assert one_by_one == orders(1, 3)
    assert len({str(one_by_one[2 * epoch : 2 * epoch + 2]) for epoch in range(3)}) == 3
