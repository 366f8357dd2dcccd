"""Ten thousand wrong messages on a living channel's port, among connections that never speak and never read."""

import random
import socket
from contextlib import ExitStack, suppress

import psutil
from signal_groups import Group, eventually

from hvd_hetero.communication.signals import Limits
from hvd_hetero.communication.signals.frames import FRAME_BYTES, KEY_BYTES, Identity, Kind, Session, seal

MESSAGES, TOGETHER = 10_000, 5
READ_AT_ONCE = 4096
LIMITS = Limits(strangers=16)
MOST_GROWTH = 16 * 2**20  # bytes; what was sent is 3 MB, what may be held at a time some kB


def wrong_messages(chance, group):
    """Without end: noise, frames cut and changed, of another key, membership, receiver or sender."""
    recorded = Session(Identity(0, 0, group.key), calls=1).next_frame(0)

    def forged():
        key = chance.choice([chance.randbytes(KEY_BYTES), bytes(KEY_BYTES)])
        return seal(key, chance.choice(list(Kind)), chance.randrange(3), chance.randrange(3), 0, chance.randbytes(16))

    def changed():
        frame = bytearray(recorded)
        frame[chance.randrange(FRAME_BYTES)] ^= chance.randrange(1, 256)
        return bytes(frame)

    makers = [
        lambda: chance.randbytes(chance.randrange(1, 700)),
        lambda: recorded[: chance.randrange(1, FRAME_BYTES)] + chance.randbytes(FRAME_BYTES),
        lambda: Session(Identity(0, 3, group.key), calls=1).next_frame(9),  # a generation that is over
        lambda: Session(Identity(0, 0, group.key), calls=2).next_frame(9),  # meant for another rank
        lambda: Session(Identity(2, 0, group.key), calls=1).next_frame(9),  # from one that does not call
        forged,
        changed,
    ]
    while True:
        yield chance.choice(makers)()


def test_ten_thousand_wrong_messages_change_nothing_and_cost_no_memory():
    chance = random.Random(6)
    with Group(2, limits=LIMITS) as group, ExitStack() as stack:
        messages = wrong_messages(chance, group)
        silent = [stack.enter_context(group.stranger(1)) for _ in range(LIMITS.strangers // 2)]
        before = psutil.Process().memory_info().rss
        for sent in range(0, MESSAGES, TOGETHER):
            with group.stranger(1) as sock, suppress(ConnectionError):
                if sent % 50 == 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # and never reads
                sock.sendall(b"".join(next(messages) for _ in range(TOGETHER)))
            if sent % 1000 == 0:
                group.works(round=sent)
                strangers = list(group[1]._loop._unproven)
                assert len(strangers) <= LIMITS.strangers
                assert all(len(each.session._unread) < FRAME_BYTES + READ_AT_ONCE for each in strangers)
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH
        eventually(lambda: group[1].refused >= MESSAGES // TOGETHER // 2)
        assert not any(channel.raised(MESSAGES * 10) for channel in group)
        assert group[1].wait_connected(0), "the real neighbour was never put aside"
        group.works(round=MESSAGES + 1)
        for sock in silent:  # the oldest make room, and are told so: their end of the line is closed
            sock.settimeout(5)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass
