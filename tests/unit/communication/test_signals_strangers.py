"""Nothing that others do on a signal channel's port changes anything: garbage, silence, deafness, replay, floods."""

import logging
import random
import socket
import time
from contextlib import ExitStack, suppress

import pytest
from signal_groups import PATIENT_S, Group, closed_by_peer, eventually

from hvd_hetero.communication.signals import Limits
from hvd_hetero.communication.signals.connection import Connection
from hvd_hetero.communication.signals.frames import FRAME_BYTES, KEY_BYTES, Identity, Session

QUICK = Limits(handshake_s=1.0, strangers=4)  # than by default, and long enough for ranks on a busy machine


def test_old_membership_calling_the_new_ones_port():
    """A rank of the old membership that calls into the new one, with the old key or generation, is turned away."""
    with Group(2, generation=1) as old, Group(2, generation=2) as new:
        for key, generation in ((old.key, 1), (old.key, 2), (new.key, 1)):
            session = Session(Identity(0, generation, key), calls=1)
            with new.stranger(1) as sock:
                sock.sendall(session.next_frame(99))
                assert closed_by_peer(sock)
        eventually(lambda: new[1].refused == 3)
        assert not new[1].raised(0)
        new.works()


def test_recorded_connection_played_again():
    """All that a real caller ever sent, played again on a new connection, ends that one and changes nothing."""
    with Group(2) as group:
        session = Session(Identity(0, 0, group.key), calls=1)
        with group.stranger(1) as sock:
            sent = session.next_frame(0)
            sock.sendall(sent)
            session.read(sock.recv(FRAME_BYTES, socket.MSG_WAITALL))
            last = session.next_frame(3)
            sock.sendall(last)
            eventually(lambda: group[1].raised(2))
        with group.stranger(1) as sock:
            sock.sendall(sent + last)
            assert closed_by_peer(sock)
        assert group[1].refused == 1
        # The real rank 0, put aside by the first stranger, which did have the key, has called again.
        eventually(lambda: group[1].wait_connected(0) and group[0].wait_connected(0))
        group.works()


def test_garbage(caplog):
    """500 connections of garbage of all lengths: closed, counted, said once in the log; signals go on meanwhile."""
    chance = random.Random(2)
    with Group(2) as group:
        for attempt in range(500):
            with group.stranger(attempt % 2) as sock, suppress(ConnectionError):
                sock.sendall(chance.randbytes(chance.choice([1, FRAME_BYTES - 1, FRAME_BYTES, 5000])))
            if attempt % 50 == 0:
                group.works(round=attempt)
        assert group[0].refused > 100
        assert not any(channel.raised(100_000) for channel in group)
        assert all(channel.wait_connected(0) for channel in group)
        group.works()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert all("will only count further ones" in record.getMessage() for record in said)


def test_connections_that_never_speak():
    """Silent connections: no more than allowed are held, each for the time of a handshake, and signals pass."""
    with Group(2, limits=QUICK) as group, ExitStack() as stack:
        silent = [stack.enter_context(group.stranger(1)) for _ in range(30)]
        eventually(lambda: group[1].refused >= 30 - QUICK.strangers)
        assert len(group[1]._loop._unproven) <= QUICK.strangers
        group.works()
        for sock in silent:
            assert closed_by_peer(sock)
        assert group[1].refused == 30
        eventually(lambda: not group[1]._loop._unproven)


def test_connection_that_speaks_a_byte_at_a_time():
    """A stranger who dribbles a HELLO is cut off by the time limit all the same."""
    with Group(2, limits=QUICK) as group, group.stranger(1) as sock:
        began_s = time.monotonic()
        frame = Session(Identity(0, 0, group.key), calls=1).next_frame(0)
        with suppress(ConnectionError):
            for byte in frame:
                sock.sendall(bytes([byte]))
                time.sleep(0.2)  # the whole frame would take 12.8 s
        assert time.monotonic() - began_s < 5 * QUICK.handshake_s
        assert group[1].refused == 1
        group.works()


def test_a_legitimate_rank_gets_in_through_a_crowd():
    """With all places for strangers taken and taken again, a rank that connects anew is let in."""
    with Group(2, limits=Limits(strangers=4)) as group, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(group.stranger(1))
        eventually(lambda: group[1].refused == 16)
        lost = group[0]._loop._links[1], group[1]._loop._links[0]
        lost[0].sock.shutdown(socket.SHUT_RDWR)  # the network's doing
        eventually(lambda: lost[0].closed and lost[1].closed)
        assert all(channel.wait_connected(PATIENT_S) for channel in group)
        group.works()


