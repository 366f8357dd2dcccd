"""Channels for tests: those of one membership, all in this process, and a root whose children never come."""

import json
import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, answer_challenge, deliver_challenge

from hvd_hetero.communication.signals import SignalChannel

PATIENT_S = 10.0


class Group:
    """The channels of one membership, all in this process, and what they told each other."""

    def __init__(self, size, meddle=lambda payloads: payloads):
        self.payloads = [b""] * size
        self.channels = [None] * size
        gate = threading.Barrier(size)

        def make(rank):
            def gather(payload):
                self.payloads[rank] = payload
                gate.wait(PATIENT_S)
                return meddle(list(self.payloads))

            self.channels[rank] = SignalChannel(rank, size, gather)

        makers = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()

    def __enter__(self):
        assert all(channel.wait_connected(PATIENT_S) for channel in self.channels)
        return self

    def __exit__(self, *_):
        for channel in self.channels:
            channel.close()

    def __getitem__(self, rank):
        return self.channels[rank]

    def works(self, round=1000, without=()):
        """A signal still gets from every rank to every other one."""
        channels = [channel for rank, channel in enumerate(self.channels) if rank not in without]
        for now, channel in enumerate(channels, round):
            assert not any(other.raised(now) for other in channels)
            channel.raise_signal(now)
            for other in channels:
                eventually(lambda other=other, now=now: other.raised(now))


class Root:
    """Rank 0 of a membership whose other ranks the test plays: it listens until they are there."""

    def __init__(self, size=2, change=lambda entries: entries):
        def gather(payload):
            mine = json.loads(payload)
            self.key = bytes.fromhex(mine["key"])
            self.address = tuple(mine["addresses"][0])
            entries = change([mine, *(mine | {"rank": rank, "key": ""} for rank in range(1, size))])
            return [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]

        self.channel = SignalChannel(0, size, gather)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def child(self, key=None):
        """A child as the standard library makes it, which holds the key."""
        return Client(self.address, authkey=key or self.key)

    def child_that(self, notes):
        """Another one, which hands all that it writes to ``notes``."""
        link = Client(self.address)
        write = link._send
        link._send = lambda buffer: (notes(bytes(buffer)), write(buffer))
        answer_challenge(link, self.key)
        deliver_challenge(link, self.key)
        return link

    def hears(self, child, round):
        """What a child says arrives, and what the root says arrives at the child."""
        assert not self.channel.raised(round)
        say(child, round)
        eventually(lambda: self.channel.raised(round))
        self.channel.raise_signal(round + 1)
        assert child.poll(PATIENT_S)
        assert int.from_bytes(child.recv_bytes()) == round + 2


def say(link, round):
    """Say that a round is over, as a neighbour does."""
    link.send_bytes((round + 1).to_bytes(8))


def eventually(condition):
    """Wait for it."""
    deadline_s = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)


def closed_by_peer(sock):
    """Whether the other end ends the connection."""
    sock.settimeout(PATIENT_S)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def threads_and_descriptors():
    """What a channel must not leave behind. Those of other tests, which may end meanwhile, are told apart."""
    found = set(threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
