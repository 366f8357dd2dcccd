"""Rounds from data without random access: a stream that is read from front to end.

Only the maker of the stream knows which of three ways is right:

``SharedStream``
    Every rank reads the whole stream, the same samples in the same order. A round with the plan x_1 … x_n takes the
    next X of them and rank i keeps its x_i, as from a permutation (``data.permutation``): every sample goes to
    exactly one rank, exactly once, and every rank finds the end in the same round. The price is that all ranks read
    everything. What a rank that stops early has left undone comes back before new samples are read, on every rank
    alike.

``ShardStream``
    Every rank reads its own samples, its shard, and takes x_i from it in each round. Ranks do not know each
    other's ends, so an epoch is a given number of rounds; a shard that has come to its end begins again, and goes on
    from epoch to epoch, so that a slow rank, too, reaches the end of its shard. What is left undone goes back to its
    front.

``EndingShard``
    Every rank reads its shard once per epoch, which ends when all shards have ended.

All give the samples themselves where ``SharedPermutation`` gives indices, and look one round ahead at most. Ranks
compare where they are in their streams, and the samples of a ``SharedStream`` that has ``marks``.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from hvd_hetero.checks import integer, require_version
from hvd_hetero.data.sample_order import Cut, SampleOrder, undone
from hvd_hetero.rounds import RoundPlan

_STATE_VERSION = 3
Source = Callable[[int], Iterable[Any]]  # the samples of the epoch or pass of that number


class SharedStream(SampleOrder):
    """``read(epoch)`` gives the samples of an epoch, the same on every rank.

    A round needs ``least`` of them, and ``readers`` processes read: with several, the order differs.
    ``size``: how many an epoch has, if that is known; ``seeds``: a checksum of what else their order depends on.
    """

    kind = "whole"

    def __init__(
        self, read: Source, least: int = 1, readers: int = 0, *, size: int | None = None, seeds: int = 0
    ) -> None:
        self.size = size
        self._read = read
        self._least = least
        self._readers = readers
        self._seeds = seeds
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin an epoch at the front of the stream, which is opened when the first sample is asked for."""
        self.epoch = epoch
        self._source: Iterator[Any] | None = None
        self._at_end = False
        self._opened = 0  # the number of the sample that is read next
        self._taken = 0  # samples of this epoch
        self._waiting: deque[tuple[int, Any]] = deque()  # read, and not taken yet, with their numbers
        self._open: deque[tuple[RoundPlan, list[tuple[int, Any]]]] = deque()

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None if that is not known yet."""
        if self._at_end:
            return len(self._waiting)
        return None if self.size is None else self.size - self._taken

    def holds(self, samples: int) -> bool:
        """Return whether so many samples are still to be taken."""
        return self._await(samples) >= samples

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, shorter or longer at the end of the stream."""
        # Read further than the round, because its plan depends on whether it is the last.
        left = self._await(plan.total + self.end.apart(plan))
        if left == 0:
            if self._taken == 0:
                raise ValueError(_no_samples("every rank", self.epoch))
            raise ValueError(f"epoch {self.epoch} has no samples left; start the next one")
        plan = self.end.fit(plan, left)
        part = [self._waiting.popleft() for _ in range(plan.total)]
        self._taken += plan.total
        self._open.append((plan, part))
        # In the fingerprint, whether another round follows: a rank whose stream ends alone is found out in its last
        # round, before the others wait for it.
        follow = min(self._await(self._least), self._least)
        here = np.array([self.epoch, self._taken, follow, self._readers], dtype="<i8")
        return self._cut(plan, rank, [sample for _, sample in part], zlib.crc32(here.tobytes()) ^ self._seeds)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what the round left undone, before new samples are read."""
        back = [each for tail in undone(*self._open.popleft(), done) for each in tail]
        self._waiting.extendleft(reversed(back))
        self._taken -= len(back)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; rounds in flight count as not done. The same on every rank."""
        unfinished = [number for _, part in self._open for number, _ in part]
        unfinished += [number for number, _ in self._waiting]
        return {
            "version": _STATE_VERSION,
            "stream": self.kind,
            "epoch": self.epoch,
            # With several processes samples come in another order, so a state holds for as many readers only.
            "readers": self._readers,
            "opened": self._opened,
            "unfinished": unfinished,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read the stream from its front, and pass over what was done."""
        _require(state, self.kind, self._readers)
        self.start(state["epoch"])
        kept = dict.fromkeys(state["unfinished"])
        source = self._source = iter(self._read(self.epoch))
        for number, sample in enumerate(islice(source, state["opened"])):
            self._opened = number + 1
            if number in kept:
                kept[number] = sample
        if self._opened < state["opened"]:
            raise ValueError(
                f"the state is of a stream with at least {state['opened']} samples, this one has {self._opened}; "
                "resume with the same data"
            )
        self._waiting.extend(kept.items())
        self._taken = self._opened - len(kept)

    def _await(self, count: int) -> int:
        """Read on until that many samples are waiting, or the stream ends; return how many are."""
        missing = count - len(self._waiting)
        if missing > 0:
            if self._source is None:
                self._source = iter(self._read(self.epoch))
            for sample in islice(self._source, missing):
                self._waiting.append((self._opened, sample))
                self._opened += 1
            self._at_end = len(self._waiting) < count
        return len(self._waiting)


class _Shard(SampleOrder):
    """``read(number)`` gives this rank's own samples, of the epoch or pass of that number, by ``readers`` processes."""

    kind: ClassVar[str]
    survives_resets = False

    def __init__(self, read: Source, rank: int, workers: int, readers: int = 0) -> None:
        self._read, self._rank, self._readers = read, rank, readers
        self._begin(0, [0] * workers)

    def _begin(self, epoch: int, done: list[int], round: int = 0) -> None:
        """Begin at the front of the shard; ``done`` are samples of each rank that were done of theirs."""
        self.epoch, self._round, self._done = epoch, round, done
        self._source: Iterator[Any] | None = None
        self._waiting: deque[Any] = deque()
        self._open: deque[tuple[RoundPlan, list[Any]]] = deque()

    def _take(self, plan: RoundPlan, rank: int, part: list[Any], *common: int) -> Cut:
        """Take these samples. The ranks' have nothing in common, so the fingerprint is of the round's number."""
        self._round += 1
        self._open.append((plan, part))
        numbers = struct.pack(f"<{2 + len(common)}q", self.epoch, self._round, *common)
        return Cut(plan, rank, part, self.epoch, zlib.crc32(numbers))

    def _finish(self, part: list[Any], counts: Sequence[int]) -> None:
        """Put back what this rank left undone of a part, and note how far each rank has come."""
        self._waiting.extendleft(reversed(part[counts[self._rank] :]))
        self._done = [before + count for before, count in zip(self._done, counts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch and every rank's shard stand; the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "stream": self.kind,
            "epoch": self.epoch,
            "readers": self._readers,
            "round": self._round - len(self._open),
            "done": list(self._done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, at the front of the shard."""
        _require(state, self.kind, self._readers)
        if len(state["done"]) != len(self._done):
            raise ValueError(
                f"the state is of {len(state['done'])} ranks, this job has {len(self._done)}: nobody knows which "
                "samples of the new parts were done; resume with as many ranks, or begin a new epoch"
            )
        self._begin(state["epoch"], list(state["done"]), state["round"])


class ShardStream(_Shard):
    """A shard that begins again when it ends; an epoch has ``rounds`` rounds."""

    kind = "shard"

    def __init__(self, read: Source, rounds: int, rank: int, workers: int, readers: int = 0) -> None:
        remedy = "give the rounds of an epoch, the same number on every rank"
        self.rounds = integer("rounds_per_epoch", rounds, 1, remedy=remedy)
        super().__init__(read, rank, workers, readers)

    def _begin(self, epoch: int, done: list[int], round: int = 0) -> None:
        super()._begin(epoch, done, round)
        self._pass = 0

    def start(self, epoch: int) -> None:
        """Begin an epoch. The part itself goes on, with what was taken and not done."""
        self.epoch, self._round = epoch, 0
        while self._open:
            self._waiting.extendleft(reversed(self._open.pop()[1]))

    def holds(self, samples: int) -> bool:
        """Return whether so many samples are still to be taken: any number, while rounds are left."""
        return self._round < self.rounds

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, as planned."""
        plan = self.end.fit(plan, sys.maxsize)
        return self._take(plan, rank, self._pull(plan.samples[rank]), self.rounds)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what this rank left undone, and note how far each rank has come."""
        plan, part = self._open.popleft()
        # In a round that all finish, what is left out was left out on purpose, as in `undone`.
        self._finish(part, plan.samples if plan.ends == "all" else [int(count) for count in done])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read this rank's part from the front of its first pass, and pass over what was done."""
        super().load_state_dict(state)
        for _ in range(self._done[self._rank]):
            self._pull(1)

    def _pull(self, count: int) -> list[Any]:
        while (missing := count - len(self._waiting)) > 0:
            new = [] if self._source is None else list(islice(self._source, missing))
            if not new:
                self._source = iter(self._read(self._pass))
                self._pass += 1
                new = list(islice(self._source, 1))
                if not new:
                    raise ValueError(
                        f"rank {self._rank}'s part of the stream has no samples; give every rank one at least, or let "
                        "all ranks read the whole stream (stream='whole')"
                    )
            self._waiting.extend(new)
        return [self._waiting.popleft() for _ in range(count)]


class EndingShard(_Shard):
    """A shard that is read once per epoch. The epoch ends when the shards of all ranks have ended.

    No rank knows where the shards of others end, and shards may be of unequal length. So each rank marks in the table
    of a round if its shard ends with it (``RoundReport.ended``). From then on plans leave it out, on every rank. In the
    round in which its shard ends, a rank may do fewer samples than planned, which the table shows as well.
    """

    kind = "shard, once per epoch"

    def _begin(self, epoch: int, done: list[int], round: int = 0) -> None:
        super()._begin(epoch, done, round)
        self._ended = [False] * len(done)

    def start(self, epoch: int) -> None:
        """Begin an epoch, at the front of the part."""
        self._begin(epoch, [0] * len(self._done))

    def holds(self, samples: int) -> bool:
        """Return whether some rank's part has not ended, as all know by the table."""
        return not all(self._ended)

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round without the ranks whose parts have ended; fewer samples where this rank's part ends."""
        if not self.holds(1):
            raise ValueError(f"the parts of all ranks have ended in epoch {self.epoch}; start the next one")
        plan = plan.without(self._ended)
        wanted = plan.samples[rank]
        # One sample more is read, to know in the last round that it is the last: no empty round is needed to find out.
        part = [self._waiting.popleft() for _ in range(min(wanted, self._await(wanted + 1)))]
        return self._take(plan, rank, part)

    def ends_after(self, done: int) -> bool:
        """Return whether this rank's part ends with the current round, of which it has done so many samples."""
        return not self._waiting and done >= sum(len(part) for _, part in self._open)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what this rank left undone, and note which parts have ended. An empty part ends all ranks."""
        self._finish(self._open.popleft()[1], [int(count) for count in done])
        self._ended = [before or now > 0 for before, now in zip(self._ended, ended, strict=True)]
        if empty := [rank for rank, count in enumerate(self._done) if self._ended[rank] and not count]:
            raise ValueError(_no_samples(f"rank {', '.join(map(str, empty))}", self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch and every rank's part stand, the same on every rank; rounds in flight are not done."""
        return super().state_dict() | {"ended": list(self._ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read this rank's part from its front, and pass over what was done."""
        super().load_state_dict(state)
        self._ended = list(state["ended"])
        passed = self._done[self._rank]
        if self._await(passed) < passed:
            raise ValueError(
                f"the state is of a part with at least {passed} samples on rank {self._rank}, this one has "
                f"{len(self._waiting)}; resume with the same data"
            )
        for _ in range(passed):
            self._waiting.popleft()

    def _await(self, count: int) -> int:
        """Read on until that many samples are waiting, or the part ends; return how many are."""
        if count > len(self._waiting):
            if self._source is None:
                self._source = iter(self._read(self.epoch))
            self._waiting.extend(islice(self._source, count - len(self._waiting)))
        return len(self._waiting)


def _no_samples(where: str, epoch: int) -> str:
    """Return the message for an epoch that had no samples."""
    return (
        f"data must hold at least one sample on every rank, and epoch {epoch} had none on {where}; check what is read "
        "and filtered, and that it can be read again for every epoch"
    )


def _require(state: Mapping[str, Any], kind: str, readers: int) -> None:
    """Raise unless the state is of a stream of this kind, and of this version."""
    if state.get("stream") != kind:
        found = f"stream={state['stream']!r}" if "stream" in state else "data with random access"
        raise ValueError(f"the state is of {found}, this loader has stream={kind!r}; resume with the same kind of data")
    require_version(state, "the stream", _STATE_VERSION)
    if state["readers"] != readers:
        raise ValueError(
            f"the state is of a stream read with num_workers={state['readers']}, this loader has "
            f"num_workers={readers}; resume with the same, for samples come in another order otherwise"
        )
