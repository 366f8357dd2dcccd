"""Recognise handwritten digits on ranks of unequal speed: a whole Keras script.

    horovodrun -np 2 python examples/keras_digits.py
    TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/keras_digits.py     # with tf_keras

It needs scikit-learn, which holds the 1,797 digits. Every rank trains on what it can finish in time; the result is
the same as in one process with a batch of 128. Each rank evaluates its part of the test set; the figures are for the
whole. ``--slow RANK`` slows one rank down, to see the batches follow.
"""

from __future__ import annotations

import argparse
import time

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras


class Slowed(keras.layers.Layer):
    """Takes 0.2 ms for each sample of training."""

    def call(self, images, training=False):
        return (
            tf.ensure_shape(tf.numpy_function(self.wait, [images], tf.float32), (None, 8, 8, 1)) if training else images
        )

    @staticmethod
    def wait(images):
        time.sleep(2e-4 * len(images))
        return images


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slow", type=int, help="a rank that takes 0.2 ms more per sample")
    parser.add_argument("--telemetry", help="write one JSON line per round to this file")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = digits.images[..., None].astype("float32") / 16, digits.target
    mine = slice(1500 + hvd.rank(), None, hvd.size())

    model = keras.Sequential([
        keras.layers.Input((8, 8, 1)),
        *([Slowed()] if hvd.rank() == options.slow else []),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    balance = LoadBalance(options.policy, global_batch=128, telemetry=options.telemetry)
    model.fit(
        resize_batches((x[:1500], y[:1500]), balance, shuffle=True),
        validation_data=(x[mine], y[mine]),
        epochs=options.epochs,
        callbacks=[balance],
        shuffle=False,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        print(f"batches {' + '.join(map(str, balance.plan))}", flush=True)


if __name__ == "__main__":
    main()
