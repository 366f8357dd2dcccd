"""The one thread of a channel: it keeps the connections and passes on what is new. Asleep unless something happens.

A thread that is to wake needs a core and the interpreter's lock, which a rank that computes has both. So whoever tells
or looks does what can be done at once by itself (`Loop.tell`, `Loop.hear`), and the thread all the rest.

What a connection may cost is bounded: one frame not yet written, less than one frame not yet understood. A peer that
does not read is not written to; when it reads again it gets the newest state, as nothing is queued for it.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from hvd_hetero.communication.signals.addresses import Address
from hvd_hetero.communication.signals.board import Board
from hvd_hetero.communication.signals.connection import Call, Connection
from hvd_hetero.communication.signals.frames import Identity, RefusedError, Session
from hvd_hetero.communication.signals.limits import Limits

__all__ = ["Loop"]

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 8  # then others get their turn
_FAILED = "rank %d: the signal channel failed; rounds now end when every rank is done"
_PAUSE_S = 1.0  # of a listener, when the process has no descriptor left for another connection


class Loop:
    """What the thread runs. Others may call `tell`, `hear`, `wake`, `stop`, and read what has no underscore."""

    def __init__(
        self,
        board: Board,
        us: Identity,
        listeners: Sequence[socket.socket],
        calls: Mapping[int, tuple[Address, ...]],
        called_by: Set[int],
        limits: Limits,
    ) -> None:
        self.linked: frozenset[int] = frozenset()
        self.complete = threading.Event()
        self.refused = 0  # connections that were closed because of what came, or did not come, over them
        self._board = board
        self._us = us
        self._listeners = list(listeners)
        self._calls = {peer: Call(addresses) for peer, addresses in calls.items()}
        self._called_by = frozenset(called_by)
        self._limits = limits
        self._links: dict[int, Connection] = {}  # authenticated, by rank
        self._unproven: dict[Connection, None] = {}  # the others, oldest first
        self._spread = 0
        self._busy = threading.Lock()  # held by whoever uses the connections
        self._stopping = False
        self._listen_again_s = math.inf
        self._selector = selectors.DefaultSelector()
        # A pipe wakes in half the time of a pair of sockets. As files: closing twice, or writing after it, is harmless.
        reads, writes = os.pipe()
        self._woken, self._waker = open(reads, "rb", buffering=0), open(writes, "wb", buffering=0)  # noqa: SIM115
        for end in (reads, writes):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen()

    def tell(self) -> None:
        """Spread what is new on the board, at once if nobody else uses the connections."""
        if not self._at_once(self._spread_news):
            self.wake()  # who does may have looked at the board already

    def hear(self) -> None:
        """Put on the board what has come, unless somebody else uses the connections, who does or will have it done."""
        self._at_once(self._read)

    def _at_once(self, work: Callable[[], None]) -> bool:
        """Do it in the calling thread, and return whether it could: not if somebody else uses the connections.

        Any trouble ends the signals, for a connection may be in the middle of something. It is logged, and an interrupt
        raised again.
        """
        held = False
        try:
            if held := self._busy.acquire(blocking=False):
                work()
        except BaseException as trouble:
            self._spread = 0  # perhaps not to all: have the thread do it again
            self.stop()
            log.exception(_FAILED, self._us.rank)
            if not isinstance(trouble, Exception):
                raise
        finally:
            if held:
                self._busy.release()
        return held

    def wake(self) -> None:
        """Have the thread look at the board."""
        with suppress(OSError, ValueError):  # closed: there is nobody to tell any more. Full: it will wake anyway
            self._waker.write(b"\0")

    def stop(self) -> None:
        """Have the thread say what is still to be said, close everything and end."""
        self._stopping = True
        self.wake()

    def abandon(self) -> None:
        """At the end, or in a forked child: close our copies of the descriptors, and be connected to nobody.

        What they refer to is left as it is, and nothing is unregistered, since parent and child share one epoll set.
        """
        connections = [*self._links.values(), *self._unproven]
        self._links.clear()  # nobody is to be told or heard any more
        self.linked = frozenset()
        self.complete = threading.Event()  # a fork may have come while the old one's lock was taken
        for connection in connections:
            connection.sock.close()
        for listener in self._listeners:
            listener.close()
        for end in (self._woken, self._waker):
            end.close()
        self._selector.close()

    def run(self) -> None:
        """Until `stop`. Trouble in here ends the signals, with a line in the log, and never the training."""
        try:
            while not self._stopping:
                happened = self._selector.select(self._sleep_s())
                with self._busy:
                    for key, events in happened:
                        if isinstance(key.data, Connection):
                            self._serve(key.data, events)
                        elif key.fileobj is self._woken:
                            self._woken.read(4096)
                        else:
                            assert isinstance(key.fileobj, socket.socket)
                            self._accept(key.fileobj)
                    self._spread_news()
                    self._look_at_the_clock()
                    self._note_completeness()
            with self._busy:
                self._spread_news()  # of what was raised just before `stop`
        except Exception:
            log.exception(_FAILED, self._us.rank)
        finally:
            with self._busy:
                self._stopping = True
                self.abandon()

    def _read(self) -> None:
        if not self._stopping:
            for key, _ in self._selector.select(0):  # one call, however many neighbours there are
                if isinstance(key.data, Connection) and key.data.session.authenticated:
                    self._serve(key.data, selectors.EVENT_READ)
            self._spread_news()

    def _spread_news(self) -> None:
        rounds = max(self._board.own, self._board.heard)
        if rounds > self._spread:
            self._spread = rounds
            for connection in list(self._links.values()):
                self._write(connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if connection.closed:  # after the selector had named it
            return
        if events & selectors.EVENT_READ:
            try:
                if not connection.read():
                    self._drop(connection)
                    return
            except OSError:
                self._drop(connection)
                return
            except RefusedError as refusal:
                self._refuse(connection, str(refusal))
                return
            if connection.session.heard > self._board.heard:
                self._board.heard = connection.session.heard
            if connection.session.authenticated and connection in self._unproven:
                self._link(connection)
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        try:
            blocked = connection.write(self._spread)
        except OSError:
            self._drop(connection)
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
        if interest != connection.interest:
            connection.interest = interest
            self._selector.modify(connection.sock, interest, connection)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: the listener would stay readable, and we busy
                log.warning("rank %d: the signal channel cannot accept connections now: %s", self._us.rank, error)
                for each in self._listeners:
                    self._selector.unregister(each)
                self._listen_again_s = time.monotonic() + _PAUSE_S
                return
            strangers = [c for c in self._unproven if not c.outgoing]
            if len(strangers) >= self._limits.strangers:
                self._refuse(strangers[0], "too many connections that do not say who they are")
            session = Session(self._us, called_by=self._called_by)
            self._begin(Connection(sock, session, outgoing=False))

    def _listen(self) -> None:
        self._listen_again_s = math.inf
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _begin(self, connection: Connection) -> None:
        connection.deadline_s = time.monotonic() + self._limits.handshake_s
        self._unproven[connection] = None
        # An outgoing connection is writable once it stands; what it then writes or fails to write shows if it does.
        connection.interest = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
        self._selector.register(connection.sock, connection.interest, connection)

    def _link(self, connection: Connection) -> None:
        peer = connection.session.peer
        assert peer is not None
        del self._unproven[connection]
        former = self._links.get(peer)
        self._links[peer] = connection  # the newest: the peer called again because it lost the former
        if former is not None:
            self._close(former)
        if peer in self._calls:
            self._calls[peer].reached()
        self._note_links()

    def _refuse(self, connection: Connection, why: str) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "rank %d: the signal channel closed a connection (%s); it goes on, and will only count further ones",
                self._us.rank, why,
            )  # fmt: skip
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection; if we made it, have the thread make it again later."""
        self._close(connection)
        self._unproven.pop(connection, None)
        peer = connection.session.peer
        if peer is not None and self._links.get(peer) is connection:
            del self._links[peer]
            self._note_links()
        if connection.outgoing and peer is not None:
            self._calls[peer].failed(time.monotonic(), self._limits)
        self.wake()

    def _close(self, connection: Connection) -> None:
        connection.closed = True
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _note_links(self) -> None:
        self.linked = frozenset(self._links)

    def _note_completeness(self) -> None:
        """In the thread alone, for who waits has the lock of the event, and signal handlers may look meanwhile."""
        if self.linked == self._called_by | self._calls.keys():
            self.complete.set()
        else:
            self.complete.clear()

    def _sleep_s(self) -> float | None:
        times = [connection.deadline_s for connection in self._unproven]
        times += [call.due_s for call in self._calls.values()]
        soonest_s = min(times, default=math.inf)
        soonest_s = min(soonest_s, self._listen_again_s)
        return None if soonest_s == math.inf else max(0.0, soonest_s - time.monotonic())

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        for connection in [c for c in self._unproven if c.deadline_s <= now_s]:
            if connection.outgoing:
                self._drop(connection)
            else:
                self._refuse(connection, "it did not say who it is in time")
        for peer, call in self._calls.items():
            if call.due_s <= now_s:
                try:
                    sock = call.dial()
                except OSError as error:
                    log.debug("rank %d: rank %d cannot be called: %s", self._us.rank, peer, error)
                    call.failed(now_s, self._limits)
                else:
                    self._begin(Connection(sock, Session(self._us, calls=peer), outgoing=True))
        if self._listen_again_s <= now_s:
            self._listen()
