"""What an elastic state is told that it cannot keep; what it keeps is tested on ranks, by the conformance tests."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance, resize_batches  # noqa: E402
from keras_callbacks.elastic import CommitStateCallback, KerasState  # noqa: E402

keras = tf.keras
X = np.ones((8, 2), "float32")


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def network(*, built=True, compiled=True):
    inputs = [keras.layers.Input((2,))] if built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(2)])
    if compiled:
        model.compile("sgd", "mse")
    return model


def fit(model, *callbacks, **options):
    balance = LoadBalance("bsp", global_batch=4)
    model.fit(resize_batches((X, X), balance), verbose=0, shuffle=False, callbacks=[balance, *callbacks], **options)


def test_a_model_without_weights_has_nothing_to_keep():
    with pytest.raises(
        ValueError, match=r"model must be built.*'sequential.*' is not; give it an Input, or call model"
    ):
        KerasState(network(built=False))


def test_a_state_needs_the_optimizer():
    with pytest.raises(ValueError, match=r"optimizer must be given where the model is not compiled, got None; call mo"):
        KerasState(network(compiled=False))
    assert KerasState(network(compiled=False), keras.optimizers.SGD()).epoch == 0


def test_what_horovod_itself_keeps_is_not_enough():
    with pytest.raises(TypeError, match=r"state must be a KerasState of keras_callbacks.elastic, got ObjectState"):
        CommitStateCallback(hvd.elastic.ObjectState(None, None))


@pytest.mark.parametrize("batches", [0, -1, 2.5, True])
def test_commits_come_after_whole_batches(batches):
    with pytest.raises(ValueError, match=r"batches_per_commit must be a whole number.*larger than an epoch"):
        CommitStateCallback(KerasState(network()), batches)


def test_the_state_is_of_the_model_that_is_trained():
    model = network()
    state = KerasState(model)
    model.compile("sgd", "mse")
    for other in (model, network()):
        with pytest.raises(ValueError, match=r"another optimizer than this fit trains; make KerasState\(model\) after"):
            fit(other, CommitStateCallback(state))


def test_commits_go_with_a_load_balance():
    model = network()
    with pytest.raises(ValueError, match=r"needs a LoadBalance.*callbacks=\[balance, CommitStateCallback\(state\)\]"):
        model.fit(X, X, verbose=0, callbacks=[CommitStateCallback(KerasState(model))])


def test_a_fit_begins_where_the_state_stands():
    model = network()
    state = KerasState(model, epoch=3)
    with pytest.raises(
        ValueError, match=r"begins epoch 0, and the state stands at epoch 3; .*initial_epoch=state.epoch"
    ):
        fit(model, CommitStateCallback(state), epochs=4)
    fit(model, CommitStateCallback(state), initial_epoch=3, epochs=5)
    assert (state.epoch, state.batch) == (5, 0)
