"""Rounds from a shard that one rank reads alone, to its end, once per epoch."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hvd_hetero.data.sample_order import Cut, SampleOrder
from hvd_hetero.data.stream_orders import Source, no_samples, require_kind
from hvd_hetero.rounds import RoundPlan

_STATE_VERSION = 1


class EndingShard(SampleOrder):
    """``read(epoch)`` gives the samples of this rank's shard. The epoch ends when the shards of all ranks have ended.

    No rank knows where the shards of others end, and shards may be of unequal length. So each rank looks one sample
    ahead, and marks in the table of a round if its shard ends with it (``RoundReport.ended``). From then on plans
    leave it out, on every rank alike. In the round in which its shard ends, a rank may do fewer samples than planned,
    which the table shows as well. When all shards have ended, every rank knows, and no round without samples is needed
    to find out.
    """

    kind = "shard, once per epoch"
    survives_resets = False

    def __init__(self, read: Source, rank: int, workers: int) -> None:
        self._read = read
        self._rank = rank
        self._workers = workers
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin an epoch, at the front of the part."""
        self.epoch = epoch
        self._round = 0
        self._source: Iterator[Any] | None = None
        self._waiting: deque[Any] = deque()
        self._open: deque[tuple[RoundPlan, list[Any]]] = deque()
        self._done = [0] * self._workers  # samples of this epoch
        self._ended = [False] * self._workers

    def holds(self, samples: int) -> bool:
        """Return whether some rank's part has not ended, as all know by the table."""
        return not all(self._ended)

    def take(self, plan: RoundPlan, rank: int) -> Cut:
        """Take the next round without the ranks whose parts have ended; fewer samples where this rank's part ends.

        The fingerprint is the number of the round: the samples of the ranks have nothing in common.
        """
        if not self.holds(1):
            raise ValueError(f"the parts of all ranks have ended in epoch {self.epoch}; start the next one")
        plan = plan.without(self._ended)
        wanted = plan.samples[rank]
        part = [self._waiting.popleft() for _ in range(min(wanted, self._await(wanted + 1)))]
        self._round += 1
        self._open.append((plan, part))
        return Cut(plan, rank, part, self.epoch, zlib.crc32(struct.pack("<2q", self.epoch, self._round)))

    def ends_after(self, done: int) -> bool:
        """Return whether this rank's part ends with the current round, of which it has done so many samples."""
        return not self._waiting and done >= sum(len(part) for _, part in self._open)

    def finish(self, done: Sequence[float], ended: Sequence[float] = ()) -> None:
        """Put back what this rank left undone, and note which parts have ended. An empty part ends all ranks."""
        _, part = self._open.popleft()
        self._waiting.extendleft(reversed(part[int(done[self._rank]) :]))
        self._done = [before + int(count) for before, count in zip(self._done, done, strict=True)]
        self._ended = [before or now > 0 for before, now in zip(self._ended, ended, strict=True)]
        if empty := [rank for rank, count in enumerate(self._done) if self._ended[rank] and not count]:
            raise ValueError(no_samples(f"rank {', '.join(map(str, empty))}", self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch and every rank's part stand, the same on every rank; rounds in flight are not done."""
        return {
            "version": _STATE_VERSION,
            "stream": self.kind,
            "epoch": self.epoch,
            "round": self._round - len(self._open),
            "done": list(self._done),
            "ended": list(self._ended),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: read this rank's part from its front, and pass over what was done."""
        require_kind(state, self.kind, _STATE_VERSION)
        if len(state["done"]) != self._workers:
            raise ValueError(
                f"the state is of {len(state['done'])} ranks, this job has {self._workers}, whose parts are others; "
                "resume with as many ranks, or begin a new epoch"
            )
        self.start(state["epoch"])
        self._round, self._done, self._ended = state["round"], list(state["done"]), list(state["ended"])
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
        missing = count - len(self._waiting)
        if missing > 0:
            if self._source is None:
                self._source = iter(self._read(self.epoch))
            self._waiting.extend(islice(self._source, missing))
        return len(self._waiting)
