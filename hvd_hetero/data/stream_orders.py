"""Rounds from data without random access: a stream that is read from front to end.

Only the maker of the stream knows which of three ways is right:

``SharedStream``
    Every rank reads the whole stream, the same samples in the same order. A round with the plan x_1 … x_n takes the
    next X of them and rank i keeps its x_i, as from a permutation (``data.permutation``): every sample goes to
    exactly one rank, exactly once, and every rank finds the end in the same round. The price is that all ranks read
    everything. What a rank that stops early has left undone comes back before new samples are read, on every rank
    alike.

``StreamParts`` (``data.stream_parts``)
    Every rank reads samples of its own: parts that are handed out, or its shard. Ranks tell each other how many.

``EndingShard``
    Every rank reads its shard once per epoch, which ends when all shards have ended. Nothing is sent.

All give the samples themselves where ``SharedPermutation`` gives indices, and look one round ahead at most. Ranks
compare where they are in their streams, and the samples of a ``SharedStream`` that has ``marks``.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from hvd_hetero.checks import require_version
from hvd_hetero.data.reading import Reader, place_after
from hvd_hetero.data.sample_order import Cut, SampleOrder, undone
from hvd_hetero.rounds import RoundPlan

STATE_VERSION = 5
Source = Callable[..., Iterable[Any]]  # the samples of the epoch of that number


class _FrontToEnd(SampleOrder):
    """Samples of one reader with their numbers: what waits for a round, and what rounds have taken."""

    def _open_at(self, epoch: int, read: Source, place: Mapping[str, Any] | None) -> None:
        self.epoch = epoch
        self._reader = Reader(lambda state: read(epoch, *([] if state is None else [state])), place)
        self._waiting: deque[tuple[int, Any]] = deque()
        self._open: deque[tuple[RoundPlan, list[tuple[int, Any]]]] = deque()

    def _await(self, count: int) -> int:
        """Read on until that many samples are waiting, or the stream ends; return how many are."""
        if count > len(self._waiting):
            self._waiting.extend(self._reader.read(count - len(self._waiting)))
        return len(self._waiting)


class SharedStream(_FrontToEnd):
    """``read(epoch)`` gives the samples of an epoch, the same on every rank; ``read(epoch, state)`` goes on at a mark.

    A round needs ``least`` of them. ``size``: how many an epoch has, if that is known; ``depends_on``: a checksum of
    what their order depends on, such as the number of processes that read.
    """

    kind = "whole"

    def __init__(self, read: Source, least: int = 1, *, size: int | None = None, depends_on: int = 0) -> None:
        self.size = size
        self._read, self._least, self._depends_on = read, least, depends_on
        self.start(0)

    def start(self, epoch: int, place: Mapping[str, Any] | None = None) -> None:
        """Begin an epoch, at a place or the front of the stream, which is opened for the first sample."""
        self._open_at(epoch, self._read, place)
        self._taken = 0 if place is None else place["until"] - len(place["left"])  # samples of this epoch

    @property
    def remaining(self) -> int | None:
        """Samples of this epoch that no round has taken; None if that is not known yet."""
        if self._reader.ended:
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
                raise ValueError(no_samples("every rank", self.epoch))
            raise ValueError(f"epoch {self.epoch} has no samples left; start the next one")
        plan = self.end.fit(plan, left)
        part = [self._waiting.popleft() for _ in range(plan.total)]
        self._taken += plan.total
        self._open.append((plan, part))
        # In the fingerprint, whether another round follows: a rank whose stream ends alone is found out in its last
        # round, before the others wait for it.
        follow = min(self._await(self._least), self._least)
        here = np.array([self.epoch, self._taken, follow], dtype="<i8")
        return self._cut(plan, rank, [sample for _, sample in part], zlib.crc32(here.tobytes()) ^ self._depends_on)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what the round left undone, before new samples are read."""
        back = [each for tail in undone(*self._open.popleft(), done) for each in tail]
        if back:  # by their numbers, the order in which another job would read them again
            self._waiting = deque(sorted([*back, *self._waiting], key=itemgetter(0)))
        self._taken -= len(back)
        self._reader.forget(min(self._unfinished(), default=self._reader.number))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; rounds in flight count as not done. The same on every rank."""
        state = {"version": STATE_VERSION, "stream": self.kind, "epoch": self.epoch}
        return state | self._reader.state_dict(list(self._unfinished()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: open the stream at its mark, and pass over what was done since."""
        require_kind(state, self.kind)
        self.start(state["epoch"], state)

    def _unfinished(self) -> Iterator[int]:
        return (number for part in (*(part for _, part in self._open), self._waiting) for number, _ in part)


