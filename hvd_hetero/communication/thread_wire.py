"""Ranks that are threads of one process: a group whose members meet by name.

Each brings a value, the last to come computes the results of all, and each takes its own away. Results are computed
in the order of ranks, so that a sum has the same bits in every run.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from hvd_hetero.errors import HeteroError, PeerLostError

Combine = Callable[[Sequence[Any]], Sequence[Any]]
"""A function from the values of all ranks to the results of all ranks."""


class Meeting:
    """One call of all ranks under one name."""

    def __init__(self, name: str, kind: object) -> None:
        self.name = name
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.results: Sequence[Any] | None = None
        self.error = ""


class SharedSignals:
    """Signals between ranks that are threads, when one has finished the round (``communication.wire.Signals``)."""

    def __init__(self) -> None:
        self._latest = -1

    def raise_signal(self, round: int) -> None:
        """Signal to the others that this rank has finished the round."""
        self._latest = round  # no rank is further than the round that all ranks are in

    def raised(self, round: int) -> bool:
        """Return whether any rank has finished the round."""
        return self._latest == round


class ThreadGroup:
    """The shared state of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._meetings: dict[str, Meeting] = {}
        self._gone: dict[int, str] = {}
        self._signals: dict[int, SharedSignals] = {}

    def signals(self, number: int) -> SharedSignals:
        """Return the signals of the training with this number, the same object for all ranks."""
        with self._changed:
            return self._signals.setdefault(number, SharedSignals())

    def come(self, rank: int, name: str, kind: object, value: Any, combine: Combine) -> Meeting:
        """Bring a value to the meeting of this name. ``kind`` must be the same on all ranks."""
        with self._changed:
            meeting = self._meetings.setdefault(name, Meeting(name, kind))
            if rank in meeting.brought:
                raise HeteroError(f"{name!r} is under way already; wait for its result before using the name again")
            if kind != meeting.kind:
                meeting.error = f"the ranks do not agree on {name!r}: {meeting.kind} and, on rank {rank}, {kind}"
            meeting.brought[rank] = value
            if len(meeting.brought) == self.size:
                del self._meetings[name]
                self._conclude(meeting, combine)
        return meeting

    def _conclude(self, meeting: Meeting, combine: Combine) -> None:
        try:
            if not meeting.error:
                meeting.results = combine([meeting.brought[rank] for rank in range(self.size)])
        except Exception as error:
            meeting.error = (
                f"the ranks' values for {meeting.name!r} do not fit together: {error}; give the same shapes and types"
            )
            raise
        finally:
            meeting.brought = dict.fromkeys(meeting.brought)  # let go of the values
            self._changed.notify_all()

    def is_over(self, meeting: Meeting) -> bool:
        """Return whether all have come."""
        return len(meeting.brought) == self.size

    def result(self, rank: int, meeting: Meeting) -> Any:
        """Wait until all have come, and return this rank's part."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(meeting) or self._missing(meeting))
        if not self.is_over(meeting):
            missing = self._missing(meeting)[0]
            raise PeerLostError(f"{meeting.name!r} waits for rank {missing}, which {self._gone[missing]}")
        if meeting.error:
            raise HeteroError(meeting.error)
        assert meeting.results is not None, "the meeting is over"
        return meeting.results[rank]

    def leave(self, rank: int, why: str) -> None:
        """Wake all that wait for this rank, which comes to no meeting any more."""
        with self._changed:
            self._gone[rank] = why
            self._changed.notify_all()

    def _missing(self, meeting: Meeting) -> list[int]:
        return [rank for rank in self._gone if rank not in meeting.brought]


class ThreadWire:
    """The wire of one thread: objects travel as deep copies, as if between processes."""

    failure = PeerLostError
    waits_in: tuple[str, ...] = (__name__,)
    cannot_sum = ()
    collective_timeout_s = math.inf

    def __init__(self, thread_group: ThreadGroup, rank: int) -> None:
        self.thread_group = thread_group
        self.rank = rank
        self.size = thread_group.size

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """Return rank ``root_rank``'s object, on every rank."""
        return self.result(
            self._come("an object of one rank", name, obj, lambda of: [copy.deepcopy(of[root_rank]) for _ in of])
        )

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return every rank's object, in order of rank."""
        gathered: Sequence[Any] = self.result(
            self._come("an object of each rank", name, obj, lambda of: [copy.deepcopy(of) for _ in of])
        )
        return gathered

    def done(self, handle: Meeting) -> bool:
        """Return whether the result is there."""
        return self.thread_group.is_over(handle)

    def result(self, handle: Meeting) -> Any:
        """Return the result, once all ranks have come."""
        return self.thread_group.result(self.rank, handle)

    def wait(
        self,
        handle: Meeting,
        expected_s: float = float("nan"),
        transfer_s: float = float("nan"),
        imminent: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result, once all ranks have come: a thread that waits needs no processor."""
        return self.result(handle)

    def new_group(self) -> Self:
        """Return this wire, whose calls are paired by name."""
        return self

    def _come(self, kind: object, name: str, value: Any, combine: Combine) -> Meeting:
        return self.thread_group.come(self.rank, name, kind, value, combine)


_of_this_thread = threading.local()


def here() -> ThreadWire | None:
    """Return the wire of this thread, if it is a rank."""
    return getattr(_of_this_thread, "wire", None)


def become(wire: ThreadWire) -> None:
    """Make this thread the rank of the wire."""
    _of_this_thread.wire = wire
