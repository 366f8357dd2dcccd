"""The part of ``keras_behaviour.py`` about what batches weigh and cost.

Each case trains on all ranks, and in one process by Keras alone on the same batches.
Samples come in their own order, so that a round is the next slice of them, however it is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from every_round import EveryRoundAnother
from keras_fits import BATCH, against_one_process

keras = tf.keras
WORDS, LONGEST, CLASSES = 11, 5, 4
SAMPLES = BATCH * 8 + 2
Cross = keras.losses.SparseCategoricalCrossentropy


class ByCost(EveryRoundAnother):
    """Splits that change every round, of which samples are shared out by what they cost."""

    shares_alone = True


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Words, of which 0 fills up, and a label for each, of which -1 does. Some texts have no word."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, LONGEST + 1, SAMPLES) * (rng.random(SAMPLES) < 0.7)
    lengths[-1] = 3  # so that the last round has one
    x = np.where(np.arange(LONGEST) < lengths[:, None], rng.integers(1, WORDS, (SAMPLES, LONGEST)), 0)
    return x, np.where(x > 0, (x * x + 1) % CLASSES, -1)


def filled() -> tuple[np.ndarray, np.ndarray]:
    x, y = texts()
    return x, np.maximum(y, 0)


def tagger(*, masked: bool = False) -> Any:
    return keras.Sequential([
        keras.layers.Input((None,), dtype="int64"),
        keras.layers.Embedding(WORDS, 6, mask_zero=masked),
        keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3)),
        keras.layers.Dense(CLASSES),
    ])  # fmt: skip


def two_heads() -> Any:
    words = keras.layers.Input((LONGEST,), dtype="int64")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 3)(words))
    return keras.Model(words, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])


def with_two_labels() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Labels for two heads, of which -1 does not count, in some rounds more than in others."""
    x, _ = texts()
    labels = np.where((x.sum(1) + np.arange(SAMPLES)) % 7 < 3, x.sum(1) / 50.0, -1.0)[:, None]
    return x, {"a": labels, "b": np.where(labels >= 0, labels**2, -1.0)}


def labelled_mean(y: tf.Tensor, told: tf.Tensor) -> tf.Tensor:
    counts = tf.cast(y >= 0, told.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(counts * (told - y) ** 2), tf.reduce_sum(counts))


def two_losses() -> dict[str, Any]:
    return {"loss": {"a": labelled_mean, "b": labelled_mean}, "loss_weights": {"a": 1.0, "b": 0.5}}


