"""Signal channels: what is raised is seen, soon and by all that live, and closing leaves nothing."""

import gc
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import pytest
from signal_groups import PATIENT_S, Group, Root, eventually, say, threads_and_descriptors

from hvd_hetero.communication import signals
from hvd_hetero.communication.signals import SignalChannel
from hvd_hetero.errors import HeteroError


@pytest.mark.parametrize("size", [2, 3, 9, 20])
def test_everybody_hears(size):
    """Whoever raises it, at any size: a root with its children, and 20 for relays between; earlier rounds count too."""
    with Group(size) as group:
        assert not any(channel.raised(0) for channel in group)
        for round in range(4):
            group[(round * 7) % size].raise_signal(round)
            for channel in group:
                eventually(lambda channel=channel, round=round: channel.raised(round))
                assert channel.raised(0)
                assert not channel.raised(round + 1)


def test_size_one_has_no_thread_and_no_socket():
    """A single rank may use it like any other, and it costs nothing: not even gather is called."""
    gc.collect()  # what other tests have left
    before = threads_and_descriptors()
    channel = SignalChannel(0, 1, gather=None)
    assert threads_and_descriptors() <= before
    assert channel.wait_connected(0)
    assert not channel.raised(3)
    channel.raise_signal(3)
    assert channel.raised(3)
    assert not channel.raised(4)
    channel.close()


def test_raised_before_anybody_is_connected():
    """What is raised at once reaches the others when they get connected."""
    group = Group(3)
    group[1].raise_signal(5)
    with group:
        for channel in group:
            eventually(lambda channel=channel: channel.raised(5))
            assert not channel.raised(6)


def test_a_rank_that_comes_late_hears_what_it_has_missed():
    """The root has raised the signal long before its child connects."""
    with Root() as alone:
        alone.channel.raise_signal(5)
        time.sleep(0.02)
        with alone.child() as child:
            assert child.poll(PATIENT_S)
            assert int.from_bytes(child.recv_bytes()) == 6
            assert alone.channel.wait_connected(PATIENT_S)


def test_late_signal_of_an_old_round_changes_nothing():
    """Round 4 raised by a rank that does not know yet that 6 is over: 6 stays the latest, 7 is not raised."""
    with Root() as alone, alone.child() as child:
        say(child, 6)
        eventually(lambda: alone.channel.raised(6))
        say(child, 4)
        say(child, 6)
        alone.channel.raise_signal(6)
        alone.hears(child, 7)
        assert not alone.channel.raised(9)


def test_memberships_do_not_hear_each_other():
    """Two memberships side by side, the old one still open and raising: the new one begins with nothing raised."""
    with Group(2) as old:
        old[0].raise_signal(50)
        eventually(lambda: old[1].raised(50))
        with Group(3) as new:
            old[1].raise_signal(60)
            time.sleep(0.02)
            assert not any(channel.raised(0) for channel in new)
            new.works()
            keys = [json.loads(group.payloads[0])["key"] for group in (old, new)]
            assert keys[0] != keys[1]


def test_a_rank_that_leaves_is_no_trouble(caplog):
    """Ranks close one after the other at the end of a training: those that are left say nothing, and work on."""
    with Group(9) as group:
        for rank in (3, 8):
            group[rank].close()
        group.works(without={3, 8})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


RANK = """
import sys, time
from hvd_hetero.communication.signals import SignalChannel

rank, size = int(sys.argv[1]), int(sys.argv[2])

def gather(payload):
    print(payload.decode(), flush=True)
    return [sys.stdin.readline().encode() for _ in range(size)]

channel = SignalChannel(rank, size, gather)
print(channel.wait_connected(10), flush=True)
for line in sys.stdin:
    command, round = line.split()
    if command == "raise":
        channel.raise_signal(int(round))
    deadline_s = time.monotonic() + 10
    while not channel.raised(int(round)) and time.monotonic() < deadline_s:
        time.sleep(0.002)
    print(channel.raised(int(round)), flush=True)
"""


