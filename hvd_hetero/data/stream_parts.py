"""Rounds from parts of a stream, each of which one rank reads: parts are handed out by number, samples where they lack.

    parts    0 1 2 … P-1 ──> rank i reads part p, and tells how many samples it has read ──> pools, known to all ranks
    round    rank i takes x_i samples from the front of its pool

Ranks know each other's pools by numbers, and hold only their own samples. Whenever a pool holds too few for a round,
all ranks tell at once (``gather``, in the same round on every rank) what they have read since, some rounds ahead. Then

- a rank whose part has ended gets the next one that nobody has begun, in the order of ranks;
- where no part is left, ranks that still have samples send some: pools become as large as shares. So the end of an
  epoch is the end of all samples, of which the last round takes what is left, on every rank.

Three things always hold: every rank has the same pools, parts and places; each sample that was read lies in one pool or
one round in flight; and a pool lies within the window of rounds that its rank reads ahead. So a state is, for each
part that is not done, its place (``data.reading``), and any ranks can go on from it: parts are handed out again.
With ``rounds``, the length of an epoch, a part begins again when it has ended, from epoch to epoch.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_hetero.allocation.largest_remainder import proportional
from hvd_hetero.checks import integer
from hvd_hetero.data.reading import Place, Reader
from hvd_hetero.data.sample_order import Cut, SampleOrder
from hvd_hetero.data.stream_orders import STATE_VERSION, Source, no_samples, require_kind, require_ranks
from hvd_hetero.rounds import RoundPlan


class Key(NamedTuple):
    """Names a part of the stream, in one epoch or pass."""

    number: int
    """Of the epoch or pass."""
    part: int
    of: int
    """How many parts there are."""


Sample: TypeAlias = tuple[Key, int]

_AHEAD_ROUNDS = 4  # that a rank reads, so that ranks tell each other every third round or so (arbitrary)


class StreamParts(SampleOrder):
    """``read(number, part, of, state)`` gives the samples of part ``part`` of ``of``, of the epoch of that number.

    ``own``: part i is rank i's alone. ``gather`` returns what all ranks give it, in the order of ranks.
    """

    kind = "shard"

    def __init__(
        self,
        read: Source,
        parts: int,
        rank: int,
        workers: int,
        gather: Callable[[Any], Sequence[Any]],
        *,
        own: bool = False,
        rounds: int | None = None,
    ) -> None:
        remedy = "give the rounds of an epoch, the same number on every rank"
        self._rounds = None if rounds is None else integer("rounds_per_epoch", rounds, 1, remedy=remedy)
        self._source, self._count, self._rank, self._gather = read, parts, rank, gather
        self.survives_resets = not own
        self._pools: list[deque[Sample]] = [deque() for _ in range(workers)]
        self._begin(0, [Key(0, part, parts) for part in range(parts)])

    def _begin(self, epoch: int, parts: list[Key], round: int = 0) -> None:
        self.epoch, self._round = epoch, round
        self._queue = deque(parts)
        self._places: dict[Key, Place] = {}
        self._part_of_rank: list[Key | None] = [None] * len(self._pools)
        self._reader: Reader | None = None  # of this rank's part
        for pool in self._pools:
            pool.clear()
        self._held: dict[Sample, Any] = {}  # what it has read, and holds in its pool and its rounds in flight
        self._open: deque[tuple[RoundPlan, list[list[Sample]]]] = deque()

    def start(self, epoch: int) -> None:
        """Begin an epoch; with ``rounds``, parts go on, with what was taken and not done."""
        if self._rounds is None:
            self._begin(epoch, [Key(epoch, part, self._count) for part in range(self._count)])
            return
        self.epoch, self._round = epoch, 0
        while self._open:
            for pool, share in zip(self._pools, self._open.pop()[1], strict=True):
                pool.extendleft(reversed(share))

    @property
    def _pooled(self) -> int:
        return sum(map(len, self._pools))

    @property
    def _more(self) -> bool:
        """Whether some part is not read to its end."""
        return bool(self._queue) or any(map(self._is_open, range(len(self._pools))))

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None if that is not known yet."""
        return None if self._more else self._pooled

    def holds(self, samples: int) -> bool:
        """Return whether so many samples are still to be taken."""
        if self._rounds is not None:
            return self._round < self._rounds
        return self._await(samples, [1] * len(self._pools)) >= samples

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, shorter or longer at the end of the epoch."""
        needed = plan.total + self.end.apart(plan)
        left = self._await(needed, plan.samples)
        if left == 0:
            raise ValueError(no_samples("every rank", self.epoch))
        plan = self.end.fit(plan, left if self._rounds is None else sys.maxsize)
        shares = list(zip(self._pools, plan.samples, strict=True))
        # It ends: an exchange fills a rank's pool unless its part ends, and parts are finitely many. With `rounds` they
        # begin again, but a part without samples is an error.
        while any(len(pool) < x and self._has_part_left(i) for i, (pool, x) in enumerate(shares)):
            self._exchange(needed, plan.samples)
        if any(len(pool) < x for pool, x in shares):
            self._even_out(plan)
        taken = [[pool.popleft() for _ in range(x)] for pool, x in shares]
        self._open.append((plan, taken))
        self._round += 1
        numbers = [self.epoch, self._round, self._rounds or 0, self._count, len(self._queue), *map(len, self._pools)]
        # Here, so that a rank reads in each round, and not much in some of them.
        self._read_ahead(needed, plan.samples)
        mine = [self._held[sample] for sample in taken[rank]]
        return Cut(plan, rank, mine, self.epoch, zlib.crc32(np.array(numbers, dtype="<i8").tobytes()))

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what each rank left undone, in front of its pool."""
        plan, taken = self._open.popleft()
        # In a round that all finish, what is left out was left out on purpose, as in `undone`.
        counts = plan.samples if plan.ends == "all" else [int(count) for count in done]
        for pool, share, count in zip(self._pools, taken, counts, strict=True):
            pool.extendleft(reversed(share[count:]))
        for sample in taken[self._rank][: counts[self._rank]]:
            del self._held[sample]

    def state_dict(self) -> dict[str, Any]:
        """Return the places of all parts that are not done, the same on every rank; rounds in flight are not done."""
        left = self._unfinished()
        begun = {key for i, key in enumerate(self._part_of_rank) if key is not None and self._is_open(i)}
        # So that the same ranks read the same parts again.
        order = {key: i for i, key in enumerate(self._part_of_rank)}
        keys = sorted(begun | left.keys(), key=lambda key: (key.number, order.get(key, len(order)), key.part))
        keys += [key for key in self._queue if key not in left]
        places = {key: place.state_dict(left.get(key, ())) for key, place in self._places.items() if key in keys}
        return {
            "version": STATE_VERSION, "stream": self.kind, "ranks": len(self._pools), "epoch": self.epoch,
            "round": self._round - len(self._open), "parts": [[*key, places.get(key)] for key in keys],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: parts are handed out again, those that were begun first; a collective call."""
        require_kind(state, self.kind)
        if not self.survives_resets:
            require_ranks(state["ranks"], len(self._pools))
        places = {Key(*key): place for *key, place in state["parts"]}
        self._begin(state["epoch"], list(places), state["round"])
        self._places = {key: Place(place) for key, place in places.items() if place is not None}
        newest = {key[1:]: key.number for key in sorted(places)}
        for key, place in self._places.items():  # it was read to its end, and is not done
            place.begun_again = key.number < newest[key[1:]]

    def _unfinished(self) -> dict[Key, list[int]]:
        left: dict[Key, list[int]] = {}
        for samples in (*self._pools, *(share for _, taken in self._open for share in taken)):
            for key, number in samples:
                left.setdefault(key, []).append(number)
        return left

    def _is_open(self, rank: int) -> bool:
        key = self._part_of_rank[rank]
        return key in self._places and not self._places[key].ended

    def _next_part(self, rank: int) -> Key | None:
        return next((key for key in self._queue if self.survives_resets or key.part == rank), None)

    def _has_part_left(self, rank: int) -> bool:
        return self._is_open(rank) or self._next_part(rank) is not None

    def _await(self, samples: int, shares: Sequence[int]) -> int:
        """Have ranks read until that many samples are in the pools, or all parts have ended; return how many are."""
        while self._pooled < samples and self._more:
            self._exchange(samples, shares)
        return self._pooled

    def _exchange(self, samples: int, shares: Sequence[int]) -> None:
        """Hand out parts, read ahead, and fill the pools by what each rank has read; on all ranks at once.

        Pools, parts and places stay the same on all ranks: they change by what ``gather`` gives to all. A rank's own
        reading changes nothing but what it sends, and which samples it holds.
        """
        for rank in range(len(self._pools)):
            if not self._is_open(rank) and (key := self._next_part(rank)) is not None:
                self._queue.remove(key)
                self._part_of_rank[rank], place = key, self._places.setdefault(key, Place())
                if rank == self._rank:
                    self._reader = Reader(partial(self._source, *key), place.state_dict(()))
        self._read_ahead(samples, shares)
        mine, key = None, self._part_of_rank[self._rank]
        if key is not None and self._reader is not None and self._is_open(self._rank):
            self._reader.forget(self._reader.number)  # one mark is left, the last
            mine = self._reader.count - self._places[key].count, self._reader.ended, self._reader.marks[0]
        received = self._gather(mine)
        for rank, key in enumerate(self._part_of_rank):
            if key is None or received[rank] is None:
                continue
            place = self._places[key]
            count, place.ended, mark = received[rank]
            self._pools[rank].extend((key, number) for number in place.numbers(count))
            place.marks.append(mark)
            if place.ended and self._rounds is not None and not place.begun_again:
                if place.number == 0:
                    raise ValueError(no_samples(f"rank {rank}", self.epoch))
                self._queue.append(key._replace(number=key.number + 1))
        left = self._unfinished()
        self._places = {key: place for key, place in self._places.items() if key in left or not place.ended}
        for key, place in self._places.items():
            place.forget(min(left.get(key, ()), default=place.number))

    def _read_ahead(self, samples: int, shares: Sequence[int]) -> None:
        """Read this rank's part until it has its share of some rounds, among the ranks that read."""
        key = self._part_of_rank[self._rank]
        if key is None or self._reader is None or self._reader.ended:
            return
        weights = [max(share, 1) if self._is_open(rank) else 0 for rank, share in enumerate(shares)]
        level = -(-_AHEAD_ROUNDS * samples * weights[self._rank] // sum(weights))
        unsent = self._reader.count - self._places[key].count  # the others do not know of these
        found = self._reader.read(level - len(self._pools[self._rank]) - unsent)
        self._held |= {(key, number): sample for number, sample in found}

    def _even_out(self, plan: RoundPlan) -> None:
        """Move samples from ranks that hold more than their share to those that lack some.

        ``gather`` brings every moved sample to all ranks, and each keeps those of its pool. Only ranks without a part
        left to read need this.
        """
        wanted = proportional(plan.samples, self._pooled, minimum=0).tolist()
        spare: deque[Sample] = deque()
        sent: dict[Sample, Any] = {}
        for rank, (pool, want) in enumerate(zip(self._pools, wanted, strict=True)):
            moved = [pool.pop() for _ in range(len(pool) - want)]
            spare.extend(reversed(moved))
            if rank == self._rank:
                sent = {sample: self._held.pop(sample) for sample in moved}
        for pool, want in zip(self._pools, wanted, strict=True):
            pool.extend([spare.popleft() for _ in range(want - len(pool))])
        mine = set(self._pools[self._rank])
        for samples in self._gather(sent):
            self._held |= {sample: value for sample, value in samples.items() if sample in mine}
