"""What a user holds has what users call, and what Keras calls: all else is the session's."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance  # noqa: E402

Callback = tf.keras.callbacks.Callback


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_load_balance_has_what_users_call_and_what_keras_calls():
    for_users = public(dir(LoadBalance)) - public(dir(Callback))
    assert for_users == {"policy", "rounds", "plan", "batch_size", "start", "batches", "release", "close"}
    balance = LoadBalance("bsp", global_batch=4)
    assert public(vars(balance)) == public(vars(Callback()))
