"""What travels on a connection: frames of one size, each authenticated, and the conversation of two ends.

Let K be the key that all ranks of this membership share, a → b a frame's direction, g the generation of the
membership, M_k a keyed BLAKE2b of 24 bytes. Every frame is 64 bytes: 24 of header, 16 of body, 24 of tag,

    header = version, kind, a, b, g            tag = M_k(header, body)

    HELLO    caller -> listener    body = N_c (random)                    k = K
    WELCOME  listener -> caller    body = N_l (random)                    k = M_K(N_c)
    SIGNAL   both ways             body = count, rounds ended             k = M_K(N_c, N_l)

The listener takes a caller for authenticated with its first SIGNAL and not before: a HELLO can be recorded and played
again, but who plays it lacks the key that answers the fresh N_l. Both nonces are in the session's key, so a frame of
another connection fails; K and g differ between memberships, so a frame of another membership fails; header and count
are under the tag, so a reflected, repeated or reordered frame fails. Whatever fails ends its connection, and the caller
makes a new one. A listener answers nothing to whoever cannot make a valid HELLO.

The state that is passed on is one number that only grows, the rounds ended so far, so frames may be lost with their
connection, repeated over several ways or overtaken: the next one says it all. Nothing is ever queued.

Not encrypted: an eavesdropper learns when rounds end. Whoever holds K is trusted.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Set
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

__all__ = ["FRAME_BYTES", "KEY_BYTES", "MAX_ROUNDS", "Identity", "Kind", "RefusedError", "Session", "seal"]

KEY_BYTES = 32
FRAME_BYTES = 64
MAX_ROUNDS = 2**64 - 1

_VERSION = b"hvS\x01"
_HEADER = struct.Struct("!4sIIIQ")
_BODY_BYTES = 16
_TAG_BYTES = 24
_SIGNAL = struct.Struct("!QQ")


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    WELCOME = 2
    SIGNAL = 3


class RefusedError(Exception):
    """A frame is not what the right peer would have sent next; its connection must end. Never leaves the package."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are: our rank, in which membership, and the key that proves it."""

    rank: int
    generation: int
    key: bytes


def _mac(key: bytes, text: bytes, size: int) -> bytes:
    return blake2b(text, key=key, digest_size=size, person=b"hvd-hetero/sig/1").digest()


def seal(key: bytes, kind: Kind, sender: int, receiver: int, generation: int, body: bytes) -> bytes:
    """A whole frame."""
    text = _HEADER.pack(_VERSION, kind, sender, receiver, generation) + body
    return text + _mac(key, text, _TAG_BYTES)


class Session:
    """One end of one connection, without its socket: bytes in, frames out, no clock."""

    def __init__(self, us: Identity, *, calls: int | None = None, called_by: Set[int] = frozenset()) -> None:
        """The end that calls rank ``calls``, or else the one that any rank in ``called_by`` may have called."""
        self.peer = calls
        self.authenticated = False
        self.heard = -1  # the highest number of ended rounds that the peer knows of; -1: it has not spoken yet
        self._us = us
        self._called_by = called_by
        self._unread = bytearray()
        self._greeting = b""
        self._nonces = b""
        self._key = us.key
        self._expected = Kind.HELLO
        self._told = -1
        self._frames_sent = 0
        self._frames_read = 0
        if calls is not None:
            self._greet(Kind.HELLO, calls)
            self._expected = Kind.WELCOME

    def read(self, data: bytes) -> None:
        """Take in what the connection brought, in any portions; raises `RefusedError`."""
        self._unread += data
        while len(self._unread) >= FRAME_BYTES:
            frame = bytes(self._unread[:FRAME_BYTES])
            del self._unread[:FRAME_BYTES]
            self._take(frame)

    def next_frame(self, rounds: int) -> bytes | None:
        """What is to be said now that ``rounds`` rounds have ended, if anything."""
        if self._greeting:
            frame, self._greeting = self._greeting, b""
            return frame
        if not self.authenticated or rounds <= max(self._told, self.heard):
            return None
        assert self.peer is not None
        body = _SIGNAL.pack(self._frames_sent, rounds)
        self._frames_sent += 1
        self._told = rounds
        return seal(self._key, Kind.SIGNAL, self._us.rank, self.peer, self._us.generation, body)

    def _take(self, frame: bytes) -> None:
        if self._expected is Kind.HELLO:
            sender = int.from_bytes(frame[8:12], "big")
            if sender not in self._called_by:
                raise RefusedError("not from a rank that would call us")
            self._nonces = self._open(frame, Kind.HELLO, sender)
            self.peer = sender
            self._greet(Kind.WELCOME, sender)
            self._expected = Kind.SIGNAL
            return
        assert self.peer is not None
        body = self._open(frame, self._expected, self.peer)
        if self._expected is Kind.WELCOME:
            self._nonces += body
            self._key = _mac(self._us.key, self._nonces, KEY_BYTES)
            self._expected = Kind.SIGNAL
        else:
            count, rounds = _SIGNAL.unpack(body)
            if count != self._frames_read:
                raise RefusedError("a frame was left out or came twice")
            self._frames_read += 1
            self.heard = max(self.heard, rounds)
        self.authenticated = True

    def _greet(self, kind: Kind, peer: int) -> None:
        """Prepare our half of the handshake, and turn to the key of what is to be read and said after it."""
        nonce = secrets.token_bytes(_BODY_BYTES)
        key = _mac(self._us.key, self._nonces, KEY_BYTES) if self._nonces else self._us.key
        self._greeting = seal(key, kind, self._us.rank, peer, self._us.generation, nonce)
        self._nonces += nonce
        self._key = _mac(self._us.key, self._nonces, KEY_BYTES)

    def _open(self, frame: bytes, kind: Kind, sender: int) -> bytes:
        """The body of a frame that is just as it should be."""
        text, tag = frame[:-_TAG_BYTES], frame[-_TAG_BYTES:]
        if text[: _HEADER.size] != _HEADER.pack(_VERSION, kind, sender, self._us.rank, self._us.generation):
            raise RefusedError("not the header that was expected")
        if not hmac.compare_digest(tag, _mac(self._key, text, _TAG_BYTES)):
            raise RefusedError("not authentic")
        return text[_HEADER.size :]
