"""What Keras users cannot have is refused with the rule, the value and the way out; on one rank, without horovodrun."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.errors import HeteroError, RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP, Goodput, NonBlocking  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches, start, weighted_gradients  # noqa: E402
from keras_callbacks.metrics.of_all_ranks import JoinedMetrics  # noqa: E402
from keras_callbacks.pipeline.queue import TOO_FAR_AHEAD  # noqa: E402
from keras_callbacks.pipeline.sources import DatasetSource  # noqa: E402
from keras_callbacks.refusals import check_compiled  # noqa: E402
from keras_callbacks.tensorflow_wire import TensorFlowWire  # noqa: E402
from keras_callbacks.train_function import RoundFunction  # noqa: E402

keras = tf.keras
X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
SEVERAL = BSP(max_micro_batch=2)


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


class Stepping(keras.Model):
    """A train step that calls the optimizer so many times."""

    times = 1

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(batch[0]) - batch[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for _ in range(self.times):
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"own": loss}


def network(times=1, **compiled):
    inputs = keras.layers.Input((2,))
    model = Stepping(inputs, keras.layers.Dense(1)(inputs))
    model.times = times
    model.compile("sgd", "mse", **compiled)
    return model


def fit(model=None, policy="bsp", *, data=None, change=lambda batches: batches, **options):
    model = network() if model is None else model
    balance = LoadBalance(policy, global_batch=4, **options)
    batches = change(resize_batches((X, Y), balance))
    model.fit(batches if data is None else data, verbose=0, shuffle=False, callbacks=[balance])
    return model, balance, batches


@pytest.mark.parametrize("policy", ["bsp", SEVERAL], ids=["one", "several"])
def test_a_train_step_that_never_calls_the_optimizer_is_refused(policy):
    with pytest.raises(ValueError, match=r"train_step.*self\.optimizer\.apply_gradients\("):
        fit(network(times=0), policy)


def test_a_train_step_that_calls_the_optimizer_twice_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.*add the losses"):
        fit(network(times=2), SEVERAL)
    with pytest.raises(RoundStateError, match=r"round.*once per train_step"):
        fit(network(times=2))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)), r"balance\.progress"),
        (lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mixed_bfloat16"),
    ],
    ids=["a schedule", "a loss scale"],
)
def test_an_optimizer_whose_rate_cannot_follow_the_batch_is_refused(optimizer, message):
    model = network()
    model.compile(optimizer(), "mse")
    balance = LoadBalance("bsp", global_batch=Goodput(start=4, least=2, most=8))
    with pytest.raises(ValueError, match=message):
        balance.start(model, model.optimizer)
    with pytest.raises(ValueError, match=message):
        model.fit(resize_batches((X, Y), balance), verbose=0, callbacks=[balance])


def test_a_loop_with_a_batch_that_stays_gets_the_optimizer_back_at_its_own_rate():
    model, optimizer = network(), keras.optimizers.SGD(0.1)
    before = LoadBalance("bsp", global_batch=Goodput(start=4, least=2, most=8))
    before.start(model, optimizer)
    before._session.calls.rate_factor.assign(3.0)
    LoadBalance("bsp", global_batch=4).start(model, optimizer)
    (weights, *_), gradients = model.get_weights(), [tf.ones_like(v) for v in model.trainable_variables]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert np.allclose(weights - model.get_weights()[0], 0.1)


def test_a_fit_of_another_model_begins_its_progress_anew_and_one_of_the_same_goes_on():
    balance = LoadBalance("bsp", global_batch=Goodput(start=4, least=2, most=8))
    batches, told = resize_batches((X, Y), balance), []
    for model in (first := network(), first, network()):
        model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[balance])
        told.append((balance.progress, balance.rounds))
    assert told == [(4.0, 4), (8.0, 8), (4.0, 12)]


def test_a_batch_that_adapts_is_refused_where_it_cannot_and_not_known_ahead():
    adapting = Goodput(start=4, least=2, most=8)
    with pytest.raises(ValueError, match="sync='allreduce'"):
        LoadBalance("bsp", global_batch=adapting, sync="d-psgd")
    with pytest.raises(ValueError, match="prefetch must be 0 under global_batch=Goodput"):
        resize_batches((X, Y), LoadBalance("bsp", global_batch=adapting), prefetch=1)


@pytest.mark.parametrize("what", ["a weight", "a variable of TensorFlow", "another model's weight"])
def test_what_a_train_step_advances_by_itself_is_refused_where_it_runs_once_per_micro_batch(what):
    class Advancing(Stepping):
        def train_step(self, batch):
            told = super().train_step(batch)
            variable = self.copy.weights[0] if what.startswith("another") else self.count
            variable.assign(0.9 * variable + 0.1)
            return told

    inputs = keras.layers.Input((2,))
    model = Advancing(inputs, keras.layers.Dropout(0.5)(keras.layers.Dense(1)(inputs)))  # which advances a seed
    model.count = (
        model.add_weight(name="count", shape=(), initializer="zeros", trainable=False)
        if what == "a weight"
        else tf.Variable(0.0, trainable=False)
    )
    model.copy = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.copy.trainable = False
    model.compile("sgd", "mse")
    assert fit(model, "bsp")[1].rounds == 2
    with pytest.raises(ValueError, match=r"1 variables.*on_train_batch_end.*policy"):
        fit(model, SEVERAL)


def test_a_counter_that_is_told_of_goes_on_as_in_one_process():
    """Whatever this rank's share of the rounds, since the step goes by it."""

    class Annealing(keras.Model):
        def __init__(self, *of):
            super().__init__(*of)
            self.count = tf.Variable(0.0, trainable=False)

        def train_step(self, batch):
            self.count.assign_add(1.0)
            strength = tf.minimum(1.0, self.count / 10.0)
            with tf.GradientTape() as tape:
                loss = strength * tf.reduce_mean((self(batch[0]) - batch[1]) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss, "strength": strength}

    inputs = keras.layers.Input((2,))
    model = Annealing(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    balance = LoadBalance("bsp", global_batch=4)
    session = balance._session
    share = session.calls.share
    session.calls.share = lambda: [0.5, *share()[1:]]
    batches = resize_batches((X, Y), balance)
    history = model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=[balance]).history
    assert float(model.count) == 2 * session.course.queue.rounds
    assert history["strength"] == pytest.approx([session.course.queue.rounds / 10, session.course.queue.rounds / 5])


