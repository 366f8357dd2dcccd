"""Iterable datasets, read sample by sample, also by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.data.sample_order import SampleOrder
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.data.stream_parts import StreamParts
from torch_hooks.data.turns import State, begin_of, front, has_state, lanes_of, read, shards_of
from torch_hooks.wires.choice import TorchWire

_CHOOSE = (
    "stream='whole' is for an iterable dataset that yields the same samples in the same order on every rank. "
    "stream='shard' is for ranks that read different samples: its shards, or, if it has no shard() or with "
    "rounds_per_epoch=…, what it yields on each rank"
)


class ReadSamples(Dataset[Any]):
    """Stands for a stream in a DataLoader, which passes it samples instead of indices."""

    def __getitem__(self, sample: Any) -> Any:
        return sample


def stream_order(
    dataset: IterableDataset[Any],
    wire: TorchWire,
    stream: str | None,
    rounds_per_epoch: int | None,
    least: int,
    options: Mapping[str, Any],
    gather: Callable[[Any], Sequence[Any]],
) -> SampleOrder:
    """Return the order that takes samples from this dataset; ``options`` are its DataLoader's."""
    if stream not in ("whole", "shard"):
        raise ValueError(f"stream must be 'whole' or 'shard', got {stream!r}: {_CHOOSE}")
    if stream == "whole" and rounds_per_epoch is not None:
        raise ValueError(
            f"rounds_per_epoch is for stream='shard', got {rounds_per_epoch!r} with stream='whole': leave it out, the "
            "stream's end is the epoch's"
        )
    workers, shards = options["num_workers"], shards_of(dataset)
    # A process that went on with the next epoch would have a copy of the dataset that its set_epoch() does not reach.
    options = {name: value for name, value in options.items() if name != "persistent_workers"}
    DataLoader(dataset, batch_size=None, **options)  # which refuses what is wrong

    resumed: State = {}

    def samples(epoch: int, state: State) -> Iterator[Any]:
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        if has_state(dataset):
            if "front" in state:
                resumed["front"] = state["front"]
            if resumed:
                # A user may restore the dataset, too, and each later epoch would begin in the middle.
                dataset.load_state_dict(resumed["front"])  # type: ignore[attr-defined]
            state = {"front": begin_of(dataset), **state}
        return read(dataset, epoch, state, options)

    def whole(epoch: int, state: State | None = None) -> Iterator[Any]:
        return samples(epoch, state or lanes_of(dataset, workers))

    def part_of(epoch: int, part: int, of: int, state: State | None) -> Iterator[Any]:
        mine = range(part * shards // of, (part + 1) * shards // of)
        return samples(epoch, state or front(shards, [[each] for each in mine]))

    if stream == "whole":
        return SharedStream(whole, least, workers, size=_size(dataset))
    if rounds_per_epoch is not None or shards == 0:
        return StreamParts(
            lambda epoch, part, of, state: whole(epoch, state), wire.size, wire.rank, wire.size, gather, own=True,
            rounds=rounds_per_epoch,
        )  # fmt: skip
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "stream='shard' hands out the shards of a dataset that is the same on every rank, and this one was split "
            "by split_dataset_by_node; leave that out, or give rounds_per_epoch"
        )
    # Several parts for each rank, so that one that is ahead finds another; and a shard for each process if that goes.
    parts = max(min(shards, 4 * wire.size), shards // max(1, workers))
    return StreamParts(part_of, parts, wire.rank, wire.size, gather)


def _size(dataset: IterableDataset[Any]) -> int | None:
    """Return the length; None if it is not known."""
    # A chain of streams has a __len__ that may fail.
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:
        return None
