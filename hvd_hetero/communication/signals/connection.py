"""A socket with its session, and the calls that make one."""

from __future__ import annotations

import errno
import logging
import math
import socket

from hvd_hetero.communication.signals.addresses import Address
from hvd_hetero.communication.signals.frames import Session
from hvd_hetero.communication.signals.limits import Limits

__all__ = ["Call", "Connection"]

log = logging.getLogger(__name__)

_READ_BYTES = 4096
_VAIN_PASSES = 8  # over a peer's addresses, before it is said that it cannot be reached: some seconds by default


class Connection:
    """Moves bytes between a socket that never blocks and a session."""

    __slots__ = ("_unsent", "closed", "deadline_s", "interest", "outgoing", "session", "sock")

    def __init__(self, sock: socket.socket, session: Session, *, outgoing: bool) -> None:
        self.sock = sock
        self.session = session
        self.outgoing = outgoing
        self.interest = 0  # what the selector watches it for
        self.deadline_s = math.inf
        self.closed = False
        self._unsent = b""
        prepare(sock)

    def read(self) -> bool:
        """Once; False at the end of the stream. Raises `RefusedError` for what no right peer would send."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        self.session.read(data)
        return bool(data)

    def write(self, rounds: int) -> bool:
        """Say what is to be said; whether the socket takes no more of it now."""
        while True:
            if not self._unsent:
                frame = self.session.next_frame(rounds)
                if frame is None:
                    return False
                self._unsent = frame
            try:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except BlockingIOError:
                return True


def prepare(sock: socket.socket) -> None:
    """Never block, send at once, and notice some day that the other machine is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Call:
    """When to try which address of a peer."""

    __slots__ = ("_addresses", "_first", "_tries", "due_s")

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses
        self._first = 0  # the address to begin with
        self._tries = 0  # since it was last reached
        self.due_s = -math.inf if addresses else math.inf

    def dial(self) -> socket.socket:
        """Begin to connect to the next address."""
        address = self._addresses[(self._first + self._tries) % len(self._addresses)]
        self._tries += 1
        self.due_s = math.inf
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, f"{address}: {errno.errorcode.get(code, code)}")
        except BaseException:
            sock.close()
            raise
        return sock

    def reached(self) -> None:
        """The peer is there: when it is lost, begin again with the address that was right."""
        self._first += self._tries - 1
        self._tries = 0

    def failed(self, now_s: float, limits: Limits) -> None:
        """Try the next address, at once within a pass over all, after a while that doubles between passes."""
        passes, rest = divmod(self._tries, len(self._addresses))
        pause_s = min(limits.first_retry_s * 2.0 ** min(passes, 30), limits.last_retry_s) if rest == 0 else 0.0
        self.due_s = now_s + pause_s
        if rest == 0 and passes == _VAIN_PASSES:
            log.warning("a rank that should be at %s cannot be reached for signals", self._addresses)
