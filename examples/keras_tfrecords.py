"""Learn from TFRecord files that are shuffled, parsed and filtered: a stream of unknown length.

    horovodrun -np 2 python examples/keras_tfrecords.py
    TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/keras_tfrecords.py     # with tf_keras

It needs scikit-learn, and first writes its digits to files. All ranks read the same files, and every record goes to one
of them. An epoch ends on all ranks in the same round, and the result is the same as in one process with a batch of 128.

Six marked lines differ from a script for one process, which has ``samples.batch(128)`` instead of
``resize_batches(samples, balance)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd  # changed
import tensorflow as tf

from keras_callbacks import LoadBalance, resize_batches  # changed

keras = tf.keras
FEATURES = {"image": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


def write(path: Path, samples: Iterable[tuple[Any, int]]) -> str:
    """Write images and labels to a file."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in samples:
            features = tf.train.Features(
                feature={
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=image)),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
            )
            writer.write(tf.train.Example(features=features).SerializeToString())
    return str(path)


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the image and the label of a record."""
    example = tf.io.parse_single_example(record, FEATURES)
    return tf.cast(example["image"], keras.backend.floatx()), example["label"]


def read(files: Sequence[str]) -> tf.data.Dataset:
    """Read the even digits, in another order each epoch; the seed makes it the same on every rank."""
    records = tf.data.TFRecordDataset(files).shuffle(500, seed=0)
    return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE).filter(lambda image, label: label % 2 == 0)


def network() -> Any:
    """Return a small compiled model."""
    model = keras.Sequential([
        keras.layers.Input((64,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(10, activation="softmax"),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    from sklearn.datasets import load_digits

    hvd.init()  # changed
    keras.utils.set_random_seed(0)
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        images, labels = digits.data / 16, digits.target
        files = [write(Path(folder) / f"{i}.tfrecord", zip(images[i::4], labels[i::4], strict=True)) for i in range(4)]
        samples = read(files)
        model = network()
        balance = LoadBalance("lb-bsp", global_batch=128)  # changed
        model.fit(
            resize_batches(samples, balance),  # changed
            epochs=8,
            callbacks=[balance],  # changed
            verbose=2 if hvd.rank() == 0 else 0,
        )


if __name__ == "__main__":
    main()
