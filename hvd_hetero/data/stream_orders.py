"""Rounds from data without random access: a stream that is read from front to end.

Only the maker of the stream knows which of two ways is right:

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

A third way, for shards that are read once per epoch, is ``data.ending_shard``. All give the samples themselves where
``SharedPermutation`` gives indices, and look one round ahead at most. Ranks compare where they are in their streams,
and the samples of a ``SharedStream`` that has ``marks``.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hvd_hetero.checks import integer, require_version
from hvd_hetero.data.sample_order import Cut, SampleOrder, undone
from hvd_hetero.rounds import RoundPlan

_STATE_VERSION = 2
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
        """Take the next round, shorter or longer at the end of the stream.

        The fingerprint also says whether another round follows: a rank whose stream ends alone is found out in its last
        round, before the others wait for it.
        """
        left = self._await(plan.total + self.end.apart(plan))  # the plan depends on whether this round is the last
        if left == 0:
            if self._taken == 0:
                raise ValueError(no_samples("every rank", self.epoch))
            raise ValueError(f"epoch {self.epoch} has no samples left; start the next one")
        plan = self.end.fit(plan, left)
        part = [self._waiting.popleft() for _ in range(plan.total)]
        self._taken += plan.total
        self._open.append((plan, part))
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


class ShardStream(SampleOrder):
    """``read(number)`` gives this rank's shard, for the pass of that number; an epoch has ``rounds`` rounds."""

    kind = "shard"
    survives_resets = False

    def __init__(self, read: Source, rounds: int, rank: int, workers: int, readers: int = 0) -> None:
        way_out = "give the rounds of an epoch, the same number on every rank"
        self.rounds = integer("rounds_per_epoch", rounds, 1, way_out=way_out)
        self._read = read
        self._rank = rank
        self._readers = readers
        self._done = [0] * workers  # samples, since the beginning of the first pass
        self._begin()
        self.start(0)

    def _begin(self) -> None:
        self._pass = 0
        self._source: Iterator[Any] = iter(())
        self._waiting: deque[Any] = deque()
        self._open: deque[tuple[RoundPlan, list[Any]]] = deque()

    def start(self, epoch: int) -> None:
        """Begin an epoch. The part itself goes on, with what was taken and not done."""
        self.epoch = epoch
        self._round = 0
        while self._open:
            self._waiting.extendleft(reversed(self._open.pop()[1]))

    def holds(self, samples: int) -> bool:
        """Return whether so many samples are still to be taken: any number, while rounds are left."""
        return self._round < self.rounds

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, as planned.

        The fingerprint is made of the round's number and the number of rounds: the ranks' samples have nothing in
        common.
        """
        self._round += 1
        plan = self.end.fit(plan, sys.maxsize)
        part = self._pull(plan.samples[rank])
        self._open.append((plan, part))
        return Cut(plan, rank, part, self.epoch, zlib.crc32(struct.pack("<3q", self.epoch, self._round, self.rounds)))

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what this rank left undone, and note how far each rank has come."""
        plan, part = self._open.popleft()
        counts = plan.samples if plan.ends == "all" else [int(count) for count in done]  # all: see ``undone``
        self._waiting.extendleft(reversed(part[counts[self._rank] :]))
        self._done = [before + count for before, count in zip(self._done, counts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch and every rank's part stand; the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "stream": self.kind,
            "epoch": self.epoch,
            "readers": self._readers,
            "round": self._round - len(self._open),
            "done": list(self._done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read this rank's part from the front of its first pass, and pass over what was done."""
        _require(state, self.kind, self._readers)
        if len(state["done"]) != len(self._done):
            raise ValueError(
                f"the state is of {len(state['done'])} ranks, this job has {len(self._done)}: nobody knows which "
                "samples of the new parts were done; resume with as many ranks, or begin a new epoch"
            )
        self._begin()
        self.epoch, self._round, self._done = state["epoch"], state["round"], list(state["done"])
        for _ in range(self._done[self._rank]):
            self._pull(1)

    def _pull(self, count: int) -> list[Any]:
        while len(self._waiting) < count:
            before = len(self._waiting)
            self._waiting.extend(islice(self._source, count - before))
            if len(self._waiting) == before:
                self._source = iter(self._read(self._pass))
                self._pass += 1
                first = next(self._source, self)
                if first is self:
                    raise ValueError(
                        f"rank {self._rank}'s part of the stream has no samples; give every rank one at least, or let "
                        "all ranks read the whole stream (stream='whole')"
                    )
                self._waiting.append(first)
        return [self._waiting.popleft() for _ in range(count)]


def no_samples(where: str, epoch: int) -> str:
    """Return the message for an epoch that had no samples."""
    return (
        f"data must hold at least one sample on every rank, and epoch {epoch} had none on {where}; check what is read "
        "and filtered, and that it can be read again for every epoch"
    )


def require_kind(state: Mapping[str, Any], kind: str, version: int) -> None:
    """Raise unless the state is of a stream of this kind, and of this version."""
    if state.get("stream") != kind:
        found = f"stream={state['stream']!r}" if "stream" in state else "data with random access"
        raise ValueError(f"the state is of {found}, this loader has stream={kind!r}; resume with the same kind of data")
    require_version(state, "the stream", version)


def _require(state: Mapping[str, Any], kind: str, readers: int) -> None:
    require_kind(state, kind, _STATE_VERSION)
    if state["readers"] != readers:
        raise ValueError(
            f"the state is of a stream read with num_workers={state['readers']}, this loader has "
            f"num_workers={readers}; resume with the same, for samples come in another order otherwise"
        )
