"""The order of a dataset's samples, as a loader's arguments choose it: of indices, or of a stream that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_order import SampleOrder
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.data.stream_parts import StreamParts
from torch_hooks.data.samplers import drawn_by
from torch_hooks.data.turns import State, begin_of, front, has_state, lanes_of, read, shards_of
from torch_hooks.wires.choice import TorchWire

_CHOOSE = (
    "stream='whole' is for an iterable dataset that yields the same samples in the same order on every rank. "
    "stream='shard' is for ranks that read different samples: its shards, or, if it has no shard() or with "
    "rounds_per_epoch=…, what it yields on each rank"
)


def order_of(
    dataset: Dataset[Any],
    wire: TorchWire,
    *,
    shuffle: bool,
    seed: int,
    sampler: Iterable[int] | None,
    batch_sampler: Iterable[list[int]] | None,
    stream: str | None,
    rounds_per_epoch: int | None,
    least: int,
    options: Mapping[str, Any],
    gather: Callable[[Any], Sequence[Any]],
) -> SampleOrder:
    """Return the order.

    ``least`` is how many samples a round needs; ``options`` are those of the DataLoader; ``gather`` returns what all
    ranks give it at once.
    """
    orders = {"shuffle": shuffle, "sampler": sampler is not None, "batch_sampler": batch_sampler is not None}
    if len(chosen := [name for name, given in orders.items() if given]) > 1:
        raise ValueError(f"{' and '.join(chosen)} each decide the order of the samples; give one of them")
    if isinstance(dataset, IterableDataset):
        if chosen:
            raise ValueError(
                f"{chosen[0]} needs a dataset with __len__ and __getitem__; shuffle inside the stream, with the same "
                "seed on every rank if stream='whole'"
            )
        if stream not in ("whole", "shard"):
            raise ValueError(f"stream must be 'whole' or 'shard', got {stream!r}: {_CHOOSE}")
        if stream == "whole" and rounds_per_epoch is not None:
            raise ValueError(
                f"rounds_per_epoch is for stream='shard', got {rounds_per_epoch!r} with stream='whole': leave it out, "
                "the stream's end is the epoch's"
            )
        source = _Source(dataset, options)
        if stream == "whole":
            size = None
            with suppress(TypeError):  # it has no length, or, as a chain of streams, one that fails
                size = len(dataset)  # type: ignore[arg-type]
            return SharedStream(source.whole, least, size=size, depends_on=source.workers)
        if rounds_per_epoch is not None or source.shards == 0:
            return StreamParts(
                lambda epoch, part, of, state: source.whole(epoch, state), wire.size, wire.rank, wire.size, gather,
                own=True, rounds=rounds_per_epoch,
            )  # fmt: skip
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                "stream='shard' hands out the shards of a dataset that is the same on every rank, and this one was "
                "split by split_dataset_by_node; leave that out, or give rounds_per_epoch"
            )
        # Several parts for each rank, so that one that is ahead finds another; a shard for each process if that goes.
        parts = max(min(source.shards, 4 * wire.size), source.shards // max(1, source.workers))
        return StreamParts(source.part, parts, wire.rank, wire.size, gather)
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset must have __len__ and __getitem__, so that its samples can be shared out, or be an "
            f"IterableDataset; {type(dataset).__name__} is neither. Or iterate over this rank's part yourself: "
            "take as many samples for each batch as balance.batch() returns"
        )
    if stream is not None or rounds_per_epoch is not None:
        raise ValueError(
            f"stream and rounds_per_epoch are for an IterableDataset, and {type(dataset).__name__} has random "
            "access; leave them out"
        )
    given = sampler if batch_sampler is None else batch_sampler
    draw = None if given is None else drawn_by(given, seed, in_batches=sampler is None)
    return SharedPermutation(len(dataset), shuffle=shuffle, seed=seed, draw=draw)


class _Source:
    """An iterable dataset, whole or in parts, which a DataLoader with these options reads."""

    def __init__(self, dataset: Any, options: Mapping[str, Any]) -> None:
        # A process that went on with the next epoch would have a copy of the dataset, which set_epoch() does not reach.
        self._options = {name: value for name, value in options.items() if name != "persistent_workers"}
        DataLoader(dataset, batch_size=None, **self._options)  # which refuses what is wrong
        self._dataset = dataset
        self.workers, self.shards = options["num_workers"], shards_of(dataset)
        self._resumed: State = {}

    def whole(self, epoch: int, state: State | None = None) -> Iterator[Any]:
        """Return the samples of an epoch, from a state on."""
        return self._samples(epoch, state or lanes_of(self._dataset, self.workers))

    def part(self, epoch: int, part: int, of: int, state: State | None) -> Iterator[Any]:
        """Return the samples of some shards, from a state on."""
        shards = range(part * self.shards // of, (part + 1) * self.shards // of)
        return self._samples(epoch, state or front(self.shards, [[shard] for shard in shards]))

    def _samples(self, epoch: int, state: State) -> Iterator[Any]:
        dataset = self._dataset
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        if has_state(dataset):
            self._resumed = state if "front" in state else self._resumed
            if self._resumed:
                # A user may restore the dataset, too, and each later epoch would begin in the middle.
                dataset.load_state_dict(self._resumed["front"])
            state = {"front": begin_of(dataset), **state}
        return read(dataset, epoch, state, self._options)
