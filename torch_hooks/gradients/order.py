"""The order in which the buckets of a round start, on a wire that needs one for all ranks (``communication.lines``).

At first it is the arrangement's, the last parameters first. A model may use its layers in another order, or not use the
last ones at all: then buckets that are full would wait for one that fills late or never. So in the round after buckets
were formed, rank 0 notes in which order they fill. From then on all ranks start them so, with those that did not fill
behind. It costs one broadcast of some numbers, once. PyTorch's DDP does the same.
"""

from __future__ import annotations

import torch

from torch_hooks.gradients.arrangement import Arrangement
from torch_hooks.gradients.buckets import Bucket
from torch_hooks.gradients.sparse import Gather, Layouts
from torch_hooks.wires.choice import TorchLine, TorchWire

__all__ = ["Order"]


class Order:
    """The order of one optimizer's buckets, passed to their line."""

    def __init__(self, wire: TorchWire, line: TorchLine, arrangement: Arrangement, layouts: Layouts, name: str) -> None:
        self._wire = wire
        self._line = line
        self._arrangement = arrangement
        self._layouts = layouts
        self._name = name
        self._filled: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._names: list[str] = []
        self._is_new = False

    def filled(self, bucket: Bucket) -> None:
        """Note that a bucket is full before ``step()``."""
        if self._is_new and bucket not in self._filled:
            self._filled.append(bucket)

    def renew(self) -> None:
        """Take new buckets, which were formed in this round, on all ranks."""
        self._take(self._all())
        self._line.change_order(self._names)
        self._is_new = self._line is not self._wire

    def next_round(self, *, renewed: bool) -> None:
        """Prepare the next round: all buckets of this one have started; it may have ``renewed`` them."""
        if renewed:
            self._take(self._all())  # a carrier that was chosen since is none of them
            self._filled.clear()
        elif self._is_new:
            self._is_new = False
            self._follow_rank_0()
        self._line.in_order(self._names)

    def _all(self) -> list[Bucket]:
        return [bucket for bucket in self._arrangement.buckets if bucket is not self._arrangement.carrier]

    def _take(self, buckets: list[Bucket]) -> None:
        self._buckets, self._names = buckets, []
        for bucket in buckets:
            rows = self._layouts.known_rows(bucket.parameters[0])
            self._names += Gather.names(bucket.name) if rows else [bucket.name]

    def _follow_rank_0(self) -> None:
        late = [bucket for bucket in self._buckets if bucket not in self._filled]
        mine = [self._buckets.index(bucket) for bucket in [*self._filled, *late]]
        self._filled.clear()
        if mine:
            numbers = self._wire.result(self._wire.start_broadcast(torch.tensor(mine, device="cpu"), self._name))
            self._take([self._buckets[number] for number in numbers.tolist()])
