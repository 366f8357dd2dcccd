"""Signal channels over loopback: what is raised is seen, and nothing that others do on the port changes anything."""

import gc
import json
import logging
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from hvd_hetero.errors import HeteroError
from hvd_hetero.signals import Limits, SignalChannel
from hvd_hetero.signals.frames import FRAME_BYTES, KEY_BYTES, Identity, Session

PATIENT_S = 10.0
QUICK = Limits(handshake_s=0.2, strangers=4)


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


@pytest.mark.parametrize("size", [2, 3, 8, 20])
def test_everybody_hears(size):
    """Whoever raises it, at any size, with relays (20 is beyond the full mesh) or without; earlier rounds count too."""
    with Group(size) as group:
        assert not any(channel.raised(0) for channel in group)
        for round in range(4):
            group[(round * 7) % size].raise_signal(round)
            for channel in group:
                eventually(lambda channel=channel, round=round: channel.raised(round))
                assert channel.raised(0)
                assert not channel.raised(round + 1)


def test_size_one_has_no_thread_and_no_socket():
    """A single rank may use it like any other, and it costs nothing: not even the exchange is called."""
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with SignalChannel(0, 1, exchange=None) as channel:
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
        assert channel.wait_connected(0)
        assert not channel.raised(3)
        channel.raise_signal(3)
        assert channel.raised(3)
        assert not channel.raised(4)
        assert channel.connected == frozenset()


def test_raised_before_anybody_is_connected():
    """What is raised at once reaches the others when they get connected."""
    group = Group(3)
    group[1].raise_signal(5)
    with group:
        for channel in group:
            eventually(lambda channel=channel: channel.raised(5))


def test_late_signal_of_an_old_round_changes_nothing():
    """Round 4 raised by a rank that does not know yet that 6 is over: 6 stays the latest, 7 is not raised."""
    with Group(2) as group:
        group[0].raise_signal(6)
        eventually(lambda: group[1].raised(6))
        group[1].raise_signal(4)
        group[0].raise_signal(6)
        time.sleep(0.02)
        assert not any(channel.raised(7) for channel in group)
        assert all(channel.raised(6) for channel in group)


def test_memberships_do_not_hear_each_other():
    """Two memberships side by side, the old one still open and raising: the new one begins with nothing raised."""
    with Group(2, generation=1) as old:
        old[0].raise_signal(50)
        eventually(lambda: old[1].raised(50))
        with Group(3, generation=2) as new:
            old[1].raise_signal(60)
            assert new.key != old.key
            time.sleep(0.02)
            assert not any(channel.raised(0) for channel in new)
            new.works()


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
        assert not group[1]._loop._unproven


def test_connection_that_speaks_a_byte_at_a_time():
    """A stranger who dribbles a HELLO is cut off by the time limit all the same."""
    with Group(2, limits=QUICK) as group, group.stranger(1) as sock:
        began_s = time.monotonic()
        frame = Session(Identity(0, 0, group.key), calls=1).next_frame(0)
        with suppress(ConnectionError):
            for byte in frame:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
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
    """What it missed is not repeated one by one; the first frames it finds are old, and the last one is the newest."""
    with Group(2) as group, socket.socket() as sock:
        session, _ = in_place_of_rank_0(group, sock)
        for round in range(1000):
            group[1].raise_signal(round)
        sock.settimeout(PATIENT_S)
        while session.heard < 1000:
            session.read(sock.recv(4096))
        assert session._frames_read <= 1000


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


def test_relays_die():
    """Of 20 ranks five close, most of rank 0's neighbours: the others drop their connections and hear each other."""
    with Group(20) as group:
        dead = {1, 4, 8, 16, 19}
        assert dead < group[0].neighbours
        for rank in dead:
            group[rank].close()
        living = [channel for rank, channel in enumerate(group.channels) if rank not in dead]
        for channel in living:
            eventually(lambda channel=channel: not channel.connected & dead)
        living[0].raise_signal(3)
        for channel in living:
            eventually(lambda channel=channel: channel.raised(3))


RANK = """
import sys, time
from hvd_hetero.signals import SignalChannel

rank, size = int(sys.argv[1]), int(sys.argv[2])

def exchange(payload):
    print(payload.decode(), flush=True)
    return [sys.stdin.readline().encode() for _ in range(size)]

channel = SignalChannel(rank, size, exchange, addresses=["127.0.0.1"])
print(channel.wait_connected(10), flush=True)
for line in sys.stdin:
    command, round = line.split()
    if command == "raise":
        channel.raise_signal(int(round))
    deadline_s = time.monotonic() + 10
    while not channel.raised(int(round)) and time.monotonic() < deadline_s:
        time.sleep(0.002)
    print(channel.raised(int(round)), sorted(channel.connected), flush=True)
"""


