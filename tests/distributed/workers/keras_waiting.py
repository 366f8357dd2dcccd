"""One rank of a ``fit`` that gets stuck as its argument says, and is ended by the watchdog after seconds."""

from __future__ import annotations

import os
import signal
import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from keras_fits import BATCH, data, keras, network

from hvd_hetero.watchdog import Patience
from keras_callbacks import LoadBalance, resize_batches


class Stuck(keras.callbacks.Callback):
    """On rank 1, after its second batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if batch != 1 or hvd.rank() != 1:
            return
        if self.how == "a_fit_with_a_rank_that_is_stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            hvd.allreduce(tf.constant(1.0), name="a metric")


def main(how: str) -> None:
    hvd.init()
    model = network()
    model.compile("sgd", loss="mse")
    balance = LoadBalance("bsp", global_batch=BATCH, patience=Patience(warn=4, deadlock=8, silent=8))
    model.fit(resize_batches(data(), balance), epochs=3, verbose=0, shuffle=False, callbacks=[balance, Stuck(how)])


if __name__ == "__main__":
    main(sys.argv[1])
