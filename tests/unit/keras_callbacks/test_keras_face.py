"""What a user holds has what users call, and what Keras calls: all else is the session's."""

from __future__ import annotations

import logging

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance, resize_batches  # noqa: E402

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


def test_fit_hands_each_round_to_a_function_and_goes_on_where_it_fails(tmp_path, caplog, capfd):
    seen, called = [], []

    def fails(record):
        called.append(record["round"])
        raise RuntimeError("no connection")

    balance = LoadBalance("bsp", global_batch=8, telemetry=tmp_path / "run.jsonl", progress=True)
    balance.on_round(fails)
    balance.on_round(lambda record: seen.append((record["round"], record["samples"])))
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
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
