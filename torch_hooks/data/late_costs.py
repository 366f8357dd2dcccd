"""Costs of samples that are known only when the dataset has returned them, as of a text that is cut into tokens.

Each rank reads its part of the samples some rounds ahead and keeps what they cost. Every few rounds one sum over the
ranks gives all of them all costs, and rounds are cut by these as if they had been known from the start::

    lists for the DataLoader    costs ahead | … | costs ahead | round 0 | costs ahead | round 1 | costs ahead | …
    what a rank gets back       costs, costs, …  ──▶ summed over the ranks ──▶ rounds are cut

So a sample is read twice in the job: for its cost, and by the rank that trains on it. Both times it has random numbers
that depend on the seed, the epoch and its index alone.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from hvd_hetero.checks import IntArray
from hvd_hetero.communication.wire import Handle
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_costs import cost_from
from hvd_hetero.rounds import RoundPlan
from torch_hooks.data.samplers import random_state_kept, seed_all
from torch_hooks.session import TorchSession
from torch_hooks.wires.choice import TorchWire

# A sum takes 1.5 ms of a processor, whatever it holds: below 1 % of steps of 40 ms.
_LISTS_PER_SUM = 4

Key: TypeAlias = "tuple[int, int | list[int]]"
"""An epoch, and the index of a sample to train on or the indices of those whose costs are asked for."""


@dataclass(frozen=True, slots=True)
class PartCosts:
    """What the samples of one list cost, in its order."""

    costs: list[float]


class SeededSamples(Dataset[Any]):
    """Samples, or what they cost, each read with random numbers of its own."""

    def __init__(self, dataset: Any, cost_of: Callable[[Any], float], seed: int) -> None:
        self._dataset, self._cost_of = dataset, cost_of
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Read the samples of a list, as a DataLoader asks for them."""
        # Once a list: putting back the state of all generators takes ten times as long as seeding them.
        with random_state_kept():
            return [self._read(*key) for key in keys]

    def _read(self, epoch: int, wanted: int | list[int]) -> Any:
        if isinstance(wanted, list):
            return PartCosts([cost_from(self._cost_of, self._read(epoch, i), f"index {i}") for i in wanted])
        # Two ranks may read it, at other times and in other processes: an augmentation must come out alike.
        # A checksum tells all indices of an epoch apart, and takes a tenth of a SeedSequence.
        seed_all(zlib.crc32(struct.pack("<2q", epoch, wanted), self._seed))
        return self._dataset[wanted]


class CostsAhead:
    """Asks for the costs of samples ahead, and receives those that other ranks have read.

    ``most``: the samples of a round at most; ``slots``: how many lists the DataLoader takes before the first is done.
    """

    def __init__(self, session: TorchSession, order: SharedPermutation, most: int, slots: int) -> None:
        assert order.costs is not None, "the loader has set it"
        self._session, self._order, self._costs = session, order, order.costs
        self._rank = session.balancer.rank
        # Between asking and cutting lie the lists under way, those that wait for a sum, and those that it takes to
        # travel unawaited; these hold the longer last round, too.
        self._ahead = (slots + 2 * _LISTS_PER_SUM) * most
        self._most = most
        self._wire: TorchWire | None = None
        self._until = self._end = 0  # places of the epoch: of what is asked for, and of its end
        self._asked: deque[tuple[int, int, int]] = deque()
        """For each list under way: the places at which this rank's samples begin and end, and where those of all do."""
        self._mine = np.zeros(0)  # what this rank's samples cost, by their places
        self._summed = self._lists = 0  # the place up to which costs were sent; lists that have come
        self._under_way: tuple[Handle, torch.Tensor, IntArray] | None = None
        self._costs.receive = self._receive

    def begin(self) -> Iterator[list[Key]]:
        """Yield the lists to read before the first round of an iteration is cut; a collective call."""
        if self._wire is None:
            self._wire = self._session.wire.new_group()
        if self._under_way is not None:
            with suppress(self._wire.failure):  # of an iteration that was left, maybe since ranks are gone
                self._receive()
        self._costs.forget()
        self._asked.clear()
        order, plan = self._order, self._session.balancer.plan()
        self._until = self._summed = order.cursor
        self._end, self._lists = order.cursor + order.remaining, 0
        self._mine = np.zeros(self._end)
        for until in range(order.cursor + self._most, order.cursor + self._ahead + 1, self._most):
            yield self._list(plan, until)

    def next(self, plan: RoundPlan) -> list[Key]:
        """Return the list to read after a round with this plan; exactly one a round, so a prefetch stays as deep."""
        return self._list(plan, self._order.cursor + self._ahead)

    def _list(self, plan: RoundPlan, until: int) -> list[Key]:
        begin, self._until = self._until, max(self._until, min(until, self._end))
        ends = (plan.start(self._rank), plan.start(self._rank) + plan.samples[self._rank])
        start, stop = (begin + (self._until - begin) * end // plan.total for end in ends)
        self._asked.append((start, stop, self._until))
        return [(self._order.epoch, self._order.window(start, stop).tolist())]

    def note(self, part: PartCosts) -> None:
        """Note what the oldest list under way has brought, on all ranks between the same micro-batches."""
        start, stop, until = self._asked.popleft()
        self._mine[start:stop] = part.costs
        self._lists += 1
        if until > self._summed and (until == self._end or self._lists % _LISTS_PER_SUM == 0):
            if self._under_way is not None:
                self._receive()
            begin, self._summed = self._summed, until
            costs = torch.from_numpy(self._mine[begin:until])
            assert self._wire is not None, "an iteration has begun"
            handle = self._wire.start_sum(costs, f"{self._session.prefix}.costs")
            self._under_way = handle, costs, self._order.window(begin, until)

    def _receive(self) -> None:
        assert self._under_way is not None, "costs are asked for far enough ahead"
        assert self._wire is not None, "an iteration has begun"
        (handle, total, indices), self._under_way = self._under_way, None
        self._wire.wait(handle)
        self._costs.note(indices, total.numpy())