def test_an_update_in_a_branch_is_refused_and_told_how_to_accumulate():
    class Sometimes(Stepping):
        def train_step(self, batch):
            def update():
                return super(Sometimes, self).train_step(batch)["own"]

            return {"own": tf.cond(tf.reduce_sum(batch[0]) > 0, update, lambda: tf.constant(0.0))}

    inputs = keras.layers.Input((2,))
    model = Sometimes(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"tf\.cond.*max_micro_batch"):
        fit(model)


def test_what_spectral_normalization_advances_goes_on_and_is_refused_where_it_runs_once_per_micro_batch():
    inputs = keras.layers.Input((2,))
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(1))
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    _, balance, _ = fit(model, "bsp")
    vector = layer.vector_u if isinstance(layer.vector_u, tf.Variable) else layer.vector_u.value
    assert any(v is vector for v in model.train_function._figures.advanced), "a stand-in must not take it back"
    assert balance.rounds == 2
    with pytest.raises(ValueError, match=r"train_step.*1 variables.*'.*u"):
        fit(model, SEVERAL)


def test_horovods_synchronised_batch_norm_is_refused_where_ranks_are_to_differ():
    class Norm(hvd.SyncBatchNormalization):
        def __init__(self):  # Horovod's own fails in Keras 3
            keras.layers.BatchNormalization.__init__(self, name="norm")

        def call(self, inputs, training=None):
            return inputs

    def model():
        made = keras.Sequential([keras.layers.Dense(2), keras.Sequential([Norm()]), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    with pytest.raises(ValueError, match=r"'lb-bsp'.*SyncBatchNormalization.*norm: .*'bsp'"):
        fit(model(), "lb-bsp")
    with pytest.raises(ValueError, match=r"max_micro_batch.*SyncBatchNormalization.*norm: ranks do unequal numbers"):
        fit(model(), BSP(max_micro_batch=2))
    with pytest.raises(ValueError, match=r"'lb-bsp'.*SyncBatchNormalization.*norm"):
        LoadBalance("lb-bsp", global_batch=4).start(model(), keras.optimizers.SGD())  # for a loop of one's own
    assert fit(model(), "bsp")[1].rounds == 2


def test_an_update_outside_of_fit_is_refused_until_the_optimizer_is_released():
    model, balance, _ = fit()
    gradients = [tf.zeros_like(v) for v in model.trainable_variables]
    with pytest.raises(RoundStateError, match=r"round.*balance\.release\(\)"):
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    balance.release()
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_a_loss_that_reaches_nothing_that_ranks_share_is_refused():
    model = network()
    with pytest.raises(ValueError, match=r"variable.*trainable.*local_layers"):
        fit(model, local_layers=model.layers)


def test_a_batch_that_was_made_smaller_cannot_be_cut_into_the_planned_micro_batches():
    with pytest.raises(ValueError, match=r"3 samples.* 4 .*resize_batches"):
        fit(policy=SEVERAL, change=lambda batches: batches.map(lambda x, y: (x[1:], y[1:])))


def test_batches_from_elsewhere_are_refused():
    plain = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(RoundStateError, match=r"come from resize_batches.*model\.fit\(resize_batches\(\(x, y\)"):
        fit(data=plain)


@pytest.mark.parametrize(
    ("name", "arguments", "way_out"),
    [
        ("unbatch", (), "before resize_batches"),
        ("batch", (3,), "before resize_batches"),
        ("shard", (2, 0), "ranks"),
        ("shuffle", (3,), r"resize_batches\(…, shuffle=True\)"),
        ("take", (1,), r"steps_per_epoch.*before resize_batches"),
        ("cache", (), "cache the samples"),
        ("filter", (lambda x, y: True,), "filter the samples"),
        ("rebatch", (3,), "global_batch"),
    ],
)
def test_what_cannot_follow_resize_batches_is_refused_by_its_name(name, arguments, way_out):
    batches = resize_batches((X, Y), LoadBalance("bsp", global_batch=4))
    with pytest.raises(ValueError, match=rf"^\.{name}\(\).*{way_out}"):
        getattr(batches, name)(*arguments)


def test_validation_data_from_resize_batches_are_refused_and_do_not_disturb_training():
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    batches, others = resize_batches((X, Y), balance), resize_batches((X, Y), balance)
    with pytest.raises(ValueError, match=r"validation_data.*each rank"):
        model.fit(batches, validation_data=others, epochs=2, verbose=0, shuffle=False, callbacks=[balance])
    assert balance.rounds == 2, "the epoch before it"


def test_a_prediction_of_resized_batches_is_told_what_to_give():
    model, balance = network(), LoadBalance("bsp", global_batch=4)
    batches = resize_batches((X, Y), balance)
    with pytest.raises(tf.errors.OpError, match="predict and evaluate"):
        model.predict(batches, verbose=0)
    model.fit(batches, verbose=0, shuffle=False, callbacks=[balance])
    with pytest.raises(ValueError, match=r"predicted.*resize_batches"):
        model.predict(batches, verbose=0)
    assert model.predict(X, verbose=0).shape == (8, 1)


def test_a_step_that_fails_with_a_small_share_is_told_how_many_samples_it_had():
    class Pairs(Stepping):
        def train_step(self, batch):
            return super().train_step((batch[0][0][None], batch[1][1][None]))

    inputs = keras.layers.Input((2,))
    model = Pairs(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    balance = LoadBalance("bsp", global_batch=1)
    with pytest.raises(tf.errors.InvalidArgumentError) as refused:
        model.fit(resize_batches((X, Y), balance), verbose=0, shuffle=False, callbacks=[balance])
    assert "batch had one sample" in refused.value.__notes__[-1]


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["arrays", "dataset"])
def test_fit_without_the_callback_trains_nothing(stream, rounds):
    data = tf.data.Dataset.from_tensor_slices((X, Y)) if stream else (X, Y)
    batches, model = resize_batches(data, LoadBalance("bsp", global_batch=8 // rounds)), network()
    before = model.get_weights()
    with pytest.raises(RoundStateError, match=r"LoadBalance.*callbacks=\[bal"):
        model.fit(batches, verbose=0, shuffle=False, callbacks=[keras.callbacks.History()])
    assert [w.tolist() for w in before] == [w.tolist() for w in model.get_weights()]


def test_batches_of_an_epoch_of_one_round_can_be_looked_at_and_no_more():
    for data in ((X, Y), tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True)):
        batches = resize_batches(data, LoadBalance("bsp", global_batch=8))
        assert len(next(iter(batches))[0]) == 8


def test_a_dataset_that_was_left_batched_is_refused():
    """It trained on eight samples as if they were one of two dimensions, which layers like Dense allow."""
    x, y = np.ones((24, 2), "float32"), np.ones((24, 1), "float32")
    samples = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).prefetch(2)
    balance = LoadBalance("bsp", global_batch=4)
    with pytest.raises(ValueError, match=r"batch\(…\).*unbatch\(\)"):
        resize_batches(samples, balance)
    words = tf.data.Dataset.from_tensor_slices(["a b", "c"]).batch(2).map(lambda t: tf.strings.split(t).to_tensor())
    resize_batches(words.unbatch(), balance, padding_values="")


def test_batches_of_a_fixed_size_may_be_samples_of_a_model_without_a_known_input(caplog):
    """Sequences that batch() has cut from a text are."""
    sequences = (
        tf.data.Dataset.range(64).batch(8, drop_remainder=True).map(lambda s: (tf.cast(s[:-1], "float32"), s[1:]))
    )
    resize_batches(sequences, LoadBalance("bsp", global_batch=4))
    assert [r.message for r in caplog.records] == [
        "the dataset ends in batches of 7, and each is taken as one sample. Leave batch(…) out, or put unbatch() "
        "behind it: resize_batches takes single samples"
    ]
    text = tf.data.Dataset.range(64).window(9, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(9))
    resize_batches(text, LoadBalance("bsp", global_batch=4))
    resize_batches(sequences.batch(8).unbatch(), LoadBalance("bsp", global_batch=4))
    assert len(caplog.records) == 1


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


def test_batches_of_another_load_balance_are_refused():
    others = resize_batches((X, Y), LoadBalance("bsp", global_batch=4))
    with pytest.raises(RoundStateError, match=r"another LoadBalance.*model\.fit\(resize_batches"):
        fit(data=others)


def test_a_generator_is_told_what_to_write():
    balance = LoadBalance("bsp", global_batch=4)
    for generator in ((i for i in range(3)), lambda: iter(range(3))):
        with pytest.raises(TypeError, match=r"tf\.data\.Dataset\.from_g.*\.unbatch\(\)"):
            resize_batches(generator, balance)


def test_what_has_an_index_and_a_length_is_told_to_become_a_sequence():
    class Indexed:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return X, Y

    with pytest.raises(TypeError, match=r"Indexed.*keras\.utils\.PyDataset"):
        resize_batches(Indexed(), LoadBalance("bsp", global_batch=4))


def test_batches_that_are_asked_for_too_early_are_refused_and_fit_says_so_plainly():
    balance = LoadBalance("bsp", global_batch=2)
    batches = resize_batches((X, Y), balance)
    session = balance._session
    session.course.queue.prepare(new=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"size.*prefetch"):
        list(batches)

    def fails(iterator):
        raise tf.errors.InvalidArgumentError(None, None, f"assertion failed: [{TOO_FAR_AHEAD}]")

    session.course.fitting, model = True, network()
    figures = JoinedMetrics(model, TensorFlowWire(), "figures", gathers=False, warned=set())
    with pytest.raises(RoundStateError, match=r"^the data pipeline .*size"):
        RoundFunction(session, model, fails, figures)(iter(()))


def test_a_batch_is_used_once():
    balance = LoadBalance("bsp", global_batch=4)
    resize_batches((X, Y), balance)
    queue = balance._session.course.queue
    queue.prepare(new=True)
    queue.take()
    queue.take()
    with pytest.raises(RoundStateError, match=r"batch 1 .*one loop at a time"):
        queue.part(1)


def test_another_prefetch_after_training_began_is_refused():
    _, balance, _ = fit()
    with pytest.raises(RoundStateError, match=r"1 rounds ahead.*resize_batches.*prefetch"):
        resize_batches((X, Y), balance, prefetch=2)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m, _: setattr(m, "optimizer", None), r"model\.compile\(optimizer, loss\)"),
        (lambda _, p: p.setattr("keras.backend.backend", lambda: "jax"), r"'jax'.*KERAS_BACKEND=tensorflow"),
        (lambda m, _: setattr(m, "optimizer", [m.optimizer] * 2), r"optimizers.*a single one"),
        (
            lambda m, _: setattr(m, "_distribute_strategy", SimpleNamespace(num_replicas_in_sync=2)),
            r"tf\.distribute",
        ),
        (
            lambda m, _: setattr(m, "d_optimizer", keras.optimizers.Adam()),
            r"\(optimizer, d_optimizer\).*one call",
        ),
        (
            lambda m, _: setattr(m, "both", [m.optimizer, keras.optimizers.Adam()]),
            r"\(optimizer, both\)",
        ),
    ],
    ids=["not compiled", "backend", "optimizers", "strategy", "as a GAN", "in a list"],
)
def test_models_that_could_not_be_synchronised_are_refused(break_it, message, monkeypatch):
    model = network()
    model.kept = model.optimizer
    check_compiled(model)
    break_it(model, monkeypatch)
    with pytest.raises(ValueError, match=message):
        check_compiled(model)


