"""Batches of any planned size from a stream of samples, which is read in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvd_hetero.data.same_data import marks_of
from keras_callbacks.pipeline.sources import Chunk, Source

_Handle = tuple[Chunk, int, Any, float]  # a sample: the chunk that it is in, its row there, its marks, and its cost


class StreamReader:
    """The samples of a source as chunks and rows, with marks of the components in ``compared``; and batches of them."""

    def __init__(self, source: Source, compared: Sequence[int] = ()) -> None:
        self._source = source
        self._compared = compared
        self._first: Chunk = []  # the very first sample, as a batch

    def samples(self, epoch: int) -> Iterator[_Handle]:
        """Read the samples of an epoch."""
        chunks = self._source.chunks(epoch)
        while True:
            with tf.device("CPU:0"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            costs = chunk.pop().numpy().tolist() if self._source.has_costs else repeat(0.0)
            if not self._first:
                self._first = [part[:1] for part in chunk]
            rows = np.arange(int(chunk[0].shape[0]))
            columns = [marks_of(np.asarray(chunk[i]), rows) for i in self._compared]
            marks = np.stack(columns, axis=1) if columns else rows
            yield from ((chunk, row, marks[row], cost) for row, cost in zip(rows.tolist(), costs, strict=False))

    def batch_of(self, samples: Any) -> Chunk:
        """Return a batch, component by component. For no samples, the first one of the stream stands in."""
        # Or one of zeros, if a rank's shard is empty: it takes part in the round, after which all ranks stop.
        if not samples and not self._first:
            specs = tf.nest.flatten(self._source.spec)
            with tf.device("CPU:0"):
                return [tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype) for spec in specs]
        return _joined(_pieces(samples) if samples else [self._first], self._source.padding)

    def mapped(self, part: Callable[[int], Any]) -> Callable[[Any], Any]:
        """Return the function from a round's number to its batch, for ``map``."""
        specs = tf.nest.flatten(self._source.spec)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(number: tf.Tensor) -> Any:
            parts = tf.py_function(lambda i: part(int(i)), [number], [spec.dtype for spec in specs])
            for tensor, spec in zip(parts, specs, strict=True):
                tensor.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(self._source.spec, parts)

        return cast(Callable[[Any], Any], batch)


def _pieces(samples: list[_Handle]) -> list[Chunk]:
    """Return the samples, component by component: as few slices as there are runs of rows."""
    # Rows of a run grow with their positions in the list.
    runs = groupby(enumerate(samples), key=lambda numbered: (id(numbered[1][0]), numbered[1][1] - numbered[0]))
    pieces: list[Chunk] = []
    with tf.device("CPU:0"):
        for _, run in runs:
            handles = [handle for _, handle in run]
            chunk, begin, *_ = handles[0]
            pieces.append([part[begin : begin + len(handles)] for part in chunk])
    return pieces


def _joined(pieces: list[Chunk], padding: dict[int, tf.Tensor]) -> Chunk:
    """Return the pieces as one batch; padded components are as long as the longest sample needs."""
    parts = [list(each) for each in zip(*pieces, strict=True)]
    count = len(parts) - len(padding)
    with tf.device("CPU:0"):
        for (i, value), shapes in zip(padding.items(), parts[count:], strict=True):
            parts[i] = [_padded(parts[i], np.concatenate(shapes).max(0), value)]
        return [each[0] if len(each) == 1 else tf.concat(each, 0) for each in parts[:count]]


def _padded(parts: list[tf.Tensor], longest: Any, value: tf.Tensor) -> tf.Tensor:
    """Return the parts as one tensor. Each was padded to its chunk's longest sample, which may not be in this batch."""
    whole = np.full([sum(len(part) for part in parts), *longest], value.numpy(), parts[0].numpy().dtype)
    begin = 0
    for part in parts:
        kept = part.numpy()[(slice(None), *map(slice, longest))]
        whole[(slice(begin, begin + len(kept)), *map(slice, kept.shape[1:]))] = kept
        begin += len(kept)
    return tf.constant(whole)
