"""What ranks start from: built without computing anything, whoever builds it; on one rank, without horovodrun."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.errors import HeteroError  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches  # noqa: E402
from keras_callbacks.elastic import KerasState  # noqa: E402
from keras_callbacks.start import CommonStart, share_adapted  # noqa: E402
from keras_callbacks.tensorflow_wire import TensorFlowWire  # noqa: E402

keras = tf.keras
X, Y = np.random.default_rng(0).normal(size=(10, 2)).astype("float32"), np.ones((10, 1), "float32")


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def fit(model, change=lambda batches: batches):
    model.compile("sgd", "mse")
    balance = LoadBalance("bsp", global_batch=4)
    model.fit(change(resize_batches((X, Y), balance)), verbose=0, shuffle=False, callbacks=[balance])
    assert balance.rounds == 3
    assert not balance._session.common_start.lacks(model.weights)


def test_a_model_without_call_is_built_as_its_train_step_builds_it():
    class Stepping(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.inner(batch[0]) - batch[1]) ** 2)
            weights = self.inner.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"own": loss}

    fit(Stepping())


class Decorated(keras.Model):
    """A train step whose update is in a tf.function of its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])

    def train_step(self, batch):
        return self.update(*batch)

    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(x) - y) ** 2)
        weights = self.inner.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own": loss}


def test_a_model_is_built_for_what_its_train_step_gives_it():
    class Conditional(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, inputs):
            return self.inner(inputs)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(tf.concat([x, y], -1)) - y) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"own": loss}

    model = Conditional()
    fit(model)
    assert model.inner.kernel.shape == (3, 1)


def test_what_a_train_step_needs_besides_call_is_built_too():
    class Twofold(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.judge = keras.layers.Dense(2), keras.layers.Dense(1)

        def call(self, inputs):
            return self.inner(inputs)

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.judge(self(batch[0])) - batch[1]) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"own": loss}

    fit(Twofold())


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


def test_a_layer_that_is_made_in_the_course_of_training_is_found_out():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)
            self.inner.build((None, 2))
            self.late = None

        def train_step(self, batch):
            self.late = keras.layers.Dense(1) if self.late is None else self.late
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.late(self.inner(batch[0])) ** 2)
            weights = self.inner.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"own": loss}

    with pytest.raises(HeteroError, match=r"2 variables.*layers"):
        fit(Late())


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
    plain, witnesses = session.start, []
    monkeypatch.setattr(session, "start", lambda *pair: starts.append(pair) or plain(*pair))
    start_rounds = session.calls.start
    monkeypatch.setattr(session.calls, "start", lambda *pair: witnesses.append(pair[1]) or start_rounds(*pair))
    balance.start(model, optimizer := keras.optimizers.Adam())
    batches = resize_batches((X, Y), balance)
    next(balance.batches(batches))
    assert len(starts) == 2
    assert not session.common_start.lacks([*model.weights, *witnesses[-1]])
    assert len(witnesses[-1]) == 2, "ranks that part are found out"
    next(balance.batches(batches))
    assert len(starts) == 2, "nothing is new"
    model.add(keras.layers.Dense(1))
    next(balance.batches(batches))
    assert starts == [(model, optimizer)] * 3
    assert len(witnesses[-1]) == 4


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
    share_adapted(model, FromRank0(), "numbers")
    after = model.predict(X, verbose=0)
    for found, wanted in zip((normal.mean, given.mean, bins.bin_boundaries), expected, strict=True):
        assert np.ravel(found) == pytest.approx(wanted)
    np.testing.assert_allclose(after[1], (before[1] - 1) / np.sqrt(2), rtol=1e-5)
    assert (after[2] != before[2]).any()


def test_numbers_that_are_rank_0s_already_leave_traced_functions_alone():
    model = adapted()[0]
    model.predict(X, verbose=0)
    function = model.predict_function
    share_adapted(model, TensorFlowWire(), "same")
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
