"""The sources of streams: datasets of single samples, and sequences of batches; chunk by chunk, epoch by epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

_SHUFFLE_BUFFER_SAMPLES = 10_000  # documented; a usual size (arbitrary)
_CHUNK_SAMPLES = 64  # batched by tf.data at a time; more only cost memory (arbitrary)

Chunk = list[tf.Tensor]
"""Some samples, component by component."""


class DatasetSource:
    """A ``tf.data.Dataset`` whose elements are single samples, read from front to end."""

    def __init__(
        self,
        samples: tf.data.Dataset,
        seed: int | None = None,
        *,
        may_be_empty: bool = False,
        padding: Any = None,
        cost_of: Callable[..., Any] | None = None,
    ) -> None:
        cardinality = int(samples.cardinality())
        if cardinality == 0 and not may_be_empty:
            raise ValueError("data must hold at least one sample, and the dataset has none; check what it is read from")
        self.length: int | None = cardinality if cardinality > 0 else None
        """Samples of an epoch; None if that is not known."""
        self.ends = cardinality != tf.data.INFINITE_CARDINALITY
        """True: an epoch ends by itself."""
        self._samples = samples
        self._seed = seed
        for spec in tf.nest.flatten(samples.element_spec):
            if not isinstance(spec, tf.TensorSpec):
                raise TypeError(
                    f"samples must be dense tensors, the dataset has {type(spec).__name__}; pad or densify them in a "
                    "map before resize_batches, with padding_values if their shapes differ"
                )
        self.padding = {} if padding is None else _padding(padding, samples.element_spec)
        """Values that fill up the components whose shapes differ, by their numbers; their shapes follow in a chunk."""
        self._cost_of = cost_of
        self.has_costs = cost_of is not None
        """True: chunks end with what each sample costs."""
        self._in_order = self._chunked(samples)
        self.spec = samples.batch(_CHUNK_SAMPLES).element_spec
        """Types and shapes of a batch of unknown size."""

    def chunks(self, epoch: int) -> Iterator[Chunk]:
        """Yield the samples of an epoch, in batches that tf.data forms and fetches ahead."""
        batches = self._in_order if self._seed is None else self._shuffled(self._seed, epoch)
        try:
            for chunk in batches:
                yield tf.nest.flatten(chunk)
        except tf.errors.InvalidArgumentError as error:
            if "different shapes" not in str(error):
                raise
            raise ValueError(
                "samples of the dataset differ in shape, and a batch holds those of one shape; to pad each batch to "
                f"its longest sample, give resize_batches(…, padding_values=0). TensorFlow says: {error.message}"
            ) from error

    def _shuffled(self, seed: int, epoch: int) -> tf.data.Dataset:
        # Not by ``shuffle``, whose order also depends on tf.random.set_seed, which may differ between ranks.
        drawn = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint32).astype(np.int64) + 1
        specs = tf.nest.flatten(self._samples.element_spec)
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(self._samples),
            buffer_size=min(_SHUFFLE_BUFFER_SAMPLES, self.length or _SHUFFLE_BUFFER_SAMPLES),
            seed=drawn[0],
            seed2=drawn[1],
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
            reshuffle_each_iteration=False,
        )
        return self._chunked(tf.data.experimental.from_variant(variant, self._samples.element_spec))

    def _chunked(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        def measured(*sample: Any) -> tuple[tf.Tensor, ...]:
            parts = tf.nest.flatten(sample)
            costs = [] if self._cost_of is None else [number_from("cost_of", self._cost_of, sample)]
            return *parts, *(tf.shape(parts[i]) for i in self.padding), *costs

        if self.padding or self.has_costs:
            samples = samples.map(measured)
        if not self.padding:
            return samples.batch(_CHUNK_SAMPLES).prefetch(tf.data.AUTOTUNE)
        values = tuple(map(self.padding.get, range(len(samples.element_spec))))
        return samples.padded_batch(_CHUNK_SAMPLES, padding_values=values).prefetch(tf.data.AUTOTUNE)


def _padding(values: Any, specs: Any) -> dict[int, tf.Tensor]:
    """Return the values that fill up each component whose shape is not known: one for all, or one for each."""
    flat, given = tf.nest.flatten(specs), tf.nest.flatten(values)
    of_each = given * len(flat) if len(given) == 1 else given
    if len(of_each) != len(flat):
        raise ValueError(
            f"padding_values must be one value, or one for each of the {len(flat)} components, got {values!r}"
        )
    return {
        i: tf.constant(value, spec.dtype)
        for i, (value, spec) in enumerate(zip(of_each, flat, strict=True))
        if not spec.shape.is_fully_defined()
    }


class SequenceSource:
    """The samples of an object such as ``keras.utils.PyDataset``, which has a length and gives batches by index."""

    length: int | None = None  # the last batch may be short, and others, too
    ends = True

    def __init__(self, batches: Any, seed: int | None = None, *, cost_of: Callable[..., Any] | None = None) -> None:
        self._batches = batches
        if not self._count():
            raise ValueError(
                f"data must be a sequence of at least one batch, and of a known length, got {self._count()} batches; "
                "check what it is made from, or for one without end write "
                "tf.data.Dataset.from_generator(function, output_signature=…)"
            )
        self._seed = seed
        self.padding: dict[int, tf.Tensor] = {}
        self.has_costs = cost_of is not None
        self._costs = None if cost_of is None else _costs_by(cost_of)
        self._first: Any = _tensors(batches[0])
        self.spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), self._first)

    def chunks(self, epoch: int) -> Iterator[Chunk]:
        """Yield the samples of an epoch, batch by batch; shuffled batches have another order in each epoch.

        Then call the sequence's ``on_epoch_end``, as Keras does.
        """
        order = np.arange(self._count() or 0)
        if self._seed is not None:
            np.random.Generator(np.random.PCG64([self._seed, epoch])).shuffle(order)
        if callable(begin := getattr(self._batches, "on_epoch_begin", None)):
            begin()
        for index in order.tolist():
            batch = _tensors(self._batches[index])
            chunk = tf.nest.flatten(batch)
            if self._costs is not None:
                chunk.append(self._costs(batch))
            yield chunk
        if callable(end := getattr(self._batches, "on_epoch_end", None)):
            end()

    def _count(self) -> int | None:
        """Return how many batches there are; a PyDataset may define this without ``len``, and None if it has no end."""
        count: int | None = self._batches.num_batches if hasattr(self._batches, "num_batches") else len(self._batches)
        return count


Source: TypeAlias = DatasetSource | SequenceSource
"""Samples that are read from front to end."""


def _costs_by(cost_of: Callable[..., Any]) -> Callable[[Any], tf.Tensor]:
    """Return the function from a batch to what each of its samples costs."""

    def costs(batch: Any) -> tf.Tensor:
        return tf.map_fn(lambda sample: number_from("cost_of", cost_of, sample), batch, fn_output_signature=tf.float64)

    # In a graph, because calls of the function one by one take 2.4 ms a sample, and these 0.01 ms.
    return cast(Callable[[Any], tf.Tensor], tf.function(costs, reduce_retracing=True))


def number_from(name: str, function: Callable[..., Any], data: Any) -> tf.Tensor:
    """Return the number that a user's function computes from a sample or a batch, in a graph or eagerly.

    It gets as many components as it has positional parameters, with defaults or without.
    """
    # No more, since fit adds weights of its own behind the user's components for class_weight.
    parts = data if isinstance(data, tuple) else (data,)
    try:
        takes = inspect.signature(function).parameters.values()
        if all(each.kind is not each.VAR_POSITIONAL for each in takes):
            parts = parts[: sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in takes)]
        return tf.reshape(tf.cast(function(*parts), tf.float64), [])
    except Exception as error:
        raise ValueError(
            f"{name} failed for {data}, {type(error).__name__}: {error}. It gets the components of a sample or a "
            "batch, as a function for Dataset.map does, and must return one number, computed by TensorFlow"
        ) from error


def is_sequence(data: Any) -> bool:
    """Return whether the data are a ``Sequence`` or ``PyDataset``: batches by index, with a length."""
    bases = [tf.keras.utils.Sequence, getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)]
    return isinstance(data, tuple(bases))


def _tensors(batch: Any) -> Any:
    """Return the batch as tensors; None in it is left out, such as a missing weight."""
    if isinstance(batch, list):
        batch = tuple(batch)
    if isinstance(batch, tuple):
        batch = tuple(part for part in batch if part is not None)
    return tf.nest.map_structure(tf.convert_to_tensor, batch)
