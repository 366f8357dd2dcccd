"""One bit a round, by which the first rank to finish a non-blocking round stops the others.

The ranks form a tree: rank i is connected to its parent, rank (i - 1) // 8, and to at most eight children. Each rank
passes what is new on to all its neighbours but the one it came from: two hops at most among nine ranks, eight among
4,000. A message is the number of rounds that are over. It only grows, so a message may come late, twice, or not at
all: the next one replaces it.

Connections are `multiprocessing.connection`'s: both ends prove that they hold the membership's key, then
exchange bytes. Nothing is unpickled. Its ``Listener`` and ``Client`` are not used: they know no time limit and no IPv6.
A rank listens only until all its children are there. The death of an inner rank cuts the tree in two, but in Horovod
any death ends the membership. An asynchronous allreduce, posted by each rank beforehand, is several times slower, and a
dead rank blocks it (`benchmarks/signals.py`).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Pipe, answer_challenge, deliver_challenge, wait

from hvd_hetero.communication.addresses import Directory, gather_directory, job_key, listen
from hvd_hetero.errors import HeteroError

__all__ = ["SignalChannel"]

log = logging.getLogger(__name__)

_CHILDREN = 8  # arbitrary
_ROUNDS = struct.Struct("!Q")
_NOTHING_NEW = _ROUNDS.pack(0)
_GOODBYE = b""
_AND_NOW = "rounds may now end only when every rank is done"
_TROUBLES = (OSError, EOFError, AuthenticationError, AssertionError, ValueError)  # what a handshake may raise

# All arbitrary, with room on both sides: a handshake takes a millisecond on most networks.
_CONNECT_S = 5.0
_READ_S = 10  # for the rest of a message that has begun, and for each answer in a handshake
_WRITE_US = 10_000  # into a connection whose buffer is full, because the peer has not read for thousands of rounds
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between calls to the parent
_MOST_STRANGERS = 64  # connections at a time that have not yet proved to hold the key
_LONGEST_CLOSE_S = 5.0


class SignalChannel:
    """One rank's end of the channel on which ranks that compute hear that one of them has finished its round.

        channel = SignalChannel(rank, size, allgather_of_one_object)    # on every rank, at the same point
        ...
        if done: channel.raise_signal(round)       # returns at once
        if channel.raised(round): stop             # at every micro-batch boundary

    One channel serves one membership: after a reset make a new one, and close the old one (before or after). Each has
    its own key, so no message of one channel is heard in another.

    Within a channel, rounds are numbered upwards. ``raised(r)`` is true once r or a later round has been raised. That
    loses nothing: no rank begins round r + 1 before all have ended r.

    The signal is advice and not agreement: two ranks may hear of it a micro-batch apart, or never, when a connection
    fails. Then rounds end when all ranks are done; the synchronisation says what each has done.

    ``raised`` may be called from any thread, ``raise_signal`` from one at a time. A forked child hears nothing more and
    may not raise. A single rank has no thread and no socket.
    """

    def __init__(self, rank: int, size: int, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Listen, gather addresses and key, and connect in the background.

        ``gather(payload)`` returns every rank's payload in order of rank (an allgather). It is called once.
        """
        self._own = 0
        self._closed = False
        self._pid = os.getpid()
        self._relay: _Relay | None = None
        if size == 1:
            return
        listeners, troubles = listen()
        try:
            directory = gather_directory(rank, size, listeners, troubles, gather, job_key())
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._relay = _Relay(rank, size, listeners, directory)
        thread = threading.Thread(target=self._relay.run, name=f"hvd-hetero-signals-{rank}", daemon=True)
        thread.start()
        # The thread holds the relay and not us, so a channel that is dropped, or open at exit, is closed, too.
        self._finalizer = weakref.finalize(self, _end, self._relay, thread, self._pid)

    def raise_signal(self, round: int) -> None:
        """Send all ranks that this one has finished ``round``. Does not wait for anything."""
        if self._closed:
            raise HeteroError(f"signal for round {round}: this channel is closed; make one for the new membership")
        if self._pid != os.getpid():
            raise HeteroError(f"signal for round {round}: this is a fork of the process that made the channel")
        if not self.raised(round) and self._relay is not None:
            self._relay.tell(_ROUNDS.pack(round + 1))
        self._own = max(self._own, round + 1)

    def raised(self, round: int) -> bool:
        """Return whether any rank, this one included, has raised the signal for ``round`` or a later one."""
        relay = self._relay
        return self._own > round or (relay is not None and relay.rounds > round)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until every neighbour is connected. No rank has to: earlier signals reach them afterwards."""
        return self._relay is None or self._relay.complete.wait(timeout_s)

    def close(self) -> None:
        """End the thread and close all connections. Signals raised before are sent first."""
        self._closed = True
        if self._relay is not None:
            self._finalizer()
            self._own = max(self._own, self._relay.rounds)
            self._relay = None  # and with it the last descriptor, which no thread may close while another one writes


class _Relay:
    """One rank's node of the tree: a thread that holds its connections and passes on news.

    Every event is something to read. This rank's own signals, its last word, and the news that a handshake
    has succeeded come through a pipe, as if from one more neighbour. So only one thread uses the connections, asleep
    until there is something to read.
    """

    def __init__(self, rank: int, size: int, listeners: Sequence[socket.socket], directory: Directory) -> None:
        self.rounds = 0
        self.complete = threading.Event()
        self._rank = rank
        self._key = directory.key
        self._parent = directory.addresses[(rank - 1) // _CHILDREN] if rank > 0 else ()
        self._children_to_come = max(0, min(_CHILDREN, size - 1 - _CHILDREN * rank))
        self._listeners = list(listeners)
        self._strangers: list[socket.socket] = []  # have called, and not yet proved to hold the key; oldest first
        self._admitted: list[Connection] = []  # have just proved it
        self._upwards: Connection | None = None
        self._links: list[Connection] = []
        self._told, self._tell = Pipe(duplex=False)
        os.set_blocking(self._tell.fileno(), False)
        self._leaving = threading.Event()
        self._said: set[str] = set()

    def tell(self, message: bytes) -> None:
        """Have the thread take ``message`` as if it came from a neighbour."""
        with suppress(OSError):  # the thread has ended, or has so much to read that it will wake anyway
            self._tell.send_bytes(message)

    def run(self) -> None:
        """Serve until this rank says goodbye. Trouble ends the signals, with a line in the log, never the training."""
        try:
            if self._parent:
                self._start(self._call_parent)
            while not self._leaving.is_set():
                self._welcome()
                for ready in wait([self._told, *self._links, *self._listeners]):
                    if isinstance(ready, socket.socket):
                        self._accept(ready)
                    else:
                        assert isinstance(ready, Connection)
                        self._hear(ready)
            self._welcome()  # ranks admitted by now hear it, too
            for link in list(self._links):
                self._send(link, _GOODBYE)
        except Exception:
            log.exception("rank %d: the signal channel failed; %s", self._rank, _AND_NOW)
        finally:
            self._leaving.set()
            self._stop_listening()
            for link in (self._told, *self._links):
                link.close()

    def _hear(self, speaker: Connection) -> None:
        if speaker.closed:  # a moment ago, because it was full
            return
        try:
            message = speaker.recv_bytes(_ROUNDS.size)
            (rounds,) = _ROUNDS.unpack(message or _NOTHING_NEW)
        except (OSError, EOFError, struct.error) as error:
            self._lose(speaker, error)
            return
        if message == _GOODBYE and speaker is self._told:
            self._leaving.set()
        elif message == _GOODBYE:
            self._drop(speaker)
        elif rounds > self.rounds:
            self.rounds = rounds
            for link in list(self._links):
                if link is not speaker:
                    self._send(link, message)

    def _send(self, link: Connection, message: bytes) -> None:
        try:
            with suppress(ConnectionError):  # reading will say whether the neighbour has left or is lost
                link.send_bytes(message)
        except OSError as error:
            self._lose(link, error)

    def _lose(self, link: Connection, why: Exception) -> None:
        """Drop a neighbour that has not said goodbye. A child calls again: its parent may never have admitted it."""
        self._warn(f"lost a connection; {_AND_NOW}", repr(why))
        self._drop(link)
        if link is self._upwards:
            self._start(self._call_parent, _FIRST_PAUSE_S)  # a parent may turn it away again and again
        else:
            self._children_to_come += 1

    def _drop(self, link: Connection) -> None:
        self._links.remove(link)
        link.close()

    def _welcome(self) -> None:
        """Take the connections whose handshakes have succeeded, and send them what they have missed."""
        while self._admitted:
            link = self._admitted.pop()
            self._links.append(link)
            self._children_to_come -= link is not self._upwards
            if self.rounds > 0:
                self._send(link, _ROUNDS.pack(self.rounds))
        if not self._children_to_come:
            self._stop_listening()
            if self._upwards or not self._parent:
                self.complete.set()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        while self._strangers:
            self._turn_away_the_oldest()

    def _accept(self, listener: socket.socket) -> None:
        try:
            stranger, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        if len(self._strangers) >= _MOST_STRANGERS:  # silent ones keep no child out, as a child speaks at once
            self._turn_away_the_oldest()
        self._strangers.append(stranger)
        self._start(self._meet, stranger)

    def _turn_away_the_oldest(self) -> None:
        with suppress(IndexError, OSError):  # it has just gone by itself
            self._strangers.pop(0).shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads

    def _start(self, work: Callable[..., None], *given: object) -> None:
        threading.Thread(target=work, args=given, name=f"hvd-hetero-handshake-{self._rank}", daemon=True).start()

    def _meet(self, stranger: socket.socket) -> None:
        """Admit a child that holds the key, in a separate thread: a stranger that stalls holds up no child."""
        with stranger:
            try:
                link = self._shake_hands(stranger, deliver_challenge, answer_challenge)
                self._strangers.remove(stranger)  # a ValueError if it has been turned away meanwhile
            except _TROUBLES as error:
                self._warn("turned a connection away", repr(error))
                with suppress(ValueError):
                    self._strangers.remove(stranger)
            else:
                self._admit(link)

    def _call_parent(self, pause_s: float = 0.0) -> None:
        """Call until the parent answers: it may have been stopped, and listens as long as a child is missing."""
        while not self._leaving.wait(pause_s):
            for address in self._parent:
                if self._leaving.is_set():
                    return
                try:
                    with socket.create_connection(address, _CONNECT_S) as parent:
                        link = self._shake_hands(parent, answer_challenge, deliver_challenge)
                except _TROUBLES as error:
                    trouble = repr(error)
                else:
                    self._upwards = link
                    self._admit(link)
                    return
            self._warn(f"cannot reach its parent at {self._parent}, and goes on calling; {_AND_NOW}", trouble)
            pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def _shake_hands(self, sock: socket.socket, *steps: Callable[[Connection, bytes], None]) -> Connection:
        """Have both ends prove that they hold the key; the one that was called asks first."""
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _READ_S, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, _WRITE_US))
        link = Connection(os.dup(sock.fileno()))
        try:
            for step in steps:
                step(link, self._key)
        except BaseException:
            link.close()
            raise
        return link

    def _admit(self, link: Connection) -> None:
        self._admitted.append(link)
        self.tell(_NOTHING_NEW)

    def _warn(self, what: str, why: str) -> None:
        """Log each kind of trouble once, so that strangers cannot fill the log; connections that we end are none."""
        if what not in self._said and not self._leaving.is_set():
            self._said.add(what)
            log.warning("rank %d: the signal channel %s (%s)", self._rank, what, why)


def _end(relay: _Relay, thread: threading.Thread, pid: int) -> None:
    if pid != os.getpid():  # a fork shares the pipe, and has no such thread
        return
    relay.tell(_GOODBYE)
    if thread is not threading.current_thread():  # the collector may find a dropped channel in its own thread
        thread.join(_LONGEST_CLOSE_S)