def test_a_process_that_is_killed():
    """Three processes, one killed (SIGKILL), one frozen (SIGSTOP) for a while: the others signal on regardless."""
    root = str(Path(__file__).resolve().parents[2])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(rank), "4"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=os.environ | {"PYTHONPATH": root},
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        payloads = [rank.stdout.readline() for rank in ranks]
        for rank in ranks:
            rank.stdin.write("".join(payloads))
        assert [rank.stdout.readline().strip() for rank in ranks] == ["True"] * 4
        ranks[1].kill()
        ranks[3].send_signal(signal.SIGSTOP)
        ranks[0].stdin.write("raise 3\n")
        ranks[2].stdin.write("wait 3\n")
        assert ranks[0].stdout.readline().startswith("True")
        assert ranks[2].stdout.readline().startswith("True")
        ranks[3].send_signal(signal.SIGCONT)

        def thawed():
            ranks[3].stdin.write("wait 3\n")
            return ranks[3].stdout.readline()

        eventually(lambda: thawed() == "True [0, 2]\n")  # it heard of the signal, and of the death, through the sockets
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


def test_calls_return_at_once():
    """raise_signal takes less than 50 us and raised less than 1 us, unless others are given the core in between."""
    with Group(3) as group:
        raise_s, look_s = [], []
        for round in range(100):
            began_s = time.perf_counter()
            group[2].raise_signal(round)
            raise_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            for _ in range(100):
                group[1].raised(round + 1)
            look_s.append((time.perf_counter() - began_s) / 100)
            time.sleep(0.002)
        assert statistics.quantiles(raise_s)[0] < 50e-6  # the lower quartile: a busy machine must not fail this
        assert min(look_s) < 1e-6


def test_it_sleeps_while_nothing_happens():
    """Connected and idle, the threads of eight ranks together take less than a hundredth of a core."""
    with Group(8):
        process = psutil.Process()
        time.sleep(0.05)
        before = sum(process.cpu_times()[:2])
        switches = sum(process.num_ctx_switches())
        time.sleep(0.5)
        assert sum(process.cpu_times()[:2]) - before <= 0.011  # counted in hundredths of a second
        assert sum(process.num_ctx_switches()) - switches < 100


def test_close_leaves_nothing():
    """After close, or when a channel is merely dropped, no thread and no descriptor remains; close may be repeated."""
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Group(3) as group:
        group[0].raise_signal(1)
    group[0].close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    with pytest.raises(HeteroError, match="closed"):
        group[0].raise_signal(2)
    assert group[0].raised(1)
    Group(2)
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_raised_and_closed_at_once_is_still_said():
    """A rank that raises the signal and closes right after has told its neighbours."""
    with Group(3) as group:
        group[0].raise_signal(8)
        group[0].close()
        eventually(lambda: group[1].raised(8) and group[2].raised(8))


