"""What an elastic state keeps, gives back and refuses, on one rank; ranks that come and go are in tests/distributed."""

from __future__ import annotations

import itertools
import logging

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvd_hetero.commits import CommitPace
from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import NonBlocking
from keras_callbacks import LoadBalance, resize_batches, weighted_gradients
from keras_callbacks.elastic import CommitStateCallback, KerasState, copied
from keras_callbacks.tensorflow_wire import translated, translated_failures
from tests.unit.keras_callbacks.small import keras

X = np.ones((8, 2), "float32")


def network(*, built=True, optimizer="sgd"):
    inputs = [keras.layers.Input((2,))] if built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(2)])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def fit(model, *callbacks, **options):
    balance = LoadBalance("bsp", global_batch=4)
    model.fit(resize_batches((X, X), balance), verbose=0, shuffle=False, callbacks=[balance, *callbacks], **options)


def compiled_again():
    model = network()
    state = KerasState(model)
    model.compile("sgd", "mse")
    fit(model, CommitStateCallback(state))


def with_a_schedule():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    return KerasState(network(optimizer=keras.optimizers.SGD(rate)), scale_learning_rate=True)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: KerasState(network(built=False)), r"model.*'sequential.*'.*Input"),
        (lambda: KerasState(network(optimizer=None)), r"optimizer.* None.*model\.compile"),
        (lambda: KerasState(network(), resets=1, sync=2), r"named.*resets, sync"),
        (with_a_schedule, r"scale_learning_rate=True.*schedule"),
        (lambda: CommitStateCallback(hvd.elastic.ObjectState(None, None)), r"state.*KerasState.*ObjectState"),
        *(
            (lambda every=every: CommitStateCallback(KerasState(network()), every), "batches_per_commit")
            for every in (0, -1, 2.5, True)
        ),
        (compiled_again, r"optimizer.*KerasState\(model\)"),
        (lambda: fit(network(), CommitStateCallback(KerasState(network()))), r"model.*KerasState\(model\)"),
        (
            lambda: (model := network()).fit(X, X, verbose=0, callbacks=[CommitStateCallback(KerasState(model))]),
            r"callbacks=\[balance, CommitStateCallback\(state\)\]",
        ),
        (
            lambda: fit(model := network(), CommitStateCallback(KerasState(model, epoch=3)), epochs=4),
            r"epoch 0.*epoch 3.*initial_epoch=state\.epoch",
        ),
    ],
)
def test_what_a_state_cannot_keep_is_refused(call, names):
    with pytest.raises((TypeError, ValueError), match=names):
        call()


def test_a_state_may_be_given_the_optimizer_and_a_fit_begins_where_it_stands():
    model = network()
    state = KerasState(model, epoch=3)
    fit(model, CommitStateCallback(state), initial_epoch=3, epochs=5)
    assert (state.epoch, state.batch) == (5, 0)
    assert KerasState(network(optimizer=None), keras.optimizers.SGD()).epoch == 0


class Fails(keras.callbacks.Callback):
    """What Horovod raises where a rank was lost, after these rounds, once each."""

    def __init__(self, balance, after):
        super().__init__()
        self.balance, self.after = balance, after

    def on_train_batch_end(self, batch, logs=None):
        if self.balance.rounds in self.after:
            self.after.remove(self.balance.rounds)
            raise HorovodInternalError("a rank was lost")


def trained(after=(), *, every=2, epochs=2, batches=(4,), policy="bsp", dataset=False, first=False, **options):
    """As a user would, with a global batch for each membership; what was done in it, and the state."""
    keras.utils.set_random_seed(3)
    model = network()
    state = KerasState(model, seen=[], **options)
    failures, sizes, steps = list(after), list(batches), []
    x = np.random.default_rng(1).normal(size=(22, 2)).astype("float32")

    @hvd.elastic.run
    def run(state):
        balance = LoadBalance(policy, global_batch=sizes.pop(0) if len(sizes) > 1 else sizes[0])
        data = tf.data.Dataset.from_tensor_slices((x, x)) if dataset else (x, x)
        commits = [balance, CommitStateCallback(state, every)]
        seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: state.seen.append(epoch))
        started = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: steps.append((balance.rounds, state.epoch, state.batch))
        )
        model.fit(
            resize_batches(data, balance, shuffle=True), initial_epoch=state.epoch, epochs=epochs, verbose=0,
            shuffle=False, callbacks=[seen, *(commits[::-1] if first else commits), Fails(balance, failures), started],
        )  # fmt: skip

    run(state)
    assert not failures
    return steps, state


