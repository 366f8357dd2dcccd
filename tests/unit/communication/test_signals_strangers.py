"""Nothing that others do at a signal channel's port changes anything: garbage, silence, replay, floods."""

import logging
import os
import random
import socket
import struct
import time
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError

import psutil
import pytest
from signal_groups import PATIENT_S, Group, Root, closed_by_peer, eventually

from hvd_hetero.communication import signals

MOST_GROWTH = 16 * 2**20  # bytes


def stranger(alone):
    """A connection that has not said anything yet."""
    return socket.create_connection(alone.address, PATIENT_S)


def garbage(chance):
    """Without end: noise, lengths that lie, and answers without the key."""
    makers = [
        lambda: chance.randbytes(chance.randrange(1, 700)),
        lambda: struct.pack("!i", chance.choice([-(2**31), -2, -1, 0, 8, 257, 2**31 - 1])) + chance.randbytes(20),
        lambda: struct.pack("!iQ", -1, chance.choice([0, 2**63])),
        lambda: struct.pack("!i", 16) + chance.randbytes(16),  # as an answer to the challenge
        lambda: struct.pack("!i", 31) + b"#CHALLENGE#" + chance.randbytes(20),
        lambda: struct.pack("!i", 9) + b"#WELCOME#",
        lambda: struct.pack("!i", 8) + struct.pack("!Q", 99),  # as a signal
    ]
    while True:
        yield chance.choice(makers)()


def test_garbage(caplog):
    """10,000 wrong messages on 2,000 connections: all closed, one line in the log, no memory lost."""
    chance = random.Random(6)
    with Root() as alone:
        messages = garbage(chance)
        before = psutil.Process().memory_info().rss
        for number in range(2000):
            with stranger(alone) as sock, suppress(ConnectionError):
                sock.sendall(b"".join(next(messages) for _ in range(5)))
                if number % 100 == 0:
                    assert closed_by_peer(sock)
        eventually(lambda: not alone.channel._relay._strangers)
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH
        assert not alone.channel.raised(0)
        assert not alone.channel.wait_connected(0)
        with alone.child() as child:
            alone.hears(child, round=3)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in said if "turned a connection away" in line]) == 1


def test_silent_strangers_keep_no_child_out():
    """No more than allowed are held, the oldest make room, and all are cut off once the children are there."""
    with Root() as alone, ExitStack() as stack:
        most = signals._MOST_STRANGERS
        silent = [stack.enter_context(stranger(alone)) for _ in range(most + 20)]
        for sock in silent[:20]:
            assert closed_by_peer(sock)
        assert len(alone.channel._relay._strangers) <= most
        with alone.child() as child:
            alone.hears(child, round=3)
            for sock in silent[20:]:
                assert closed_by_peer(sock)


def test_a_stranger_that_dribbles_holds_up_no_child():
    """A byte at a time of what could become an answer: the child that comes meanwhile is let in."""
    with Root() as alone, stranger(alone) as sock:
        for byte in struct.pack("!i", 16) + bytes(3):
            sock.sendall(bytes([byte]))
            time.sleep(0.01)
        began_s = time.monotonic()
        with alone.child() as child:
            alone.hears(child, round=3)
        assert time.monotonic() - began_s < signals._READ_S / 2


def test_silent_strangers_are_turned_away_in_time(monkeypatch):
    """Even where the last child never comes."""
    monkeypatch.setattr(signals, "_READ_S", 1)
    with Root() as alone, stranger(alone) as sock:
        assert closed_by_peer(sock)
        eventually(lambda: not alone.channel._relay._strangers)


def test_nothing_listens_once_all_children_are_there():
    """Neither the ranks with children nor those without."""
    with Root() as alone, alone.child() as child:
        alone.hears(child, round=3)
        with pytest.raises(ConnectionRefusedError):
            alone.child()
    with Group(3) as group:
        group.works()
        assert not any(channel._relay._listeners for channel in group)


@pytest.mark.parametrize("key", [bytes(32), b"another membership's, or none".ljust(32)])
def test_who_has_another_key_is_turned_away(key):
    """An old membership's above all."""
    with Root() as alone:
        with pytest.raises(AuthenticationError):
            alone.child(key)
        with alone.child() as child:
            alone.hears(child, round=3)


def test_old_membership_calling_the_new_ones_port():
    """A rank of the old membership that calls into the new one, with the old key, is turned away."""
    with Root() as old, Root() as new:
        with pytest.raises(AuthenticationError):
            new.child(old.key)
        with old.child() as child:
            old.hears(child, round=70)
        assert not new.channel.raised(0)


def test_recorded_connection_played_again():
    """All that a real child ever sent, played again on a new connection, changes nothing."""
    with Root(size=3) as alone:
        sent = []
        with alone.child_that(sent.append) as child:
            alone.hears(child, round=3)
        with stranger(alone) as sock, suppress(ConnectionError):
            sock.sendall(b"".join(sent).replace((4).to_bytes(8), (99).to_bytes(8)))
            assert closed_by_peer(sock)
        assert len(sent) >= 3
        assert not alone.channel.raised(50)


@pytest.mark.parametrize("message", [b"1234567", b"123456789", b"x" * 100_000])
def test_a_neighbour_that_says_what_is_no_number(caplog, message):
    """Its connection is closed, with one line in the log; the others work on."""
    with Root(size=3) as alone, alone.child() as child, alone.child() as other:
        alone.hears(child, round=3)
        with suppress(ConnectionError):
            other.send_bytes(message)
        eventually(lambda: "lost a connection" in caplog.text)
        alone.hears(child, round=6)
        assert not alone.channel.raised(100)
    assert caplog.text.count("lost a connection") == 1


def test_a_neighbour_that_dies_in_the_middle_of_a_message(caplog):
    """Half a message, then the end: the half is forgotten, the connection is gone, and the others signal on."""
    with Root(size=3) as alone, alone.child() as child:
        with alone.child() as other:
            assert alone.channel.wait_connected(PATIENT_S)
            os.write(other.fileno(), struct.pack("!i", 8) + b"1234")
        eventually(lambda: "lost a connection" in caplog.text)
        assert not alone.channel.raised(0)
        alone.hears(child, round=3)
