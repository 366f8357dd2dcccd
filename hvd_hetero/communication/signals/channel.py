"""The channel as its users see it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from hvd_hetero.communication.signals.addresses import exchange_directory, job_key, listen
from hvd_hetero.communication.signals.board import Board
from hvd_hetero.communication.signals.frames import MAX_ROUNDS, Identity
from hvd_hetero.communication.signals.limits import Limits
from hvd_hetero.communication.signals.loop import Loop
from hvd_hetero.communication.signals.neighbours import neighbours
from hvd_hetero.errors import HeteroError

__all__ = ["SignalChannel"]

_LONGEST_CLOSE_S = 5.0


class SignalChannel:
    """Tells the ranks, while they compute, that one of them has finished its round.

        channel = SignalChannel(rank, size, allgather_of_one_object)    # on every rank, at the same point
        ...
        if done: channel.raise_signal(round)       # returns at once
        if channel.raised(round): stop             # some microseconds; at every micro-batch boundary

    One channel serves one membership: after a reset make a new one with the next ``generation``, and close the old one
    (before or after). Nothing of one channel can be heard in another.

    Within a channel, rounds are numbered upwards. The ranks pass on the number of the latest round that has been
    raised, and ``raised(r)`` is true once that is r or a later one. That loses nothing: nobody begins round r + 1
    before all have ended r, so wherever somebody has finished a later round, r is over.

    How soon: a fraction of a millisecond, since who tells sends and who looks receives, without a thread that would
    have to wake first. A thread is waited for where it is in the middle of its work, or where its rank has to pass the
    signal on (more than a few ranks are not all neighbours) and does not look: it needs a core, and the interpreter's
    lock, which a rank busy in plain Python yields once in `sys.getswitchinterval`, 5 ms by default. Rejected: one
    pre-posted asynchronous allreduce per rank (torch only, several times slower; it costs each round some collectives,
    and a dead rank blocks it). `benchmarks/signals.py` has the figures.

    The signal is advice and not agreement: two ranks may hear of it a micro-batch apart, or never, when the network
    fails; what each has done is for the synchronisation to say. What fails in here costs time, and never an answer.

    Threads: `raised` from any, `raise_signal` from one at a time. Processes: a forked child (a loader's worker) drops
    its copies of the sockets, hears nothing more and may not raise; a fork by other means than `os.fork` (from C) keeps
    them open, and a dead rank's connections then close only with that child. With one rank there is no thread and no
    socket.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[bytes], Sequence[bytes]],
        *,
        generation: int = 0,
        addresses: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """Listen, exchange addresses and key, and connect in the background.

        ``exchange(payload)`` returns every rank's payload in order of rank (an allgather), called once. ``addresses``
        are names or addresses of this host by which the others reach it, the best first; without any, it is those of
        the interface that Horovod uses, or what this host's name resolves to. ``generation`` numbers the membership,
        the same on all ranks.
        """
        if not (isinstance(size, int) and size >= 1):
            raise ValueError(f"size must be a positive whole number of ranks, got {size!r}")
        if not (isinstance(rank, int) and 0 <= rank < size):
            raise ValueError(f"rank must be a whole number from 0 to {size - 1} (size is {size}), got {rank!r}")
        if not (isinstance(generation, int) and 0 <= generation < 2**64):
            raise ValueError(f"generation must be a whole number from 0 to 2^64 - 1, got {generation!r}")
        if isinstance(addresses, str):
            raise TypeError(f"addresses must be a sequence of names, got a string; write [{addresses!r}]")
        self.neighbours = neighbours(rank, size)
        self._board = Board()
        self._closed = False
        self._pid = os.getpid()
        self._loop: Loop | None = None
        if size == 1:
            return
        listeners, troubles = listen(addresses)
        try:
            directory = exchange_directory(rank, size, generation, listeners, troubles, exchange, job_key())
            # Of two neighbours the lower rank calls: the higher one must know whom to expect, and only one may.
            self._loop = Loop(
                self._board,
                Identity(rank, generation, directory.key),
                listeners,
                calls={peer: directory.addresses[peer] for peer in self.neighbours if peer > rank},
                called_by={peer for peer in self.neighbours if peer < rank},
                limits=limits or Limits(),
            )
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        thread = threading.Thread(target=self._loop.run, name=f"hvd-hetero-signals-{rank}", daemon=True)
        thread.start()
        _living.add(self._loop)
        # The thread holds the loop and not us, so a channel that is dropped, or open at exit, is closed like any other.
        self._finalizer = weakref.finalize(self, _end, self._loop, thread)

    def raise_signal(self, round: int) -> None:
        """Say that this rank has finished ``round``, to all that are still in it. Does not wait for anything."""
        if not (isinstance(round, int) and 0 <= round < MAX_ROUNDS):
            raise ValueError(f"round must be a whole number from 0 to 2^64 - 2, got {round!r}")
        if self._closed:
            raise HeteroError(f"signal for round {round}: this channel is closed; make one for the new membership")
        if self._pid != os.getpid():
            raise HeteroError(f"signal for round {round}: this is a fork of the process that made the channel")
        if round >= self._board.own:
            self._board.own = round + 1
            if self._loop is not None and round >= self._board.heard:
                self._loop.tell()

    def raised(self, round: int) -> bool:
        """Whether any rank, this one included, has raised the signal for ``round`` or a later one."""
        board = self._board
        if board.heard <= round and board.own <= round and self._loop is not None and self._pid == os.getpid():
            self._loop.hear()
        return board.heard > round or board.own > round

    @property
    def connected(self) -> frozenset[int]:
        """The neighbours that are connected now; in a fork of the process none is."""
        return frozenset() if self._loop is None else self._loop.linked

    @property
    def refused(self) -> int:
        """How many connections were closed because what came over them was not right, or did not come in time."""
        return 0 if self._loop is None else self._loop.refused

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until every neighbour is connected. Nobody has to: what is raised before reaches them afterwards."""
        return self._loop is None or self._loop.complete.wait(timeout_s)

    def close(self) -> None:
        """End the thread and close all connections. What was raised before is sent first, as far as it can be."""
        self._closed = True
        if self._loop is not None:
            self._finalizer()

    def __enter__(self) -> SignalChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(loop: Loop, thread: threading.Thread) -> None:
    loop.stop()
    if thread is not threading.current_thread():  # the collector may find a dropped channel in its own thread
        thread.join(_LONGEST_CLOSE_S)


_living: weakref.WeakSet[Loop] = weakref.WeakSet()


def _abandon_all() -> None:
    for loop in list(_living):
        loop.abandon()


os.register_at_fork(after_in_child=_abandon_all)
