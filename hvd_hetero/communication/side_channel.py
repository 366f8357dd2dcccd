"""Packets between ranks besides collectives: a rank has finished a round, where it is, why it ends.

A packet is a header, a body and a tag,

    header = version, kind, sender, training, nonce        tag = M_K(receiver, header, body)

with K the key that all ranks of a membership share, and M_K a keyed BLAKE2b of 24 bytes. A packet that fails a check is
dropped without an answer, after some microseconds. An answer repeats the fresh nonce of its question.
Packets are not encrypted: an eavesdropper learns names and lines of the program.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from hashlib import blake2b
from multiprocessing.connection import wait

from hvd_hetero.communication.addresses import Address, Directory

# Of a packet's body; with header and tag it passes every network in one piece.
_BODY_BYTES = 1000
_VERSION = b"hvW\x03"
_HEADER = struct.Struct("!4sIIQ16s")
_RECEIVER = struct.Struct("!I")
_TAG = struct.Struct("24s")
_PERSON = b"hvd-hetero/who/1"


class Kind(IntEnum):
    """Purpose of a packet.

    A question, its answer, the end of the job, the end of one rank by an exception, a rank that has finished a round.
    """

    WHERE = 1
    HERE = 2
    END = 3
    FAILED = 4
    FINISHED = 5


# Collectives cannot carry this: they end when every rank has come, so one stopped rank would block all answers, and a
# rank that computes receives nothing. An asynchronous allreduce that each rank posts beforehand is several times
# slower, and a dead rank blocks it (benchmarks/signals.py). A tree of TCP connections forwarded signals in fewer
# messages, and needed handshakes, reconnecting, and threads for both. UDP keeps nothing open.
class SideChannel:
    """One rank's end of the channel, which one thread listens to.

    ``answer()`` returns this rank's answer. ``on_end(kind, rank, text)`` is called when another rank announces an end.
    """

    def __init__(
        self,
        rank: int,
        training: int,
        directory: Directory,
        sockets: Sequence[socket.socket],
        answer: Callable[[], bytes],
        on_end: Callable[[Kind, int, str], None],
    ) -> None:
        self.answers: dict[int, bytes] = {}
        """Answers to the latest question, by rank."""
        self.answered: set[int] = set()
        """Ranks that have answered any question."""
        self._finished = self._others_finished = 0  # rounds, by this rank and by another one
        self._rank = rank
        self._training = training
        self._key = directory.key
        self._addresses = directory.addresses
        self._sockets = list(sockets)
        self._routes = [[(s, a) for a in addresses for s in sockets if _reaches(s, a)] for addresses in self._addresses]
        self._answer = answer
        self._on_end = on_end
        self._nonce = secrets.token_bytes(16)

    def ask(self) -> None:
        """Ask all others where they are; ``listen`` brings the answers."""
        self._nonce = secrets.token_bytes(16)
        self.answers = {}
        self.ask_again()

    def ask_again(self) -> None:
        """Ask the ranks that have not answered again, because packets may be lost."""
        for rank in range(len(self._addresses)):
            if rank != self._rank and rank not in self.answers:
                self._send(rank, Kind.WHERE, b"")

    def announce(self, kind: Kind, text: str) -> None:
        """Announce something to all others: that the job ends, or this rank does, and why, or a finished round."""
        for rank in range(len(self._addresses)):
            if rank != self._rank:
                self._send(rank, kind, text.encode()[:_BODY_BYTES])

    def raise_signal(self, round: int) -> None:
        """Signal to the others that this rank has finished the round, unless one has before. Waits for nothing."""
        # Sent once. The ranks that miss a lost signal do all of their micro-batches, which costs time and nothing else.
        if not self.raised(round):
            self._finished = round + 1
            self.announce(Kind.FINISHED, str(round + 1))

    def raised(self, round: int) -> bool:
        """Return whether any rank has finished the round, or a later one: none begins that before all have ended it."""
        return max(self._finished, self._others_finished) > round

    def listen(self, seconds: float) -> None:
        """Wait at most ``seconds`` for packets, and serve those that come."""
        ready = wait(self._sockets, max(0.0, seconds))
        for sock in self._sockets:
            if sock in ready:
                with suppress(OSError):  # such as the notice that no process listens where a packet went
                    packet, address = sock.recvfrom(_HEADER.size + _BODY_BYTES + _TAG.size)
                    self._serve(sock, packet, address[:2])

    def wake(self) -> None:
        """End a `listen` of another thread, by an empty packet."""
        with suppress(OSError):  # closed meanwhile: then no one listens
            self._sockets[0].sendto(b"", self._sockets[0].getsockname())

    def close(self) -> None:
        """Close the sockets; other ranks get no answer from now on."""
        for sock in self._sockets:
            sock.close()

    def _serve(self, sock: socket.socket, packet: bytes, address: Address) -> None:
        head, body, tag = packet[: _HEADER.size], packet[_HEADER.size : -_TAG.size], packet[-_TAG.size :]
        if len(packet) < _HEADER.size + _TAG.size or not hmac.compare_digest(tag, self._tag(self._rank, head, body)):
            return
        version, kind, sender, training, nonce = _HEADER.unpack(head)
        if version != _VERSION or training != self._training or not 0 <= sender < len(self._addresses):
            return
        # Only to addresses that the sender gave through the job's own collective: replaying a question gains nothing.
        if kind == Kind.WHERE and address in self._addresses[sender]:
            sock.sendto(self._seal(sender, Kind.HERE, nonce, self._answer()[:_BODY_BYTES]), address)
        elif kind == Kind.HERE and nonce == self._nonce:
            self.answers[sender] = body
            self.answered.add(sender)
        elif kind == Kind.FINISHED:
            self._others_finished = max(self._others_finished, int(body))
        elif kind in (Kind.END, Kind.FAILED):
            self._on_end(Kind(kind), sender, body.decode(errors="replace"))

    def _send(self, rank: int, kind: Kind, body: bytes) -> None:
        packet = self._seal(rank, kind, self._nonce, body)
        for sock, address in self._routes[rank]:
            with suppress(OSError):  # no way there, or no listener; another address may work
                sock.sendto(packet, address)

    def _seal(self, receiver: int, kind: Kind, nonce: bytes, body: bytes) -> bytes:
        head = _HEADER.pack(_VERSION, kind, self._rank, self._training, nonce)
        return head + body + self._tag(receiver, head, body)

    def _tag(self, receiver: int, head: bytes, body: bytes) -> bytes:
        text = _RECEIVER.pack(receiver) + head + body
        return blake2b(text, key=self._key, digest_size=_TAG.size, person=_PERSON).digest()


def _reaches(sock: socket.socket, address: Address) -> bool:
    own = ipaddress.ip_address(sock.getsockname()[0])
    other = ipaddress.ip_address(address[0])
    return own.version == other.version and own.is_loopback == other.is_loopback
