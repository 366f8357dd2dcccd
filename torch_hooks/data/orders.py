"""The order of a dataset's samples, as a loader's arguments choose it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_order import SampleOrder
from torch_hooks.data.samplers import drawn_by
from torch_hooks.data.streams import stream_order
from torch_hooks.wires.choice import TorchWire


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
    streams = isinstance(dataset, IterableDataset)
    if not streams and not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset must have __len__ and __getitem__, so that its samples can be shared out, or be an "
            f"IterableDataset; {type(dataset).__name__} is neither. Or iterate over this rank's part yourself: "
            "take as many samples for each batch as balance.batch() returns"
        )
    if not streams and (stream is not None or rounds_per_epoch is not None):
        raise ValueError(
            f"stream and rounds_per_epoch are for an IterableDataset, and {type(dataset).__name__} has random "
            "access; leave them out"
        )
    orders = {"shuffle": shuffle, "sampler": sampler is not None, "batch_sampler": batch_sampler is not None}
    if len(chosen := [name for name, given in orders.items() if given]) > 1:
        raise ValueError(f"{' and '.join(chosen)} each decide the order of the samples; give one of them")
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError(
                "shuffle=True needs a dataset with __len__ and __getitem__; shuffle inside the stream, with the "
                "same seed on every rank if stream='whole'"
            )
        if chosen:
            raise ValueError(f"{chosen[0]} is for a dataset with __len__ and __getitem__; order the stream itself")
        return stream_order(dataset, wire, stream, rounds_per_epoch, least, options, gather)
    assert isinstance(dataset, Sized), "it has been checked"
    given = sampler if batch_sampler is None else batch_sampler
    draw = None if given is None else drawn_by(given, seed, in_batches=sampler is None)
    return SharedPermutation(len(dataset), shuffle=shuffle, seed=seed, draw=draw)
