"""The order of samples: one seeded permutation per epoch, and one cursor shared by all ranks.

Let ``π`` be the permutation of the N samples of an epoch, a function of (seed, epoch) alone, and ``c`` the cursor. A
round with the plan x_1 … x_n takes the slice ``π[c : c + X]``; rank i gets ``π[c + x_1 + … + x_{i-1} : … + x_i]``; then
c grows by X. So whatever the plans do, every sample is visited exactly once per epoch, the samples *of a round* do not
depend on the policy, and every rank does the same number of rounds. When fewer than X samples are left, the last round
is short; too few for all ranks join the round before (``data.sample_order.EpochEnd``).

**Samples left undone.** A rank that stops early has done the first S_i of its x_i samples. Every rank sees this in the
table, so all put the tails back alike, before what no round has taken yet: c falls by X - S. The order ``π`` is changed
in place, so that ``π[:c]`` always holds what has been taken for good and ``π[c:]`` what is still to come.

**Rounds ahead.** A loader takes slices up to L rounds before they are computed, earlier on one rank and later on
another. All must still take the same slice for the same round: the tails of round r come back just before round
r + 1 + L is taken, however early they are known. What comes back after the last slice was taken is a pass of its own
over the order, which begins once all rounds are finished.

Nothing is sent: all ranks compute the same permutation and follow the same plans.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_hetero.checks import integer, require_version
from hvd_hetero.data.sample_order import Cut, SampleOrder, undone
from hvd_hetero.rounds import RoundPlan

_STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class _Taken:
    """A round's slice of the order."""

    number: int
    indices: npt.NDArray[np.int64]
    plan: RoundPlan
    exhausted: bool
    """True: nothing was left after it at that time."""