def in_place_of_rank_0(group, sock):
    """Rank 0 ends, and we are it towards rank 1, on a connection of our own; returns that and rank 1's end of it."""
    group[0].close()
    eventually(lambda: 0 not in group[1].connected)
    sock.connect(("127.0.0.1", group.port(1)))
    session = Session(Identity(0, 0, group.key), calls=1)
    sock.sendall(session.next_frame(0))
    session.read(sock.recv(FRAME_BYTES, socket.MSG_WAITALL))
    sock.sendall(session.next_frame(0))
    eventually(lambda: 0 in group[1].connected)
    return session, group[1]._loop._links[0]


def test_a_peer_that_never_reads():
    """A peer with the key that never reads fills up its own connection: one frame is kept for it, others hear all."""
    with Group(3) as group, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        _, deaf = in_place_of_rank_0(group, sock)
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        round = 0
        while not deaf._unsent:
            assert round < 2000, "its connection should have filled up"
            group[1].raise_signal(round)
            eventually(lambda now=round: group[2].raised(now))
            round += 1
        for later in range(round, round + 100):
            group[1].raise_signal(later)
            eventually(lambda now=later: group[2].raised(now))
            assert len(deaf._unsent) <= FRAME_BYTES
        group.works(round + 100, without={0})
        assert not deaf.closed


def test_a_deaf_peer_that_reads_again_gets_the_newest():
    """When it reads at last, with nothing else going on, it finds some old frames and then the newest state."""
    with Group(3) as group, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        session, deaf = in_place_of_rank_0(group, sock)
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        round = 0
        while not deaf._unsent or round < 500:
            assert round < 3000, "its connection should have filled up"
            group[1].raise_signal(round)
            eventually(lambda now=round: group[2].raised(now))
            round += 1
        sock.settimeout(PATIENT_S)
        while session.heard < round:
            session.read(sock.recv(4096))
        assert session._frames_read < round


def test_frames_go_out_whole_over_a_socket_that_takes_a_few_bytes_at_a_time():
    """What a socket did not take is sent when it takes it, and only then the newest state, in one frame."""
    us, peer = Identity(1, 0, bytes(KEY_BYTES)), Session(Identity(0, 0, bytes(KEY_BYTES)), calls=1)
    session = Session(us, called_by={0})
    sent = bytearray()

    class Reluctant:
        room = 0

        def setblocking(self, flag): ...
        def setsockopt(self, *option): ...

        def send(self, data):
            if self.room == 0:
                raise BlockingIOError
            taken = data[: min(self.room, 7)]
            self.room -= len(taken)
            sent.extend(taken)
            return len(taken)

    sock = Reluctant()
    connection = Connection(sock, session, outgoing=False)
    session.read(peer.next_frame(0))
    sock.room = FRAME_BYTES
    assert not connection.write(0)
    peer.read(bytes(sent))
    session.read(peer.next_frame(0))
    sent.clear()
    for rounds in range(1, 40):
        sock.room = 10
        assert connection.write(rounds)
        assert len(connection._unsent) <= FRAME_BYTES
    sock.room = 1000
    assert not connection.write(40)
    peer.read(bytes(sent))
    assert peer.heard == 40
    assert not peer._unread


def test_a_peer_that_dies_in_the_middle_of_a_message():
    """Half a frame, then the end: the half is forgotten, the connection is gone, and the others signal on."""
    with Group(3) as group, socket.socket() as sock:
        session, end = in_place_of_rank_0(group, sock)
        sock.sendall(session.next_frame(77)[: FRAME_BYTES // 2])
        eventually(lambda: len(end.session._unread) == FRAME_BYTES // 2)
        sock.close()
        eventually(lambda: 0 not in group[1].connected)
        assert not any(channel.raised(0) for channel in group)
        group.works(without={0})


def test_no_descriptor_left(monkeypatch, caplog):
    """Where accept fails for want of descriptors, the listener rests for a second instead of spinning, then goes on."""
    with Group(2) as group:
        loop = group[1]._loop
        listener = loop._listeners[0]

        class Exhausted:
            def __init__(self):
                self.calls = 0

            def accept(self):
                self.calls += 1
                raise OSError(24, "Too many open files")

        exhausted = Exhausted()
        accept = loop._accept
        monkeypatch.setattr(loop, "_accept", lambda sock: accept(exhausted if exhausted.calls == 0 else sock))
        with group.stranger(1) as sock:
            eventually(lambda: exhausted.calls == 1)
            assert "cannot accept" in caplog.text
            with pytest.raises(KeyError):
                loop._selector.get_key(listener)
            group.works()
            loop._listen_again_s = time.monotonic()
            loop.wake()
            sock.sendall(bytes(FRAME_BYTES))
            assert closed_by_peer(sock)
        assert group[1].refused == 1