def token_mean(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """The mean over words; NaN of a batch without any."""
    counts = tf.cast(y >= 0, logits.dtype)
    losses = keras.losses.sparse_categorical_crossentropy(tf.maximum(y, 0), logits, from_logits=True)
    return tf.reduce_sum(losses * counts) / tf.reduce_sum(counts)


def words(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.math.count_nonzero(y >= 0)


def case(
    compiled: Callable[[], dict[str, Any]], arrays: Any, make: Callable[[], Any] = tagger, *, most: int = 1,
    policy: Any = None, data: Any = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")

    def made(rank: int) -> Any:
        model = make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **compiled())
        return model

    given = arrays if data is None else data
    return against_one_process(made, given, policy or EveryRoundAnother(most), whole=arrays, **options)


def of_weight(loss: Any = token_mean) -> Callable[[], dict[str, Any]]:
    return lambda: {"loss": loss}


def of_masks() -> dict[str, Any]:
    return {"loss": Cross(from_logits=True), "metrics": ["sparse_categorical_accuracy"]}


def sums() -> dict[str, Any]:
    return {"loss": Cross(from_logits=True, reduction="sum"), "metrics": ["sparse_categorical_accuracy"]}


def with_weights() -> tuple[np.ndarray, ...]:
    weights = np.random.default_rng(5).integers(0, 3, (SAMPLES, LONGEST)).astype("float64")
    weights[::3] = 0.0
    return *filled(), weights


def of_classes() -> tuple[np.ndarray, np.ndarray]:
    x, _ = texts()
    return x, (x.sum(1) % 3 == 0).astype("float64")


def classifier() -> Any:
    return keras.Sequential([
        keras.layers.Input((LONGEST,), dtype="int64"), keras.layers.Embedding(WORDS, 3), keras.layers.Flatten(),
        keras.layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip


def stream() -> tf.data.Dataset:
    """Texts as long as they are."""
    x, y = texts()
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    return samples.map(lambda words, labels: (words[words > 0], labels[labels >= 0]))


class Batches(keras.utils.Sequence):
    def __len__(self) -> int:
        return SAMPLES // 10 + 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(array[10 * index : 10 * (index + 1)] for array in texts())


def lengths() -> np.ndarray:
    return (texts()[0] > 0).sum(1)


def by_cost(**resized: Any) -> dict[str, Any]:
    """Samples shared out by their lengths, and cut by what may be in a micro-batch."""
    sizes: list[tuple[int, int]] = []

    class Seen(keras.layers.Layer):
        def call(self, x, training=None):
            if training:
                tf.numpy_function(lambda words: sizes.append((len(words), (words > 0).sum(1).max())), [x], [])
            return x

    made: list[Any] = []

    def make() -> Any:
        made.append(tagger())  # the first is trained on all ranks, and a second one alone
        seen = [Seen()] if len(made) == 1 else []
        return keras.Sequential([keras.layers.Input((None,), dtype="int64"), *seen, *made[-1].layers])

    data = resized.pop("data", None)
    options = {"weight_of": words, "cost_of": lengths(), **resized}
    outcome = case(of_weight(), texts(), make, policy=ByCost(1), resized=options, data=data)
    return outcome | {"largest": int(max(number * longest for number, longest in sizes)), "batches": len(sizes)}


def of_first_head(x: tf.Tensor, y: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.math.count_nonzero(y["a"] >= 0)


def sum_and_mean() -> dict[str, Any]:
    losses = {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mse"}
    return {"loss": losses, "loss_weights": {"a": 0.1, "b": 1.0}}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "weight_of": lambda: case(of_weight(), texts(), resized={"weight_of": words}),
    "weight_of, outputs, micro-batches": lambda: case(
        two_losses, with_two_labels(), two_heads, most=4, resized={"weight_of": of_first_head}
    ),
    "masks, micro-batches": lambda: case(of_masks, filled(), lambda: tagger(masked=True), most=4),
    "masks, eagerly": lambda: case(
        lambda: {**of_masks(), "run_eagerly": True}, filled(), lambda: tagger(masked=True)
    ),
    "ignored class": lambda: case(lambda: {"loss": Cross(from_logits=True, ignore_class=-1)}, texts()),
    "sample weights and masks": lambda: case(
        lambda: {"loss": Cross(from_logits=True), "weighted_metrics": ["sparse_categorical_accuracy"]},
        with_weights(), lambda: tagger(masked=True),
    ),
    "class weights": lambda: case(
        lambda: {"loss": "binary_crossentropy", "metrics": ["accuracy"]}, of_classes(), classifier,
        resized={"weight_of": lambda x, y: tf.shape(y)[0]}, class_weight={0: 1.0, 1: 5.0},
    ),
    "sum, micro-batches": lambda: case(sums, filled(), most=4),
    "sum and mean": lambda: case(
        sum_and_mean, (texts()[0], {"a": of_classes()[1], "b": of_classes()[1]}), two_heads
    ),
    "cost_of, micro-batches": lambda: by_cost(prefetch=2, max_micro_batch_cost=2 * LONGEST),
    "cost_of a stream": lambda: by_cost(data=stream(), cost_of=lambda x, y: tf.size(x), padding_values=(0, -1)),
    "cost_of a sequence": lambda: by_cost(data=Batches(), cost_of=lambda x, y: tf.math.count_nonzero(x)),
}  # fmt: skip
