"""Rounds from a stream of single samples: this rank's shard, cut into batches of whatever size is planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from hvd_hetero.rounds import RoundPlan

__all__ = ["StreamOrder"]

_SHUFFLED = 10_000  # samples that are held to draw from, where an epoch is longer (arbitrary, as is usual)
_CHUNK = 64  # samples that tf.data batches at a time; larger ones only cost memory (arbitrary)


class StreamOrder:
    """Each n-th sample of a dataset, from the front again at its end, for as many rounds as one pass over all takes.

    The stream is read in chunks that tf.data forms; what a round leaves of a chunk waits for the next one. It goes on
    from epoch to epoch, so that a slow rank, too, comes to the end of its shard in time.
    """

    survives_resets = False

    def __init__(self, samples: tf.data.Dataset, rank: int, workers: int, seed: int | None = None) -> None:
        length = int(samples.cardinality())
        if length == 0:
            raise ValueError("data must hold at least one sample, and the dataset has none; check what it is read from")
        # Negative where it is unknown or infinite.
        self.length: int | None = length if length > 0 else None
        if self.length is not None and self.length < workers:
            raise ValueError(
                f"data must hold a sample for every rank, and the dataset has {self.length} for {workers} ranks; "
                "launch fewer ranks"
            )
        shard = samples.shard(workers, rank)
        if seed is not None:
            shard = shard.shuffle(min(_SHUFFLED, self.length or _SHUFFLED), seed=seed)
        self._chunks = shard.repeat().batch(_CHUNK).prefetch(tf.data.AUTOTUNE)
        self._spec = self._chunks.element_spec
        for spec in tf.nest.flatten(self._spec):
            if not isinstance(spec, tf.TensorSpec):
                raise TypeError(
                    f"samples must be dense tensors, the dataset has {type(spec).__name__}; pad or densify them in a "
                    "map before resize_batches"
                )
        self._iterator: Iterator[Any] | None = None
        self._left: list[tf.Tensor] = []
        self._stand_in: list[tf.Tensor] = []
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin an epoch. The stream itself goes on."""
        self._epoch = epoch
        self._used = 0
        self._count = 0
        self._open: deque[tuple[RoundPlan, list[tf.Tensor]]] = deque()

    @property
    def remaining(self) -> int | None:
        """Samples that the rounds of this epoch have still to take, over all ranks."""
        return None if self.length is None else self.length - self._used

    @property
    def place(self) -> int:
        """The number of the round, for the samples of the ranks have nothing in common."""
        return self._epoch * 2**20 + self._count

    def take(self, plan: RoundPlan, rank: int) -> tuple[RoundPlan, list[tf.Tensor]]:
        """The plan and this rank's samples, component by component; the first one ever stands in for none."""
        if self.remaining is not None:
            plan = plan.shrink(self.remaining)
        self._used += plan.total
        self._count += 1
        wanted = plan.samples[rank]
        part = self._pull(wanted) if wanted else tf.nest.flatten(self.stand_in())
        self._open.append((plan, part))
        return plan, part

    def settle(self, done: Sequence[float], rank: int) -> None:
        """What was left undone goes back to the front of this rank's shard."""
        plan, part = self._open.popleft()
        if plan.ends == "first":
            self._used -= plan.total - int(sum(done))
            back = [tensor[int(done[rank]) :] for tensor in part]
            self._left = [tf.concat(pair, 0) for pair in zip(back, self._left, strict=True)] if self._left else back

    def stand_in(self) -> Any:
        """A batch of one sample, which stays in the stream if it is the first."""
        if not self._stand_in:
            self._pull(1, keep=True)
        return tf.nest.pack_sequence_as(self._spec, self._stand_in)

    def state_dict(self) -> dict[str, Any]:
        """How much of the epoch is done. Which samples that were is the stream's own affair, which is not rewound."""
        flight = [plan.total for plan, _ in self._open]
        return {"epoch": self._epoch, "used": self._used - sum(flight), "count": self._count - len(flight)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do the rest of such an epoch."""
        self.start(state["epoch"])
        self._used, self._count = state["used"], state["count"]

    def reader(self, part: Callable[[int], Any]) -> Callable[[Any], Any]:
        """The function from a round's number to its batch, for ``map``."""
        specs = tf.nest.flatten(self._spec)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(number: tf.Tensor) -> Any:
            parts = tf.py_function(lambda i: part(int(i)), [number], [spec.dtype for spec in specs])
            for tensor, spec in zip(parts, specs, strict=True):
                tensor.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(self._spec, parts)

        return cast(Callable[[Any], Any], batch)

    def _pull(self, count: int, *, keep: bool = False) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            if self._iterator is None:
                self._iterator = iter(self._chunks)
            pieces = [self._left] if self._left else []
            have = int(self._left[0].shape[0]) if self._left else 0
            while have < count:
                pieces.append(tf.nest.flatten(next(self._iterator)))
                have += int(pieces[-1][0].shape[0])
            whole = pieces[0] if len(pieces) == 1 else [tf.concat(parts, 0) for parts in zip(*pieces, strict=True)]
            if not self._stand_in:
                self._stand_in = [part[:1] for part in whole]
            self._left = whole if keep else [part[count:] for part in whole]
            return [part[:count] for part in whole]