def test_a_process_that_is_killed():
    """Four processes, one killed, one frozen for a while: the others signal on; the root says so."""
    folder = str(Path(__file__).resolve().parents[3])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(rank), "4"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, bufsize=1, env=os.environ | {"PYTHONPATH": folder},
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
        ranks[2].stdin.write("raise 3\n")
        ranks[0].stdin.write("wait 3\n")
        assert ranks[0].stdout.readline() == "True\n"
        assert ranks[2].stdout.readline() == "True\n"
        ranks[3].send_signal(signal.SIGCONT)
        ranks[3].stdin.write("wait 3\n")
        assert ranks[3].stdout.readline() == "True\n"
        for rank in (3, 2, 0):  # which end as processes do
            ranks[rank].stdin.close()
            assert ranks[rank].wait(PATIENT_S) == 0
        said = [ranks[rank].stderr.read().splitlines() for rank in (0, 2, 3)]
        assert [len(lines) for lines in said] == [1, 0, 0]
        assert "rank 0: the signal channel lost a connection; rounds may now end only when every rank" in said[0][0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout, rank.stderr):
                pipe.close()


def test_a_peer_that_never_reads_holds_up_nobody(caplog):
    """When its connection is full it is closed, with one line in the log. Raising never waits, and others hear all."""
    with Root(size=3) as alone, socket.socket() as deaf, alone.child() as child:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect(alone.address)
        prove(deaf, alone.key)
        assert alone.channel.wait_connected(PATIENT_S)
        for link in alone.channel._relay._links:  # in the order in which handshakes ended, which is any
            with socket.socket(fileno=os.dup(link.fileno())) as its_end:
                if its_end.getpeername() == deaf.getsockname():
                    its_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                    break
        took_s = []
        for round in range(3000):
            began_s = time.perf_counter()
            alone.channel.raise_signal(round)
            took_s.append(time.perf_counter() - began_s)
            assert child.poll(PATIENT_S)
            child.recv_bytes()
            if link.closed:
                break
        assert link.closed, "its connection should have filled up"
        assert statistics.median(took_s) < 2e-3
        alone.hears(child, round=5000)
    assert caplog.text.count("lost a connection") == 1


def prove(sock, key):
    """A child's part of the handshake, on a socket that the test has made."""
    with Connection(os.dup(sock.fileno())) as link:
        answer_challenge(link, key)
        deliver_challenge(link, key)


def test_raising_does_not_wait_for_the_thread(monkeypatch):
    """Hold the thread up in the middle of its work: the calls return, and what was raised goes out afterwards."""
    with Group(2) as group:
        relay, held, gate = group[1]._relay, threading.Event(), threading.Event()

        def held_up(speaker, hear=relay._hear):
            held.set()
            assert gate.wait(PATIENT_S)
            hear(speaker)

        monkeypatch.setattr(relay, "_hear", held_up)
        group[1].raise_signal(0)
        assert held.wait(PATIENT_S)
        for round in range(10_000):  # more than the pipe takes
            group[1].raise_signal(round)
        assert group[1].raised(9999)
        assert not group[0].raised(0)
        gate.set()
        eventually(lambda: group[0].raised(2000))


def test_calls_take_little_time():
    """raise_signal takes less than 100 us and raised less than 1 us on a quiet machine; bounds are for a busy one."""
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
        assert statistics.quantiles(raise_s)[0] < 2e-3
        assert min(look_s) < 10e-6


def test_it_sleeps_while_nothing_happens():
    """Connected and idle, the threads of eight ranks do not wake up."""
    others = set(threading.enumerate())
    with Group(8):
        relays = {thread for thread in threading.enumerate() if thread.name.startswith("hvd-hetero-signals")} - others

        def waits():
            """How often each thread has gone to sleep."""
            paths = [Path("/proc/self/task", str(thread.native_id), "status") for thread in relays]
            return [int(path.read_text().rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]) for path in paths]

        assert len(relays) == 8
        time.sleep(0.2)
        before = waits()
        time.sleep(0.5)
        slept = [now - then for now, then in zip(waits(), before, strict=True)]
        assert max(slept) <= 2, "a busy machine may end a handshake late; a thread that polls wakes up time and again"