def test_a_model_of_the_other_keras_is_refused():
    other = type("Model", (), {"__module__": "tf_keras.src.models", "optimizer": "sgd"})()
    with pytest.raises(ValueError, match=r"tf_keras\.src\.models\.Model.*KERAS=1"):
        check_compiled(other)


def test_horovod_must_be_initialised(monkeypatch):
    monkeypatch.setattr(hvd, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        LoadBalance(global_batch=4)


def test_weights_that_differ_after_the_broadcast_are_noticed(monkeypatch):
    monkeypatch.setattr(start, "fingerprint", lambda weights: next(found))
    found = iter([1])

    class WrongAboutOne(TensorFlowWire):
        def broadcast_object(self, obj, root_rank, name):
            return 2 if obj == 1 else super().broadcast_object(obj, root_rank, name)

    with pytest.raises(HeteroError, match=r"1 ranks .*weights.*something"):
        start.start_alike([tf.Variable(1.0)], [], WrongAboutOne(), "refusals")


def test_a_loop_of_ones_own_is_told_what_it_lacks():
    balance = LoadBalance("bsp", global_batch=4)
    plain = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(ValueError, match=r"data.*balance\.batches\(resize_batches"):
        next(balance.batches(plain))
    early = LoadBalance(NonBlocking(2), global_batch=4)
    with pytest.raises(ValueError, match=r"'non-blocking'.*model\.fit"):
        next(early.batches(resize_batches((X, Y), early)))
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.constant(2.0)
    with pytest.raises(ValueError, match=r"1 variables.*tape"):
        weighted_gradients(tape, loss, [variable], balance)


def test_a_loop_that_skips_a_batch_is_told_so_and_one_that_is_left_can_begin_anew():
    balance = LoadBalance("bsp", global_batch=4)
    batches = resize_batches((X, Y), balance)
    skipping = balance.batches(batches)
    next(skipping)
    with pytest.raises(RoundStateError, match="weighted_gradients once"):
        next(skipping)
    assert len(next(balance.batches(batches))[0]) == 4


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (lambda: tf.data.Dataset.range(0), ValueError, r"data.*sample"),
        (
            lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])),
            TypeError,
            r"samples.*RaggedTensorSpec.*densify",
        ),
    ],
    ids=["empty", "ragged"],
)
def test_datasets_that_cannot_be_shared_out_are_refused(dataset, error, message):
    with pytest.raises(error, match=message):
        DatasetSource(dataset())


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


