"""The cost of comparing the samples of a round in Keras, beside a step of a small network on one core.

    python benchmarks/compared_samples.py [--samples 512] [--side 224]

Ranks compare a few numbers of each sample of a round (``resize_batches(…, check_data=True)``). The command cuts rounds
of as many samples with and without that, from arrays and from a dataset, and takes the least times. The step is of a
network that is small beside what such pictures are for: one convolution, pooling and a dense layer. It exits with 1 if
the comparison takes more than 1 % of that step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_hetero.data.same_data import contents_of, marks_of
from keras_callbacks.pipeline.stream import StreamReader

CHUNK = 64  # samples that a dataset is read by


def seconds(call: Callable[[Any], Any], prepared: Callable[[], Any] = lambda: None, times: int = 15) -> float:
    taken = []
    for _ in range(times + 1):
        given = prepared()
        begin = time.perf_counter()
        call(given)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


class Read:
    """Chunks that are in memory already, so that nothing but the reader is timed."""

    length, ends, spec = None, True, None

    def __init__(self, x: tf.Tensor, y: tf.Tensor) -> None:
        self.parts = [[x[i : i + CHUNK], y[i : i + CHUNK]] for i in range(0, len(x), CHUNK)]

    def chunks(self, epoch: int) -> Iterator[list[tf.Tensor]]:
        """Yield all of them, in every epoch."""
        yield from self.parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--side", type=int, default=224)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    x = tf.constant(rng.random((arguments.samples, arguments.side, arguments.side, 3), dtype=np.float32))
    y = tf.constant(rng.integers(0, 10, arguments.samples))
    columns, order = [np.asarray(x), np.asarray(y)], rng.permutation(arguments.samples)
    arrays = seconds(lambda _: contents_of(np.stack([marks_of(column, order) for column in columns], axis=1)))

    def read(chunks: Read, compared: tuple[int, ...]) -> None:
        samples = list(StreamReader(chunks, compared).samples(0))
        if compared:
            contents_of([marks for *_, marks in samples])

    new = lambda: Read(x, y)  # noqa: E731 - memory that was just written, as tf.data's is
    dataset = seconds(lambda chunks: read(chunks, (0, 1)), new) - seconds(lambda chunks: read(chunks, ()), new)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(x.shape[1:]),
            tf.keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = seconds(lambda _: model.train_on_batch(x, y), times=3)
    for name, taken in (("arrays", arrays), ("dataset", dataset)):
        print(f"{name}: {1e3 * taken:.2f} ms a round, {taken / step:.2%} of a step of {1e3 * step:.0f} ms")
    return int(max(arrays, dataset) > 0.01 * step)


if __name__ == "__main__":
    raise SystemExit(main())