def test_close_leaves_nothing():
    """After close, or when a channel is merely dropped, no thread and no descriptor remains; close may be repeated."""
    gc.collect()  # what other tests have left
    before = threads_and_descriptors()
    with Group(3) as group:
        group[0].raise_signal(1)
    group[0].close()
    eventually(lambda: threads_and_descriptors() <= before)
    with pytest.raises(HeteroError, match="closed"):
        group[0].raise_signal(2)
    assert group[0].raised(1)
    Group(2)
    eventually(lambda: gc.collect() >= 0 and threads_and_descriptors() <= before)  # its thread may be using it just now


def test_raised_and_closed_at_once_is_still_said():
    """A rank that raises the signal and closes right after has told its neighbours, and they the others."""
    with Group(3) as group:
        group[1].raise_signal(8)
        group[1].close()
        eventually(lambda: group[0].raised(8) and group[2].raised(8))


def test_a_child_that_is_turned_away_after_its_last_word_calls_again(monkeypatch):
    """It believes that it is admitted, and its parent has run out of patience with it meanwhile."""
    shake_hands, calls = signals._Relay._shake_hands, []

    def turned_away(relay, sock, *steps):
        link = shake_hands(relay, sock, *steps)
        if relay._rank == 0 and not calls:
            calls.append(sock)
            relay._turn_away_the_oldest()
        return link

    monkeypatch.setattr(signals._Relay, "_shake_hands", turned_away)
    with Group(3) as group:
        assert calls
        group.works()


def test_a_child_that_is_lost_and_calls_again_leaves_a_place_for_the_other():
    """Its parent still waits for its other child, and goes on listening until that one is there, too."""
    with Root(size=3) as alone:
        with alone.child() as first:
            say(first, 1)
            eventually(lambda: alone.channel.raised(1))
        eventually(lambda: not alone.channel._relay._links)
        with alone.child() as again, alone.child() as other:
            assert alone.channel.wait_connected(PATIENT_S)
            for child in (again, other):
                assert int.from_bytes(child.recv_bytes()) == 2
            alone.hears(other, round=6)


def test_a_child_that_is_admitted_as_its_parent_leaves_is_told_so(monkeypatch):
    """Not left with a connection that breaks, which it would take for the loss of a rank."""
    with Root() as alone, socket.create_connection(alone.address) as sock:
        relay, held, gate = alone.channel._relay, threading.Event(), threading.Event()
        eventually(lambda: relay._strangers)

        def held_up(speaker, hear=relay._hear):
            held.set()
            assert gate.wait(PATIENT_S)
            hear(speaker)

        monkeypatch.setattr(relay, "_hear", held_up)
        closes = threading.Thread(target=alone.channel.close)
        closes.start()
        assert held.wait(PATIENT_S)
        with Connection(os.dup(sock.fileno())) as child:
            answer_challenge(child, alone.key)
            deliver_challenge(child, alone.key)
            eventually(lambda: relay._admitted)
            gate.set()
            assert child.poll(PATIENT_S)
            assert child.recv_bytes() == b""
        closes.join()


def test_forked_child():
    """A child may not raise, and its end disturbs nobody, even where it closes the channel."""
    with Group(2) as group:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                group[0].raise_signal(5)
            except HeteroError as error:
                os.write(write, str(error).encode())
                group[0].close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert b"fork" in os.read(read, 1000)
        os.close(read)
        os.close(write)
        assert not group[1].raised(5)
        group.works()


def test_trouble_in_the_thread_ends_the_signals_and_not_the_training(caplog, monkeypatch):
    """If the thread fails it says so in the log; both calls go on working, for this rank alone."""
    with Group(2) as group:
        monkeypatch.setattr(group[0]._relay, "_hear", lambda speaker: 1 / 0)
        group[0].raise_signal(1)
        eventually(lambda: "rank 0: the signal channel failed" in caplog.text)
        group[0].raise_signal(2)
        assert group[0].raised(2)
        eventually(lambda: "rank 1: the signal channel lost a connection" in caplog.text)
        assert not group[1].raised(0)
        group[1].raise_signal(2)
        assert group[1].raised(2)
