"""Iterable datasets, read sample by sample, also by worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.data.stream_orders import ShardStream, SharedStream
from torch_hooks.wires.choice import TorchWire

_SAMPLES_PER_HANDOVER = 64  # of a worker process (arbitrary; more costs memory)
_CHOOSE = (
    "an iterable dataset can be read in two ways, and only you know which is right: stream='whole', if it yields the "
    "same samples in the same order on every rank, which are then shared out; or stream='shard' with "
    "rounds_per_epoch=…, if it yields on each rank samples of its own"
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
) -> SharedStream | ShardStream:
    """Return the order that takes samples from this dataset; ``options`` are its DataLoader's."""
    if stream not in ("whole", "shard"):
        raise ValueError(f"stream must be 'whole' or 'shard', got {stream!r}: {_CHOOSE}")
    if (stream == "shard") != (rounds_per_epoch is not None):
        raise ValueError(
            f"rounds_per_epoch is the length of an epoch of shards, whose ends other ranks do not see; got "
            f"{rounds_per_epoch!r} with stream={stream!r}: "
            + ("leave it out, the stream's end is the epoch's" if stream == "whole" else "give the number of rounds")
        )
    if options.get("persistent_workers") and callable(getattr(dataset, "set_epoch", None)):
        raise ValueError(
            "persistent_workers=True keeps copies of the dataset that its set_epoch() does not reach, so every epoch "
            "would come in the order of the first; leave it out"
        )
    reader: DataLoader[Any] = DataLoader(dataset, batch_size=_SAMPLES_PER_HANDOVER, collate_fn=_packed, **options)

    def read(number: int) -> Iterable[Any]:
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(number)
        return dataset if reader.num_workers == 0 else _samples_of(reader)

    if rounds_per_epoch is None:
        return SharedStream(read, least, reader.num_workers, size=_size(dataset))
    return ShardStream(read, rounds_per_epoch, wire.rank, wire.size, reader.num_workers)


def _size(dataset: IterableDataset[Any]) -> int | None:
    """Return the length; None if it is not known."""
    # A chain of streams has a __len__ that may fail.
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:
        return None


def _samples_of(reader: Iterable[bytes]) -> Iterable[Any]:
    for chunk in reader:
        yield from pickle.loads(chunk)


def _packed(samples: list[Any]) -> bytes:
    """Return samples as bytes."""
    # Tensors from another process would each hold a file open until they are used.
    return pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)