def rate(state):
    return float(tf.convert_to_tensor(state.model.optimizer.learning_rate))


@pytest.mark.parametrize(
    "options",
    [{"dataset": True}, {"first": True}, {"policy": NonBlocking(2, anticipates=False), "every": 1}],
    ids=["dataset", "commits first", "unknown rounds"],
)
def test_after_failures_other_data_and_policies_go_on_as_well(options):
    (_, undisturbed), (_, state) = trained(**options), trained((1, 3, 4), **options)
    assert int(state.model.optimizer.iterations) == int(undisturbed.model.optimizer.iterations)
    for mine, other in zip(state.model.get_weights(), undisturbed.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_after_failures_training_is_what_it_would_have_been_without(caplog):
    with caplog.at_level(logging.INFO, "hvd_hetero.elastic"):
        _, undisturbed = trained()
        assert not caplog.messages
        steps, state = trained((1, 3, 6, 7, 11))
    said = [text.partition(" s: ")[2] for text in caplog.messages if text.startswith("rank 0 of 1 recovered in ")]
    assert said == [f"round {begins} is over" for begins, _, _ in steps[1:]]
    assert steps == [(0, 0, 0), (0, 0, 0), (2, 0, 2), (4, 0, 4), (6, 1, 0), (10, 1, 4)]
    for mine, other in zip(state.model.get_weights(), undisturbed.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert state.seen == [0, 1], "what changes in place is copied"
    assert state.resets == 5


def test_commits_draw_apart_until_they_take_a_hundredth_of_the_time():
    """By this clock a commit takes a second, and so do the rounds between two of them."""
    model = network()
    state, at = KerasState(model), []
    state._pace = CommitPace(itertools.count().__next__)
    save = state.save
    state.save = lambda: (save(), at.append((state.epoch, state.batch)))
    balance = LoadBalance("bsp", global_batch=1)
    model.fit(resize_batches((X, X), balance), verbose=0, epochs=2, callbacks=[balance, CommitStateCallback(state)])
    assert at == [(0, 1), (0, 2), (0, 4), (1, 0), (2, 0)]


@pytest.mark.parametrize(("scale", "expected"), [(True, 0.02), (False, 0.01)])
def test_rates_and_the_rest_of_an_epoch_follow_the_global_batch(scale, expected, caplog):
    steps, state = trained((4, 4), every=3, batches=(4, 8), scale_learning_rate=scale)
    # Of 22 samples 12 are done; the 10 that are left are two rounds of 8. Before a commit nothing is scaled twice.
    assert steps == [(0, 0, 0), (3, 0, 1), (3, 0, 1)]
    assert rate(state) == pytest.approx(expected)
    assert "the global batch was 4 and is 8 now" in caplog.text
    assert (state.epoch, state.batch) == (2, 0)


def test_the_former_membership_lets_go_of_the_model():
    _, state = trained()
    assert state.model.train_step.wrapped_by is not None
    state.reset()
    assert not hasattr(state.model.train_step, "wrapped_by")
    assert not hasattr(getattr(state.optimizer, "apply", None), "wrapped_by")
    assert not hasattr(state.optimizer.apply_gradients, "wrapped_by")


def test_a_change_of_hosts_is_always_followed_by_a_sync():
    state = KerasState(network())
    state.on_hosts_updated(5, 1)  # some were removed, and Horovod would skip it
    assert state.hosts_have_changed
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is False


def test_other_ranks_cannot_go_on_in_the_middle_of_an_epoch_of_shards(caplog):
    model = network()
    state = KerasState(model)
    state.register_reset_callbacks([lambda: setattr(state._membership, "_rank", 7)])  # as if it had been another one
    samples = tf.data.Dataset.from_tensor_slices((X, X))

    @hvd.elastic.run
    def run(state):
        balance = LoadBalance("bsp", global_batch=2)
        fails = Fails(balance, [2])
        model.fit(
            resize_batches(samples, balance, stream="shard"), initial_epoch=state.epoch, verbose=0, shuffle=False,
            callbacks=[balance, CommitStateCallback(state), fails],
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"epoch 0.*resize_batches"):
        run(state)
    assert "ranks must not change in the middle of an epoch" in caplog.text


@pytest.mark.parametrize("took_part", [True, False])
def test_a_survivor_keeps_the_layers_that_are_its_own(took_part, monkeypatch):
    own = keras.layers.Dense(2)
    model = keras.Sequential([keras.layers.Input((2,)), own, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    state = KerasState(model)
    balance = LoadBalance("bsp", global_batch=4, local_layers=[own])
    state.follow(balance)
    if took_part:
        state.save()
    before = [np.array(w) for w in own.get_weights()]

    def from_rank_0(weights, others, wire, prefix):
        for weight in weights:
            weight.assign(tf.ones_like(weight) * 9)

    monkeypatch.setattr("keras_callbacks.elastic.start_from_rank_0", from_rank_0)
    state.sync()
    assert (model.layers[-1].get_weights()[0] == 9).all()
    for mine, old in zip(own.get_weights(), before, strict=True):
        assert (mine == (old if took_part else 9)).all()
    own.set_weights([np.zeros_like(w) for w in before])
    state.restore()
    assert (own.get_weights()[0] == (before[0] if took_part else 9)).all(), "what came is what a failure goes back to"


def test_a_loop_of_ones_own_goes_on_where_the_state_stands():
    model = network()
    state = KerasState(model, seen=[])
    x = np.arange(22, dtype="float32")[:, None] * np.ones(2, "float32")
    failures = [3, 8]

    @hvd.elastic.run
    def run(state):
        balance = LoadBalance("bsp", global_batch=4)
        batches = resize_batches((x, x), balance, shuffle=True)
        balance.start(model, model.optimizer)
        state.follow(balance)
        for epoch in range(state.epoch, 2):
            for inputs, targets in balance.batches(batches):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
                gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
                model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                state.seen.append((epoch, inputs.numpy()[:, 0].tolist()))
                if balance.rounds in failures:
                    failures.remove(balance.rounds)
                    raise HorovodInternalError("a rank was lost")
                if balance.rounds % 2 == 0 and balance.rounds % 6:
                    state.commit()
            state.epoch = epoch + 1
            state.commit()

    run(state)
    assert not failures
    for epoch in range(2):
        assert sorted(i for e, seen in state.seen for i in seen if e == epoch) == list(range(22))


def failure(text):
    return tf.errors.UnknownError(None, None, text)


@pytest.mark.parametrize("operation", ["HorovodAllreduce_hetero0_1", "HorovodAlltoall_hetero0_0", "HorovodBroadcast"])
def test_a_collective_that_failed_is_what_horovod_calls_it(operation):
    with pytest.raises(HorovodInternalError, match=operation), translated_failures():
        raise failure(f"{{{{node {operation}}}}} Horovod has been shut down")


def test_what_else_fails_is_an_error_of_its_own_or_left_as_it_is():
    assert isinstance(translated(failure("RuntimeError: no such file")), HeteroError)
    assert translated(failure("RuntimeError: no such file"), elastic=False) is None
    assert translated(ValueError("Horovod")) is None


def broken(x):
    def fail(x):
        raise RuntimeError("no such file")

    return tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), (None, 2))


class BrokenInTraining(keras.Sequential):
    def train_step(self, data):
        return super().train_step((broken(data[0]), data[1]))


class BrokenInValidation(keras.Sequential):
    def test_step(self, data):
        return super().test_step((broken(data[0]), data[1]))


@pytest.mark.parametrize("kind", [BrokenInTraining, BrokenInValidation])
def test_a_function_that_fails_in_the_graph_does_not_end_an_elastic_training_in_silence(kind):
    model = kind([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(HeteroError, match=r"(?s)graph.*no such file"):
        hvd.elastic.run(lambda state: fit(model, CommitStateCallback(state), validation_data=(X, X)))(KerasState(model))


def test_a_copy_takes_the_memory_of_the_one_before_and_follows_no_later_change():
    variables = [tf.Variable(np.full(3, 1.0, np.float32)), tf.Variable(2), tf.Variable(tf.ones(2, tf.bfloat16))]
    first = copied(variables)
    where = [value.__array_interface__["data"][0] for value in first]
    for variable in variables:
        variable.assign_add(tf.ones_like(variable))
    second = copied(variables, first)
    assert [value.__array_interface__["data"][0] for value in second] == where
    for variable in variables:
        variable.assign_add(tf.ones_like(variable))
    assert [np.asarray(value, np.float64).tolist() for value in second] == [[2.0] * 3, 3.0, [2.0] * 2]
    assert [value.shape for value in copied(variables, copied(variables[:1]))] == [(3,), (), (2,)], "what is new"
    other = [tf.Variable(np.ones(3))]
    assert copied(other, first[:1])[0].dtype == np.float64