def test_forked_child():
    """A child holds no descriptor of the channel, may not raise, and its end disturbs nobody."""
    with Group(2) as group:
        loop = group[0]._loop
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                said = [loop._selector.get_map() is None, all(sock.fileno() == -1 for sock in loop._listeners)]
                said += [all(link.sock.fileno() == -1 for link in loop._links.values())]
                try:
                    group[0].raise_signal(5)
                except HeteroError as error:
                    said.append("fork" in str(error))
                os.write(write, json.dumps(said).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert json.loads(os.read(read, 1000)) == [True, True, True, True]
        os.close(read)
        os.close(write)
        assert not group[1].raised(5)
        group.works()


def test_trouble_in_the_thread_ends_the_signals_and_not_the_training(caplog, monkeypatch):
    """If the thread fails it says so in the log; both calls go on working, for this rank alone."""
    with Group(2) as group:
        monkeypatch.setattr(group[0]._loop, "_spread_news", lambda: 1 / 0)
        group[0].raise_signal(1)
        eventually(lambda: "the signal channel failed" in caplog.text)
        group[0].raise_signal(2)
        assert group[0].raised(2)
        eventually(lambda: not group[1].connected)


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


@pytest.mark.parametrize(
    "addresses",
    [["::1"], ["localhost"], ["::1", "127.0.0.1"], ["no-such-host.invalid", "127.0.0.1"], ["192.0.2.1", "127.0.0.1"]],
)
def test_addresses(addresses):
    """IPv6, names, several candidates, and candidates that do not exist, or are not ours, beside one that is."""
    if "::1" in addresses and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with Group(2, addresses=addresses) as group:
        group.works()


def has_ipv6():
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


def test_candidates_are_tried_in_turn():
    """The first address of a peer leads nowhere, the second to it."""

    def misled(payloads):
        entry = json.loads(payloads[1])
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            entry["addresses"].insert(0, unused.getsockname())
        return [payloads[0], json.dumps(entry).encode()]

    with Group(2, meddle=misled) as group:
        group.works()


def alone(change=lambda entries: entries, **options):
    """What rank 0 of 2 makes of an exchange in which rank 1's payload, and the order, are as `change` has them."""

    def exchange(payload):
        mine = json.loads(payload)
        entries = change([mine, mine | {"rank": 1, "key": ""}])
        return [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in entries]

    return SignalChannel(0, 2, exchange, **({"addresses": ["127.0.0.1"]} | options))


EXCHANGES = {
    "too few": (lambda e: e[:1], "in order of rank"),
    "out of order": (lambda e: e[::-1], "in order of rank"),
    "another size": (lambda e: [e[0], e[1] | {"size": 3}], "the same size"),
    "another generation": (lambda e: [e[0], e[1] | {"generation": 9}], "the same generation"),
    "another version": (lambda e: [e[0], e[1] | {"version": 2}], "version"),
    "not ours": (lambda e: [e[0], b"\x80nonsense"], "no signal channel"),
    "an unreachable rank": (lambda e: [e[0], e[1] | {"addresses": [], "troubles": "no luck"}], "rank 1 .*no luck"),
}


@pytest.mark.parametrize(("change", "says"), EXCHANGES.values(), ids=EXCHANGES)
def test_exchange_that_does_not_fit(change, says):
    """Ranks that disagree, or a collective that is no allgather: an error that says so, on every rank alike."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HeteroError, match=says):
        alone(change)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_cannot_listen_takes_part_in_the_exchange():
    """It tells the others why instead of leaving them waiting; then all raise."""
    with pytest.raises(HeteroError, match=r"rank 0 .*no-such-host\.invalid.*give `addresses`"):
        alone(addresses=["no-such-host.invalid"])


def test_unreachable_rank_is_said_once(caplog):
    """A peer whose address leads nowhere: training goes on, one line in the log says it, retries get rarer."""
    limits = Limits(first_retry_s=1e-4, last_retry_s=1e-3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        lost = unused.getsockname()
    with alone(lambda e: [e[0], e[1] | {"addresses": [lost]}], limits=limits) as channel:
        eventually(lambda: "cannot be reached for signals" in caplog.text)
        time.sleep(0.05)
        channel.raise_signal(1)
        assert channel.raised(1)
        assert channel.connected == frozenset()
        assert not channel.wait_connected(0)
    assert caplog.text.count("cannot be reached") == 1


def test_loopback_of_another_host_is_not_tried():
    """A loopback address given by a rank of another host name would lead to ourselves: nobody calls it."""
    with alone(lambda e: [e[0], e[1] | {"host": "elsewhere"}]) as channel:
        assert not channel._loop._calls[1]._addresses


ARGUMENTS = {
    "size": ({"size": 0}, "size must be"),
    "rank": ({"rank": 2}, "rank must be .* from 0 to 1"),
    "generation": ({"generation": -1}, "generation must be"),
    "addresses": ({"addresses": "localhost"}, r"write \['localhost'\]"),
}


@pytest.mark.parametrize(("wrong", "says"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(wrong, says):
    """Wrong arguments are named, with the rule and the value."""
    arguments = {"rank": 0, "size": 2, "exchange": lambda payload: [payload] * 2} | wrong
    with pytest.raises((ValueError, TypeError), match=says):
        SignalChannel(**arguments)


@pytest.mark.parametrize("round", [-1, 2**64 - 1, 1.5, "3", None])
def test_round_numbers(round):
    """A round is a whole number that fits the frame."""
    with SignalChannel(0, 1, exchange=None) as channel, pytest.raises(ValueError, match="round must be"):
        channel.raise_signal(round)


@pytest.mark.parametrize("wrong", [{"handshake_s": 0}, {"strangers": -1}, {"last_retry_s": float("nan")}])
def test_limits(wrong):
    """Limits are positive and finite."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_the_default_addresses_work():
    """With no addresses given, ranks of one host find each other."""
    with Group(2, addresses=[]) as group:
        group.works()
        assert len(group.key) == KEY_BYTES
