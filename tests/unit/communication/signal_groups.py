"""Channels of one membership, for tests: all in this process, over loopback."""

import json
import socket
import threading
import time
from contextlib import suppress

from hvd_hetero.communication.signals import SignalChannel

PATIENT_S = 10.0


class Group:
    """The channels of one membership, all in this process, and what they told each other."""

    def __init__(self, size, meddle=lambda payloads: payloads, **options):
        self.payloads = [b""] * size
        self.channels = [None] * size
        gate = threading.Barrier(size)
        options = {"addresses": ["127.0.0.1"]} | options

        def make(rank):
            def exchange(payload):
                self.payloads[rank] = payload
                gate.wait(PATIENT_S)
                return meddle(list(self.payloads))

            self.channels[rank] = SignalChannel(rank, size, exchange, **options)

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

    def port(self, rank):
        return json.loads(self.payloads[rank])["addresses"][0][1]

    @property
    def key(self):
        return bytes.fromhex(json.loads(self.payloads[0])["key"])

    def stranger(self, rank):
        return socket.create_connection(("127.0.0.1", self.port(rank)), PATIENT_S)

    def works(self, round=1000, without=()):
        """A signal still gets from every rank to every other one."""
        channels = [channel for rank, channel in enumerate(self.channels) if rank not in without]
        for now, channel in enumerate(channels, round):
            assert not any(other.raised(now) for other in channels)
            channel.raise_signal(now)
            for other in channels:
                eventually(lambda other=other, now=now: other.raised(now))


def eventually(condition):
    deadline_s = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)


def closed_by_peer(sock):
    sock.settimeout(PATIENT_S)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True