@pytest.mark.parametrize("policy", ["bsp", SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("how", ["closure", "by hand", "tf.function", "branch", "dict", "submodel"])
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

    inputs = keras.layers.Input((2,))
    model = Both(inputs, keras.layers.Dense(1)(inputs))
    if how in ("dict", "submodel"):
        model.critic = critic
    if how == "dict":
        model.optimizers = {"critic": optimizer}
    model.compile("sgd", "mse")
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
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"own": loss}

    inputs = keras.layers.Input((2,))
    model = Both(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer := keras.optimizers.SGD(0.1), "mse")
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


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), r"global_clipnorm=1\.0.*local_layers, here head.*use"),
        (lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1)), r"LossScale.*local_layers"),
    ],
    ids=["global_clipnorm", "a loss scale"],
)
def test_layers_of_a_rank_are_refused_where_the_optimizer_goes_by_all_gradients(optimizer, message):
    inputs = keras.layers.Input((2,))
    model = Stepping(inputs, keras.layers.Dense(1, name="head")(keras.layers.Dense(2)(inputs)))
    model.compile(optimizer(), "mse")
    with pytest.raises(ValueError, match=message):
        fit(model, local_layers=[model.get_layer("head")])


@pytest.mark.parametrize("policy", ["bsp", "lb-bsp"])
def test_a_batch_norm_that_would_not_be_synchronised_is_refused_by_name(policy):
    norm = keras.layers.BatchNormalization(synchronized=True, name="together")
    model = keras.Sequential([keras.layers.Input((2,)), norm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"synchronized=True\), here together.*GroupNormalization"):
        fit(model, policy)
    norm.trainable = False  # it uses its running statistics
    model.compile("sgd", "mse")
    assert fit(model, policy)[1].rounds == 2


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
