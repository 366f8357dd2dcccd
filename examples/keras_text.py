"""Tag the words of texts of unequal lengths on ranks of unequal speed: a small transformer in Keras.

    horovodrun -np 2 python examples/keras_text.py
    TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/keras_text.py     # with tf_keras

The script makes up its texts. The first word of a text is its language, which decides how the other words are tagged;
so a tag needs attention. Two things differ from training on pictures:

- ``weight_of``: the loss is the mean over words. A batch counts as many as it has words, and not as its texts.
- ``cost_of``: a text costs what its length says. Ranks share out the words of a round, and not its texts.

``--slow RANK`` slows one rank down by 20 microseconds a word, to see its share of the words follow.
"""

from __future__ import annotations

import argparse
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from keras_callbacks import LoadBalance, resize_batches

keras = tf.keras
LANGUAGES, WORDS, TAGS = 3, 30, 4
PADDING, NO_TAG = np.int64(0), np.int64(-1)


def texts(number, seed):
    """Yield texts of some words and the tags of these; lengths are log-normal, as those of many real texts."""
    rng = np.random.default_rng(seed)
    tags = np.random.default_rng(0).integers(0, TAGS, (LANGUAGES, WORDS))
    for _ in range(number):
        length = int(np.clip(rng.lognormal(2.5, 0.8), 2, 100))
        language, words = rng.integers(LANGUAGES), rng.integers(WORDS, size=length)
        yield (
            np.concatenate([[1 + language], 1 + LANGUAGES + words]),
            np.concatenate([[NO_TAG], tags[language, words]]),
        )


def samples(number, seed):
    """Return the texts as a dataset of single samples, of unequal shapes."""
    spec = tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(lambda: texts(number, seed), output_signature=(spec, spec))


def mean_over_words(tags, logits):
    """Return the mean loss of all words that have a tag."""
    tagged = tf.cast(tags >= 0, logits.dtype)
    losses = keras.losses.sparse_categorical_crossentropy(tf.maximum(tags, 0), logits, from_logits=True)
    return tf.math.divide_no_nan(tf.reduce_sum(losses * tagged), tf.reduce_sum(tagged))


class Slowed(keras.layers.Layer):
    """Takes 20 microseconds for each word of training."""

    def call(self, words, training=False):
        if not training:
            return words
        waited = tf.numpy_function(self.wait, [words], tf.int64)
        return tf.ensure_shape(waited, [None, None])

    @staticmethod
    def wait(words):
        time.sleep(2e-5 * words.size)
        return words


def network(slow):
    """Return a transformer of one block."""
    layers = keras.layers
    words = layers.Input([None], dtype="int64")
    hidden = layers.Embedding(1 + LANGUAGES + WORDS, 32, mask_zero=True)(Slowed()(words) if slow else words)
    attention = layers.MultiHeadAttention(2, 16)(hidden, hidden)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attention]))
    further = layers.Dense(32)(layers.Dense(64, activation="relu")(hidden))
    hidden = layers.LayerNormalization()(layers.Add()([hidden, further]))
    return keras.Model(words, layers.Dense(TAGS)(hidden))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="lb-bsp")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--slow", type=int, help="a rank that takes 20 microseconds more per word")
    parser.add_argument("--telemetry", help="write one JSON line per round to this file")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    model = network(slow=hvd.rank() == options.slow)
    model.compile(keras.optimizers.Adam(3e-3), mean_over_words)
    balance = LoadBalance(options.policy, global_batch=32, telemetry=options.telemetry)
    batches = resize_batches(
        samples(1000, seed=1),
        balance,
        shuffle=True,
        padding_values=(PADDING, NO_TAG),
        weight_of=lambda words, tags: tf.math.count_nonzero(tags >= 0),
        cost_of=lambda words, tags: tf.size(words),
    )
    model.fit(batches, epochs=options.epochs, callbacks=[balance], verbose=2 if hvd.rank() == 0 else 0)

    if hvd.rank() == 0:
        right = total = 0
        for words, tags in samples(200, seed=2).padded_batch(50, padding_values=(PADDING, NO_TAG)):
            found = np.argmax(model.predict_on_batch(words), axis=-1)
            right, total = right + np.sum(found == tags), total + np.sum(tags >= 0)
        print(f"accuracy {right / total:.3f}", flush=True)


if __name__ == "__main__":
    main()
