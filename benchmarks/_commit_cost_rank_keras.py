"""One rank of `benchmarks/commit_cost.py`, Keras: train a large model, and time commits and rounds by turns."""

from __future__ import annotations

import json
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from _commit_cost import LAYERS, ROUNDS, WARM_UP, Timed, width_of

from hvd_hetero.testing import report
from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.elastic import CommitStateCallback, KerasState

keras = tf.keras


class Rounds(keras.callbacks.Callback):
    """Before the callback that commits."""

    def __init__(self, timed: Timed) -> None:
        super().__init__()
        self.timed = timed

    def on_train_batch_begin(self, batch, logs=None):
        self.timed.begin()

    def on_train_batch_end(self, batch, logs=None):
        self.timed.end()


def main() -> None:
    job = json.loads(sys.argv[1])
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    width = width_of(job["parameters"])
    model = keras.Sequential([keras.layers.Input((width,)), *(keras.layers.Dense(width) for _ in range(LAYERS))])
    told = {}
    for chosen, rounds in ((2, job["rounds"] + WARM_UP), ("auto", ROUNDS)):
        data = np.random.default_rng(1).normal(size=(rounds * hvd.size(), width)).astype("float32")
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
        state = KerasState(model)
        timed = Timed(state, lambda state=state: [variable.numpy() for variable in state._variables()])
        timed.copies = chosen == 2
        train(state, timed, data, chosen)
        told[str(chosen)] = timed.told()
    report({**told, "parameters": model.count_params()})


@hvd.elastic.run
def train(state: KerasState, timed: Timed, data: np.ndarray, chosen: int | str) -> None:
    balance = LoadBalance("bsp", global_batch=hvd.size())
    state.model.fit(
        resize_batches((data, data), balance), epochs=1, verbose=0, shuffle=False,
        callbacks=[Rounds(timed), balance, CommitStateCallback(state, chosen)],
    )  # fmt: skip


if __name__ == "__main__":
    main()
