"""What Keras users cannot have is refused, and the error names it; a table for each entry, on one rank."""

from __future__ import annotations

import re
from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.errors import HeteroError, RoundStateError
from hvd_hetero.policies import ElasticBSP, Goodput, NonBlocking
from keras_callbacks import (
    LearningRateSchedule,
    LearningRateWarmup,
    LoadBalance,
    resize_batches,
    start,
    weighted_gradients,
)
from keras_callbacks.pipeline.source_checks import check_same_data
from keras_callbacks.refusals import check_compiled
from keras_callbacks.tensorflow_wire import TensorFlowWire
from tests.unit.keras_callbacks.small import SEVERAL, Stepping, X, Y, fit, keras, network

RANGE = tf.data.Dataset.range
SLICES = tf.data.Dataset.from_tensor_slices((X, Y))
ADAPTS, LOCAL = Goodput(start=4, least=2, most=8), ElasticBSP(2, updates="local")
TEXTS = tf.data.Dataset.from_generator(
    lambda: iter([([1], 0), ([1, 2], 0)]), output_signature=(tf.TensorSpec([None]), tf.TensorSpec([]))
)


class Indexed:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X, Y


class Counted(getattr(keras.utils, "PyDataset", keras.utils.Sequence)):
    """A sequence that may not know its length."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    @property
    def num_batches(self):
        return self.number

    def __getitem__(self, index):
        return X, Y


DATA = [
    ("no dataset of samples", RANGE(0), {}, "sample"),
    ("ragged", tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])), {}, "RaggedTensorSpec.*densify"),
    ("left batched", SLICES.batch(8).prefetch(2), {}, r"batch\(…\).*unbatch\(\)"),
    ("a generator", (i for i in range(3)), {}, r"generator.*from_generator.*\.unbatch\(\)"),
    ("a function", lambda: iter(range(3)), {}, "function.*from_generator"),
    ("no sequence", Indexed(), {}, r"Indexed.*"),
    ("lists", ([[1.0]], [[2.0]]), {}, "np.asarray"),
    ("of two lengths", (X, Y[:-1]), {}, r"\[7, 8\]"),
    ("batches without end", Counted(None), {}, "None batches.*from_generator"),
    ("no batches", Counted(0), {}, "0 batches"),
    ("prefetch", (X, Y), {"prefetch": -1}, "prefetch"),
    ("prefetch of a stream", SLICES, {"prefetch": 1}, "prefetch.*dataset"),
    ("stream", SLICES, {"stream": "all"}, "stream.* 'all'"),
    ("stream of arrays", (X, Y), {"stream": "whole"}, "stream.* 'whole' .*tuple"),
    ("padding of arrays", (X, Y), {"padding_values": 0}, "padding_values.* 0 .*tuple"),
    ("padding of too few", SLICES, {"padding_values": (0, 0, 0)}, "padding_values.* 2 "),
    ("weight_of", (X, Y), {"weight_of": 3}, "weight_of.* 3"),
    ("no costs", (X, Y), {"max_micro_batch_cost": 8}, "cost_of"),
    ("too few costs", (X, Y), {"cost_of": [1, 2]}, r"cost_of.* 8 .*\(2,\)"),
    ("a cost of NaN", (X, Y), {"cost_of": [*range(7), np.nan]}, r"cost_of\[7\].*nan"),
    ("costs above the limit", (X, Y), {"cost_of": np.arange(8), "max_micro_batch_cost": 5}, "5, and index 7 costs 7"),
    ("costs of a stream", SLICES, {"cost_of": [1, 2]}, "cost_of must be a function"),
]


@pytest.mark.parametrize(("data", "options", "names"), [row[1:] for row in DATA], ids=[row[0] for row in DATA])
def test_resize_batches_refuses(data, options, names):
    if isinstance(data, Counted) and not hasattr(keras.utils, "PyDataset"):
        pytest.skip("tf_keras knows sequences by their length alone")
    with pytest.raises((TypeError, ValueError), match=names):
        resize_batches(data, LoadBalance("bsp", global_batch=4), **options)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: resize_batches((X, Y), 32), "balance must be a LoadBalance, got 32"),
        (lambda: LoadBalance("lbbsp", global_batch=4), "'lbbsp'.*'lb-bsp'"),
        (lambda: LoadBalance(LOCAL, global_batch=4, local_layers=[keras.layers.Dense(1)]), "local_layers"),
        (lambda: LoadBalance("bsp", global_batch=ADAPTS, sync="d-psgd"), "sync='allreduce'"),
        (lambda: resize_batches((X, Y), LoadBalance("bsp", global_batch=ADAPTS), prefetch=1), r"prefetch.*Goodput"),
        (lambda: LearningRateWarmup(0.1, warmup_epochs=0), "warmup_epochs"),
        (lambda: LearningRateSchedule(0.1, 0.5, start_epoch=3, end_epoch=3), "start_epoch.* 3 and 3"),
        (lambda: LearningRateSchedule(float("nan"), 0.1), "initial_lr"),
        *(
            (lambda p=p: resize_batches((X, Y), LoadBalance(p, global_batch=4), weight_of=lambda x, y: 1), "weight_of")
            for p in (NonBlocking(2, scaling="n/N"), LOCAL)
        ),
    ],
)
def test_what_does_not_go_together_is_refused_as_it_is_made(make, names):
    with pytest.raises((TypeError, ValueError), match=names):
        make()


def test_horovod_must_be_initialised(monkeypatch):
    monkeypatch.setattr(hvd, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        LoadBalance(global_batch=4)


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        (lambda: RANGE(9).shuffle(3).map(abs).filter(lambda i: True), r"shuffle\(…, seed=…\).*stream='shard'"),
        (lambda: tf.data.Dataset.list_files("/dev/n*l*"), r"list_files\(…, seed=…\)"),
        (lambda: RANGE(9).map(abs, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (lambda: RANGE(9).shard(2, 1).map(abs), r"shard\(2, 1\).*stream='shard'.*stream='whole'"),
    ],
    ids=["shuffle", "files", "map", "shard"],
)
def test_datasets_that_ranks_would_not_read_alike_are_refused(samples, names):
    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=names):
        check_same_data(samples(), 1, 2, certain=False)
    check_same_data(samples(), 0, 1, certain=False)  # there is only one rank


def in_a_branch():
    class Sometimes(Stepping):
        def train_step(self, batch):
            def update():
                return super(Sometimes, self).train_step(batch)["own"]

            return {"own": tf.cond(tf.reduce_sum(batch[0]) > 0, update, lambda: tf.constant(0.0))}

    return network(Sometimes)


def stepping(times):
    model = network()
    model.times = times
    return model


def having(**attributes):
    model = network()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Norm(hvd.SyncBatchNormalization):
    def __init__(self):  # Horovod's own fails in Keras 3
        keras.layers.BatchNormalization.__init__(self, name="norm")

    def call(self, inputs, training=None):
        return inputs


def normal(layer, **compiled):
    model = keras.Sequential([keras.layers.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compiled)
    return model


def horovods_own():
    import horovod.tensorflow.keras

    return horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))


def with_a_schedule():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))


def with_a_scale():
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def of_a_rank(optimizer):
    head = keras.layers.Dense(1, name="head")
    model = normal(keras.layers.Dense(2))
    model.add(head)
    model.compile(optimizer, "mse")
    return {"model": model, "local_layers": [head]}


def together():
    return keras.layers.BatchNormalization(synchronized=True, name="together")


MODELS = {
    "not compiled": (lambda: {"model": having(optimizer=None)}, r"model\.compile\(optimizer, loss\)"),
    "two optimizers": (lambda: {"model": having(optimizer=[keras.optimizers.SGD()] * 2)}, "optimizers"),
    "as a GAN": (lambda: {"model": having(d_optimizer=keras.optimizers.Adam())}, r"\(optimizer, d_optimizer\)"),
    "in a list": (lambda: {"model": having(both=[keras.optimizers.Adam()])}, r"\(optimizer, both\)"),
    "Horovod's own": (lambda: {"model": network(optimizer=horovods_own())}, "Horovod's"),
    "XLA": (lambda: {"model": network(jit_compile=True)}, "jit_compile=True"),
    "several steps": (lambda: {"model": network(steps_per_execution=2)}, "steps_per_execution is 2"),
    "no update": (lambda: {"model": stepping(0)}, r"train_step.*self\.optimizer\.apply_gradients\("),
    "no update, several": (lambda: {"model": stepping(0), "policy": SEVERAL}, r"train_step.*optimizer"),
    "two updates": (lambda: {"model": stepping(2)}, "round.*once per train_step"),
    "two updates, several": (lambda: {"model": stepping(2), "policy": SEVERAL}, "optimizer.*add the losses"),
    "in a branch": (lambda: {"model": in_a_branch()}, r"tf\.cond.*max_micro_batch"),
    "nothing shared": (lambda: {"model": (m := network()), "local_layers": m.layers}, "local_layers"),
    "smaller batches": (
        lambda: {"policy": SEVERAL, "change": lambda whole: whole.map(lambda x, y: (x[1:], y[1:]))}, "3 samples.* 4 "
    ),
    "other batches": (lambda: {"change": lambda _: SLICES.batch(4)}, "come from resize_batches.*BatchDataset"),
    "fewer batches": (lambda: {"change": lambda batches: batches.take(1)}, "come from resize_batches.*steps_per_epoch"),
    "filtered": (lambda: {"change": lambda whole: whole.filter(lambda x, y: True)}, "come from resize_batches.*filter"),
    "kept batches": (lambda: {"change": lambda batches: batches.cache()}, "come from resize_batches.*cache"),
    "of another balance": (
        lambda: {"change": lambda _: resize_batches((X, Y), LoadBalance("bsp", global_batch=4))}, "not among its call"
    ),
    "a schedule": (lambda: {"model": network(optimizer=with_a_schedule()), "global_batch": ADAPTS}, "a schedule"),
    "a loss scale": (lambda: {"model": network(optimizer=with_a_scale()), "global_batch": ADAPTS}, "mixed_bfloat16"),
    "a norm of ranks": (lambda: {"model": normal(Norm()), "policy": "lb-bsp"}, "'lb-bsp'.*SyncBatchNorm.*norm.*bsp"),
    "a norm in parts": (lambda: {"model": normal(Norm()), "policy": SEVERAL}, "max_micro_batch.*SyncBatchNorm.*norm"),
    "a norm of replicas": (lambda: {"model": normal(together())}, r"synchronized=True\), here together"),
    "own layers, clipped": (
        lambda: of_a_rank(keras.optimizers.SGD(0.1, global_clipnorm=1.0)), "global_clipnorm=1.*local_layers .head."
    ),
    "own layers, scaled": (lambda: of_a_rank(with_a_scale()), "LossScale.*local_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_fit_refuses_before_the_first_update(case):
    make, names = MODELS[case]
    options = make()
    model = options.setdefault("model", network())
    before = model.get_weights()
    with pytest.raises((ValueError, RoundStateError), match=names):
        fit(**options)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_models_of_another_kind_are_refused(monkeypatch):
    other = type("Model", (), {"__module__": "tf_keras.src.models", "optimizer": "sgd"})()
    with pytest.raises(ValueError, match=r"tf_keras\.src\.models\.Model.*KERAS=1"):
        check_compiled(other)
    with pytest.raises(ValueError, match=r"tf\.distribute"):
        check_compiled(having(_distribute_strategy=SimpleNamespace(num_replicas_in_sync=2)))
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(ValueError, match=r"'jax'.*KERAS_BACKEND=tensorflow"):
        check_compiled(network())


def test_norms_that_wait_for_nobody_train():
    assert fit(normal(Norm()))[1].rounds == 2
    assert fit(normal(layer := together()), change=lambda b: setattr(layer, "trainable", False) or b)[1].rounds == 2


def test_fit_without_data_that_it_can_resize_is_told_so():
    with pytest.raises(ValueError, match=r"model\.fit\(resize_batches\(\(x, y\), bal"):
        network().fit(X, Y, verbose=0, callbacks=[LoadBalance(global_batch=4)])


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["arrays", "dataset"])
def test_fit_without_the_callback_trains_nothing(stream, rounds):
    batches = resize_batches(SLICES if stream else (X, Y), LoadBalance("bsp", global_batch=8 // rounds))
    assert len(next(iter(batches))[0]) == 8 // rounds, "one can be looked at"
    model = network()
    before = model.get_weights()
    with pytest.raises(RoundStateError, match=r"LoadBalance.*callbacks=\[bal"):
        model.fit(batches, verbose=0, shuffle=False, callbacks=[keras.callbacks.History()])
    assert [w.tolist() for w in before] == [w.tolist() for w in model.get_weights()]


def test_after_a_fit_only_the_callback_or_a_release_lets_the_optimizer_update():
    """And neither evaluation nor prediction takes what is resized for the rounds of a training."""
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    batches, others = resize_batches((X, Y), balance), resize_batches((X, Y), balance)
    with pytest.raises(tf.errors.OpError, match="predict and evaluate"):
        model.predict(batches, verbose=0)
    with pytest.raises(ValueError, match=r"validation_data.*validation_batches"):
        model.fit(batches, validation_data=others, epochs=2, verbose=0, shuffle=False, callbacks=[balance])
    assert balance.rounds == 2, "the epoch before it"
    model.fit(batches, verbose=0, shuffle=False, callbacks=[balance])
    with pytest.raises(ValueError, match=r"predict.*resize_batches"):
        model.predict(batches, verbose=0)
    assert model.predict(X, verbose=0).shape == (8, 1)
    pairs = [(tf.zeros_like(v), v) for v in model.trainable_variables]
    with pytest.raises(RoundStateError, match=r"round.*balance\.release\(\)"):
        model.optimizer.apply_gradients(pairs)
    with pytest.raises(RoundStateError, match=r"callbacks=\[balance\], or call balance\.release\(\)"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(RoundStateError, match=r"1 rounds ahead.*prefetch"):
        resize_batches((X, Y), balance, prefetch=2)
    balance.release()
    model.optimizer.apply_gradients(pairs)
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("what", ["a weight", "a variable of TensorFlow", "another model's weight", "a spectral norm"])
def test_what_a_train_step_advances_by_itself_is_refused_where_it_runs_once_per_micro_batch(what):
    class Advancing(Stepping):
        def train_step(self, batch):
            told = super().train_step(batch)
            if what != "a spectral norm":
                variable = self.copy.weights[0] if what.startswith("another") else self.count
                variable.assign(0.9 * variable + 0.1)
            return told

    inputs = keras.layers.Input((2,))
    layer = keras.layers.Dense(1)
    layer = keras.layers.SpectralNormalization(layer) if what == "a spectral norm" else layer
    model = Advancing(inputs, keras.layers.Dropout(0.5)(layer(inputs)))  # which advances a seed
    model.count = (
        model.add_weight(name="count", shape=(), initializer="zeros", trainable=False)
        if what == "a weight"
        else tf.Variable(0.0, trainable=False)
    )
    model.copy = network()
    model.copy.trainable = False
    model.compile("sgd", "mse")
    assert fit(model)[1].rounds == 2
    assert model.train_function._figures.advanced, "a stand-in must not take it back"
    with pytest.raises(ValueError, match=r"1 variables.*on_train_batch_end.*policy"):
        fit(model, SEVERAL)


def test_a_step_that_fails_with_a_small_share_is_told_how_many_samples_it_had():
    class Pairs(Stepping):
        def train_step(self, batch):
            return super().train_step((batch[0][0][None], batch[1][1][None]))

    with pytest.raises(tf.errors.InvalidArgumentError) as refused:
        fit(network(Pairs), global_batch=1)
    assert "batch had one sample" in refused.value.__notes__[-1]


def test_batches_of_a_fixed_size_may_be_samples(caplog):
    """Sequences that batch() has cut from a text are."""
    balance = LoadBalance("bsp", global_batch=4)
    sequences = RANGE(64).batch(8, drop_remainder=True).map(lambda s: (tf.cast(s[:-1], "float32"), s[1:]))
    resize_batches(sequences, balance)
    assert len(caplog.records) == 1
    assert re.search("batches of 7, and each is taken as one sample", caplog.text)
    resize_batches(RANGE(64).window(9, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(9)), balance)
    resize_batches(sequences.batch(8).unbatch(), balance)
    words = tf.data.Dataset.from_tensor_slices(["a b", "c"]).batch(2).map(lambda t: tf.strings.split(t).to_tensor())
    resize_batches(words.unbatch(), balance, padding_values="")
    assert len(caplog.records) == 1


def test_a_pipeline_that_asks_too_early_is_told_why():
    balance = LoadBalance("bsp", global_batch=2)
    batches = resize_batches((X, Y), balance)
    balance._session.course.queue.prepare(new=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"size.*prefetch"):
        list(batches)
    with pytest.raises(ValueError, match=r"shape.*padding_values=0"):
        next(iter(resize_batches(TEXTS, LoadBalance("bsp", global_batch=2))))


def test_weights_that_differ_after_the_broadcast_are_noticed(monkeypatch):
    monkeypatch.setattr(start, "fingerprint", lambda weights: next(found))
    found = iter([1])

    class WrongAboutOne(TensorFlowWire):
        def broadcast_object(self, obj, root_rank, name):
            return 2 if obj == 1 else super().broadcast_object(obj, root_rank, name)

    with pytest.raises(HeteroError, match=r"1 ranks .*weights.*something"):
        start.start_from_rank_0([tf.Variable(1.0)], [], WrongAboutOne(), "refusals")


def test_a_loop_of_ones_own_is_told_what_it_lacks():
    balance, early = LoadBalance("bsp", global_batch=4), LoadBalance(NonBlocking(2), global_batch=4)
    limited = resize_batches((X, Y), balance, cost_of=np.arange(8), max_micro_batch_cost=8)
    for its, batches, names in (
        (balance, SLICES.batch(4), r"data.*balance\.batches\(resize_batches"),
        (early, resize_batches((X, Y), early), r"'non-blocking'.*model\.fit"),
        (balance, limited, r"max_micro_batch_cost is for model\.fit"),
    ):
        with pytest.raises(ValueError, match=names):
            next(its.batches(batches))
    with tf.GradientTape() as tape:
        loss = tf.constant(2.0)
    with pytest.raises(ValueError, match=r"1 variables.*tape"):
        weighted_gradients(tape, loss, [tf.Variable(1.0)], balance)
    batches = resize_batches((X, Y), balance)
    skipping = balance.batches(batches)
    next(skipping)
    with pytest.raises(RoundStateError, match="weighted_gradients once"):
        next(skipping)
    assert len(next(balance.batches(batches))[0]) == 4, "one that was left can begin anew"
    with pytest.raises(ValueError, match=r"balance.progress|a schedule"):
        LoadBalance("bsp", global_batch=ADAPTS).start(network(), with_a_schedule())


def _critic():
    critic = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="critic")])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(critic.trainable_variables)
    critic.compile(optimizer, "mse")

    def train(batch, by=lambda gradients, variables: optimizer.apply_gradients(zip(gradients, variables, strict=True))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((critic(batch[0]) - 2.0 * batch[1]) ** 2)
        by(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)

    return critic, optimizer, train


def by_hand(gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign_sub(0.1 * gradient)


@pytest.mark.parametrize(
    ("how", "policy"),
    [("closure", "bsp"), ("by hand", SEVERAL), ("tf.function", "bsp"), ("branch", SEVERAL), ("dict", "bsp")],
)
def test_what_a_train_step_trains_beside_the_optimizer_is_refused_by_name_before_the_first_round(how, policy):
    critic, optimizer, train = _critic()
    compiled = tf.function(train) if how == "tf.function" else None

    class Both(Stepping):
        def train_step(self, batch):
            if how == "branch":
                tf.cond(tf.reduce_sum(batch[0]) > 0.0, lambda: [train(batch), 1.0][1], lambda: 0.0)
            elif how == "by hand":
                train(batch, by_hand)
            else:
                (compiled or train)(batch)
            return super().train_step(batch)

    model = network(Both)
    if how == "dict":
        model.critic, model.optimizers = critic, {"critic": optimizer}
    before = critic.get_weights()
    with pytest.raises(ValueError, match=r"trains \d variables, first '.*(critic|dense).*kernel'.*model\.optimizer"):
        fit(model, policy)
    assert all((a == b).all() for a, b in zip(before, critic.get_weights(), strict=True))


def test_what_the_optimizer_trains_that_ranks_begin_apart_is_refused():
    critic, _, _ = _critic()

    class Both(Stepping):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(batch[0]) + critic(batch[0]) - batch[1]) ** 2)
            variables = self.trainable_variables + critic.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"own": loss}

    model = network(Both, optimizer := keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables + critic.trainable_variables)
    with pytest.raises(ValueError, match=r"trains 2 variables.*attributes"):
        fit(model)


def test_what_a_step_advances_beside_gradients_is_not_refused():
    """A teacher that follows, statistics of batches, layers with functions of their own, and a rank's own layers."""
    teacher, _, _ = _critic()
    seen = tf.Variable(0.0)
    trained, _, train = _critic()

    class Following(Stepping):
        def train_step(self, batch):
            told = super().train_step(batch)
            train(batch)
            tf.function(lambda: [t.assign(0.9 * t + 0.1) for t in teacher.weights] and None)()
            seen.assign_add(tf.reduce_mean(batch[0]))
            return told

    inputs = keras.layers.Input((2,))
    hidden = keras.layers.LSTM(2)(keras.layers.Reshape((2, 1))(inputs))
    hidden = keras.layers.BatchNormalization()(hidden)
    model = Following(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    assert fit(model, local_layers=trained.layers)[1].rounds == 2
    assert float(seen) == 2.0
