"""The wire of ranks that are threads of one process: their calls are paired by name.

The last rank to make a call computes the results of all. They are computed in the order of ranks, so that a sum has the
same bits in every run.
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


class CollectiveCall:
    """One call of all ranks under one name."""

    def __init__(self, name: str, kind: object) -> None:
        self.name = name
        self.kind = kind
        self.values: dict[int, Any] = {}
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
        self._calls: dict[str, CollectiveCall] = {}
        self._gone: dict[int, str] = {}
        self._signals: dict[int, SharedSignals] = {}

    def signals(self, number: int) -> SharedSignals:
        """Return the signals of the training with this number, the same object for all ranks."""
        with self._changed:
            return self._signals.setdefault(number, SharedSignals())

    def join(self, rank: int, name: str, kind: object, value: Any, combine: Combine) -> CollectiveCall:
        """Make this rank's part of the call of this name. ``kind`` must be the same on all ranks."""
        with self._changed:
            call = self._calls.setdefault(name, CollectiveCall(name, kind))
            if rank in call.values:
                raise HeteroError(f"{name!r} is under way already; wait for its result before using the name again")
            if kind != call.kind:
                call.error = f"the ranks do not agree on {name!r}: {call.kind} and, on rank {rank}, {kind}"
            call.values[rank] = value
            if len(call.values) == self.size:
                del self._calls[name]
                self._combine(call, combine)
        return call

    def _combine(self, call: CollectiveCall, combine: Combine) -> None:
        try:
            if not call.error:
                call.results = combine([call.values[rank] for rank in range(self.size)])
        except Exception as error:
            call.error = (
                f"the ranks' values for {call.name!r} do not fit together: {error}; give the same shapes and types"
            )
            raise
        finally:
            call.values = dict.fromkeys(call.values)  # let go of the values
            self._changed.notify_all()

    def is_over(self, call: CollectiveCall) -> bool:
        """Return whether all ranks have made the call."""
        return len(call.values) == self.size

    def result(self, rank: int, call: CollectiveCall) -> Any:
        """Wait until all ranks have made the call, and return this rank's part of the result."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(call) or self._missing(call))
        if not self.is_over(call):
            missing = self._missing(call)[0]
            raise PeerLostError(f"{call.name!r} waits for rank {missing}, which {self._gone[missing]}")
        if call.error:
            raise HeteroError(call.error)
        assert call.results is not None, "the call is over"
        return call.results[rank]

    def drop(self, rank: int, why: str) -> None:
        """Note that this rank makes no more calls, and why; those that wait for it raise."""
        with self._changed:
            self._gone[rank] = why
            self._changed.notify_all()

    def _missing(self, call: CollectiveCall) -> list[int]:
        return [rank for rank in self._gone if rank not in call.values]


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
            self._call("an object of one rank", name, obj, lambda of: [copy.deepcopy(of[root_rank]) for _ in of])
        )

    def allgather_object(self, obj: Any, name: str) -> Sequence[Any]:
        """Return every rank's object, in order of rank."""
        gathered: Sequence[Any] = self.result(
            self._call("an object of each rank", name, obj, lambda of: [copy.deepcopy(of) for _ in of])
        )
        return gathered

    def done(self, handle: CollectiveCall) -> bool:
        """Return whether the result is there."""
        return self.thread_group.is_over(handle)

    def result(self, handle: CollectiveCall) -> Any:
        """Return the result, once all ranks have come."""
        return self.thread_group.result(self.rank, handle)

    def wait(
        self,
        handle: CollectiveCall,
        expected_s: float = float("nan"),
        transfer_s: float = float("nan"),
        imminent: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result, once all ranks have come: a thread that waits needs no processor."""
        return self.result(handle)

    def new_group(self) -> Self:
        """Return this wire, whose calls are paired by name."""
        return self

    def _call(self, kind: object, name: str, value: Any, combine: Combine) -> CollectiveCall:
        return self.thread_group.join(self.rank, name, kind, value, combine)


_of_this_thread = threading.local()


def wire_of_this_thread() -> ThreadWire | None:
    """Return the wire of this thread, if it is a rank."""
    return getattr(_of_this_thread, "wire", None)


def set_wire_of_this_thread(wire: ThreadWire) -> None:
    """Make this thread the rank of the wire."""
    _of_this_thread.wire = wire