class EndingShard(_FrontToEnd):
    """A shard that is read once per epoch. The epoch ends when the shards of all ranks have ended.

    No rank knows where the shards of others end, and shards may be of unequal length. So each rank marks in the table
    of a round if its shard ends with it (``RoundReport.ended``). From then on plans leave it out, on every rank. In the
    round in which its shard ends, a rank may do fewer samples than planned, which the table shows as well.
    ``read(number)`` gives this rank's own samples of the epoch of that number.
    """

    kind = "shard, once per epoch"
    survives_resets = False

    def __init__(self, read: Source, rank: int, workers: int) -> None:
        self._read, self._rank, self._workers = read, rank, workers
        self.start(0)

    def start(self, epoch: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin an epoch at the front of the shard, or go on in one."""
        state = state or {"round": 0, "done": [0] * self._workers, "ended": [False] * self._workers}
        self._round, self._done, self._ended = state["round"], list(state["done"]), list(state["ended"])
        self._open_at(epoch, self._read, place_after(self._done[self._rank]))

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
        self._round += 1
        self._open.append((plan, part))
        # The ranks' samples have nothing in common, so the fingerprint is of the round's number.
        numbers = struct.pack("<2q", self.epoch, self._round)
        return Cut(plan, rank, [sample for _, sample in part], self.epoch, zlib.crc32(numbers))

    def ends_after(self, done: int) -> bool:
        """Return whether this rank's part ends with the current round, of which it has done so many samples."""
        return not self._waiting and done >= sum(len(part) for _, part in self._open)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what this rank left undone, and note which parts have ended. An empty part ends all ranks."""
        self._waiting.extendleft(reversed(self._open.popleft()[1][int(done[self._rank]) :]))
        self._done = [before + int(count) for before, count in zip(self._done, done, strict=True)]
        self._ended = [before or now > 0 for before, now in zip(self._ended, ended, strict=True)]
        if empty := [rank for rank, count in enumerate(self._done) if self._ended[rank] and not count]:
            raise ValueError(no_samples(f"rank {', '.join(map(str, empty))}", self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch and every rank's part stand, the same on every rank; rounds in flight are not done."""
        state = {"version": STATE_VERSION, "stream": self.kind, "epoch": self.epoch}
        return state | {"round": self._round - len(self._open), "done": list(self._done), "ended": list(self._ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read this rank's part from its front, and pass over what was done."""
        require_kind(state, self.kind)
        require_ranks(len(state["done"]), self._workers)
        self.start(state["epoch"], state)


def no_samples(where: str, epoch: int) -> str:
    """Return the message for an epoch that had no samples."""
    return (
        f"data must hold at least one sample on every rank, and epoch {epoch} had none on {where}; check what is read "
        "and filtered, and that it can be read again for every epoch"
    )


def require_kind(state: Mapping[str, Any], kind: str) -> None:
    """Raise unless the state is of a stream of this kind, and of this version."""
    if state.get("stream") != kind:
        found = f"stream={state['stream']!r}" if "stream" in state else "data with random access"
        raise ValueError(f"the state is of {found}, this loader has stream={kind!r}; resume with the same kind of data")
    require_version(state, "the stream", STATE_VERSION)


def require_ranks(before: int, now: int) -> None:
    """Raise unless as many ranks go on: each reads a shard that no other can read."""
    if before != now:
        raise ValueError(
            f"the state is of {before} ranks, this job has {now}: nobody knows which samples of the new parts were "
            "done; resume with as many ranks, or begin a new epoch"
        )