class SharedPermutation(SampleOrder):
    """The order of one data set's samples over the epochs, and the cursor in the present one.

    ``draw`` gives the order of an epoch if it is no permutation: any indices, also some of them several times.
    """

    size: int

    def __init__(
        self,
        length: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        draw: Callable[[int], npt.NDArray[np.int64]] | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(
                f"the dataset must hold at least one sample, its length is {length}; check what it was made from"
            )
        self.length = length
        self.shuffle = shuffle
        self.seed = integer("seed", seed, 0, 2**128, remedy="give a whole number, the same on every rank")
        self._draw = draw
        self.start(0)

    def start(self, epoch: int) -> None:
        """Put the cursor at the beginning of an epoch."""
        self.epoch = epoch
        # A state then holds the order itself: the user's `draw` may not draw the same again.
        self._reordered = self._draw is not None
        if self._draw is not None:
            order = self._draw(epoch)
        else:
            order = np.arange(self.length)
            if self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
        self.size = len(order)
        self._begin(order)

    def _begin(self, order: npt.NDArray[np.int64]) -> None:
        self.cursor = 0
        self._order = order
        self._next = 0
        self._open: deque[_Taken] = deque()
        self._tails: deque[tuple[int, npt.NDArray[np.int64]]] = deque()
        # Places where a job that was interrupted had come to the end of the order, before samples came back to it.
        self._stops: deque[int] = deque()
        self.checksum = zlib.crc32(order.astype("<i8").tobytes())

    @property
    def remaining(self) -> int:
        """Samples of this epoch that the next round can take."""
        self._put_back(self._next)
        return (self._stops[0] if self._stops else len(self._order)) - self.cursor

    def window(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the samples at these places of the epoch, for what looks ahead of the cursor."""
        return self._order[begin:end].copy()

    def holds(self, samples: int) -> bool:
        """Return whether a round can take so many samples of this epoch.

        What is left may be too few for the next round only because samples are still to come back. If no round is in
        flight, the pass is over then, and the next one begins with them.
        """
        if self.remaining < samples and not self._open:
            if self._tails:
                self._put_back(self._tails[-1][0])
            self._stops.clear()  # of the pass that is over
        return self.remaining >= samples

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round, shorter or longer at the end of the epoch; ``part`` holds the indices of its samples."""
        if self.remaining == 0:
            raise ValueError(f"epoch {self.epoch} has no samples left; start the next one")
        # It travels in the table, so ranks with different data raise. The order is in it, too: two NumPy versions may
        # shuffle differently with the same seed and epoch.
        fingerprint = zlib.crc32(struct.pack("<3q", self.checksum, self.epoch, self.cursor))
        plan = self.end.fit(plan, self.remaining)
        indices = self._order[self.cursor : self.cursor + plan.total].copy()
        self.cursor += plan.total
        if self._stops and self.cursor == self._stops[0]:
            self._stops.popleft()
            exhausted = True
        else:
            exhausted = self.cursor == len(self._order)
        self._open.append(_Taken(self._next, indices, plan, exhausted))
        self._next += 1
        return self._cut(plan, rank, indices, fingerprint)

    def shares(self) -> list[Cut]:
        """Return what each rank has of the round that was taken last."""
        taken = self._open[-1]
        return [self._cut(taken.plan, rank, taken.indices, 0, again=True) for rank in range(taken.plan.workers)]

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Note what the oldest round in flight left undone; it comes back when it is due."""
        taken = self._open.popleft()
        tails = undone(taken.plan, taken.indices, done)
        if any(map(len, tails)):
            self._reordered = True
            self._tails.append((taken.number + 1 + self.rounds_ahead, np.concatenate(tails)))

    def _put_back(self, number: int) -> None:
        """Put back the tails that are due before the round of that number, the oldest first in the order."""
        due = []
        while self._tails and self._tails[0][0] <= number:
            due.append(self._tails.popleft()[1])
        if due:
            back = np.concatenate(due)
            # What lies before the cursor is done or in flight, and is kept by the rounds themselves: its places may be
            # used. There are enough, because what comes back was taken from there.
            self.cursor -= len(back)
            self._order[self.cursor : self.cursor + len(back)] = back
            self.checksum = zlib.crc32(back.astype("<i8").tobytes(), self.checksum)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands: what is still to be visited, in order. Rounds in flight count as not done.

        With prefetch, ranks may be ahead by different numbers of rounds, and write the same future differently. To go
        on, all must load one rank's state.
        """
        first = self._open[0].number if self._open else self._next
        flight = [taken.indices for taken in self._open]
        ends = np.cumsum([len(indices) for indices in flight]).tolist()
        stops = [end for end, taken in zip(ends, self._open, strict=True) if taken.exhausted]
        stops += [sum(map(len, flight)) + stop - self.cursor for stop in self._stops]
        return {
            "version": _STATE_VERSION,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor - sum(map(len, flight)),
            "rest": np.concatenate([*flight, self._order[self.cursor :]]).tolist() if self._reordered else None,
            "tails": [(number - first, tail.tolist()) for number, tail in self._tails],
            "stops": stops,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another job stood in its epoch."""
        require_version(state, "the order of samples", _STATE_VERSION)
        mine = {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}
        if other := {name: state[name] for name, value in mine.items() if state[name] != value}:
            raise ValueError(
                f"the state is of an order with {other}, this one has { {name: mine[name] for name in other} }; "
                "resume with the same dataset, shuffle and seed"
            )
        self.start(state["epoch"])
        if state["rest"] is None:
            self.cursor = state["cursor"]
            return
        tails = deque((int(number), np.array(tail, dtype=np.int64)) for number, tail in state["tails"])
        room = sum(len(tail) for _, tail in tails)  # for what comes back, which is put before the cursor
        self._begin(np.concatenate([np.zeros(room, dtype=np.int64), np.array(state["rest"], dtype=np.int64)]))
        self.cursor = room
        self._reordered = True
        self._tails = tails
        self._stops = deque(room + stop for stop in state["stops"] if 0 < stop < len(state["rest"]))
        if not state["rest"]:
            self.holds(1)
