"""Rounds from a stream of samples: what this rank has of each, cut into batches of whatever size is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, cast

import tensorflow as tf

from hvd_hetero.data.ending_shard import EndingShard
from hvd_hetero.data.streams import SharedStream
from hvd_hetero.rounds import RoundPlan, RoundTable
from keras_callbacks.pipeline.queue import Cut
from keras_callbacks.pipeline.sources import Chunk, Source

__all__ = ["StreamOrder"]

_Handle = tuple[Chunk, int]  # a sample: the chunk that it is in, and its row there


class StreamOrder:
    """The samples of a source, cut by the plan: all ranks read the same (``whole``), or each one a part of its own.

    Samples are read in chunks, and only their places in these are handed about. A rank without samples gets the very
    first one of its stream to stand in. ``seeds``: a checksum of what the order in which all read depends on.
    """

    def __init__(self, source: Source, rank: int, workers: int, *, whole: bool, seeds: int = 0) -> None:
        self.length = source.length if whole else None
        self.ends = source.ends
        self.survives_resets = whole
        self._source = source
        self._seeds = seeds
        self._stream = SharedStream(self._read) if whole else EndingShard(self._read, rank, workers)
        self._stand_in: Chunk = []
        self._begun = False

    def start(self, epoch: int) -> None:
        """Begin an epoch, at the front of the stream."""
        self._stream.start(epoch)
        self._begun = False

    @property
    def over(self) -> bool:
        """Whether the samples of this epoch are all taken, on every rank."""
        return self._stream.over

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None where that is not known."""
        if self.length is None or not isinstance(self._stream, SharedStream):
            return None
        return self.length - self._stream.taken

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """The next round, and this rank's samples of it, component by component."""
        if not self._begun and not self._stream.holds(1):
            if isinstance(self._stream, SharedStream):
                raise ValueError(_none("every rank", self._stream.epoch))
            # The others do not know yet: this rank takes part in the round, after which all stop.
            self._stand_in = self._stand_in or [_one_of(spec) for spec in tf.nest.flatten(self._source.spec)]
        self._begun = True
        plan, samples = self._stream.take(plan, rank)
        part = _gather(samples) if samples else self._stand_in
        return Cut(plan, part, len(samples), self._stream.epoch, self._stream.place ^ self._seeds)

    def ends_after(self, done: int) -> bool:
        """Whether data that this rank reads alone end with the round at hand, of which it has done so many samples."""
        return isinstance(self._stream, EndingShard) and self._stream.ends_after(done)

    def settle(self, table: RoundTable) -> None:
        """The round is agreed. What was left undone comes back to the front; a part without samples ends all ranks."""
        if isinstance(self._stream, EndingShard):
            self._stream.settle(table.figures("samples"), table.figures("ended"))
            if self._stream.empty:
                ranks = ", ".join(map(str, self._stream.empty))
                raise ValueError(_none(f"rank {ranks}", self._stream.epoch))
        else:
            self._stream.settle(table.figures("samples"))

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands; the same on every rank."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where such an epoch stood: the stream is read from its front, and what was done is passed over."""
        self._stream.load_state_dict(state)
        self._begun = True

    def reader(self, part: Callable[[int], Any]) -> Callable[[Any], Any]:
        """The function from a round's number to its batch, for ``map``."""
        specs = tf.nest.flatten(self._source.spec)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(number: tf.Tensor) -> Any:
            parts = tf.py_function(lambda i: part(int(i)), [number], [spec.dtype for spec in specs])
            for tensor, spec in zip(parts, specs, strict=True):
                tensor.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(self._source.spec, parts)

        return cast(Callable[[Any], Any], batch)

    def _read(self, epoch: int) -> Iterator[_Handle]:
        chunks = self._source.chunks(epoch)
        while True:
            with tf.device("CPU:0"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            if not self._stand_in:
                self._stand_in = [part[:1] for part in chunk]
            for row in range(int(chunk[0].shape[0])):
                yield chunk, row


def _none(where: str, epoch: int) -> str:
    return (
        f"data must hold at least one sample on every rank, and epoch {epoch} had none on {where}; check what is read "
        "and filtered, and that it can be read again for every epoch"
    )


def _one_of(spec: tf.TensorSpec) -> tf.Tensor:
    """A batch of one sample, of zeros or empty strings, where there is none to stand in."""
    with tf.device("CPU:0"):
        return tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype)


def _gather(samples: list[_Handle]) -> Chunk:
    """The samples, component by component: as few slices as there are runs of rows."""
    # Rows of a run grow with their places in the list.
    runs = groupby(enumerate(samples), key=lambda numbered: (id(numbered[1][0]), numbered[1][1] - numbered[0]))
    pieces: list[Chunk] = []
    with tf.device("CPU:0"):
        for _, run in runs:
            handles = [handle for _, handle in run]
            chunk, begin = handles[0]
            pieces.append([part[begin : begin + len(handles)] for part in chunk])
        return pieces[0] if len(pieces) == 1 else [tf.concat(parts, 0) for parts in zip(*pieces, strict=True)]
