"""Recognise handwritten digits on ranks that may die and join during training: a whole Keras script.

    cp examples/hosts.txt ~/hosts.txt
    HOSTS=~/hosts.txt horovodrun -np 3 --min-np 1 --max-np 4 --host-discovery-script examples/discover_hosts.sh \
        --network-interface lo python examples/keras_elastic.py

Each rank prints the number of its process. End one with ``kill -9``: the others go on from the last commit. Or let one
more join: ``echo 127.0.0.0001:1 >> ~/hosts.txt``. Each rank has its own host name, because Horovod gives up the whole
host of a rank that has failed; all these names mean this machine. ``TF_USE_LEGACY_KERAS=1`` selects tf_keras.
It needs scikit-learn, which holds the digits.
"""

from __future__ import annotations

import argparse
import os

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.elastic import CommitStateCallback, KerasState

keras = tf.keras


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=100)  # a minute or more: time to end a rank by hand
    parser.add_argument("--batches-per-commit", type=int, default=5)
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = digits.images[..., None].astype("float32") / 16, digits.target

    model = keras.Sequential([
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    @hvd.elastic.run
    def train(state: KerasState) -> None:
        # Everything that depends on the ranks is made again after every reset; the rest is in the state.
        balance = LoadBalance(options.policy, global_batch=128)
        mine = slice(1500 + hvd.rank(), None, hvd.size())

        def begin(logs: dict | None = None) -> None:
            print(
                f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()} after round {balance.rounds}", flush=True
            )

        def tell(epoch: int, logs: dict) -> None:
            if hvd.rank() == 0:
                split = " + ".join(map(str, balance.plan))
                print(f"epoch {epoch + 1}: accuracy {logs['val_accuracy']:.3f}, batches {split}", flush=True)

        model.fit(
            resize_batches((x[:1500], y[:1500]), balance, shuffle=True),
            validation_data=(x[mine], y[mine]),
            initial_epoch=state.epoch,
            epochs=options.epochs,
            callbacks=[
                balance,
                CommitStateCallback(state, options.batches_per_commit),
                keras.callbacks.LambdaCallback(on_train_begin=begin, on_epoch_end=tell),
            ],
            shuffle=False,
            verbose=0,
        )

    train(KerasState(model))


if __name__ == "__main__":
    main()
