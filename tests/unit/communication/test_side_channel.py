"""The side channel: questions and answers, the signals of non-blocking rounds, and what strangers send."""

from __future__ import annotations

import multiprocessing.connection
import socket
from functools import partial

import pytest

from hvd_hetero.communication.addresses import gather_directory, listen
from hvd_hetero.communication.side_channel import Kind, SideChannel
from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.testing import run_on_threads


def channels(size, training=5):
    def make(rank):
        sockets, troubles = listen()
        gather = partial(wire_of_this_thread().allgather_object, name="addresses")
        directory = gather_directory(rank, size, sockets, troubles, gather)
        return SideChannel(rank, training, directory, sockets, lambda: b"here is %d" % rank, lambda *_: None)

    return run_on_threads(make, size)


def test_answers_come_and_what_strangers_send_does_not_count():
    first, second = channels(2)
    seen = []
    second._serve, take = (
        (lambda sock, packet, address: (seen.append(packet), take(sock, packet, address))),
        second._serve,
    )
    first.ask()
    second.listen(1.0)
    first.listen(1.0)
    assert first.answers == {1: b"here is 1"}
    question = seen[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.settimeout(0.3)
        theirs = next(sock for sock in second._sockets if sock.getsockname()[0] == "127.0.0.1").getsockname()
        for packet in (question, question[:-1] + bytes([question[-1] ^ 1]), b"", b"x" * 2000):
            stranger.sendto(packet, theirs)
            second.listen(0.3)
        with pytest.raises(TimeoutError):
            stranger.recv(2000)
    for channel in (first, second):
        channel.close()


def drained(channel):
    """Let a channel take the packets that are there."""
    while multiprocessing.connection.wait(channel._sockets, 0.2):
        channel.listen(0.0)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_all_ranks_hear_that_one_has_finished_and_nothing_of_the_next_round(size):
    made = channels(size)
    made[1].raise_signal(6)
    for channel in made:
        if channel is not made[1]:
            drained(channel)
        assert channel.raised(6)
        assert channel.raised(5), "a later round is over, and so is this one"
        assert not channel.raised(7)
    for channel in made:
        channel.close()


def test_a_late_signal_changes_nothing_and_only_the_first_to_finish_sends_any():
    first, second = channels(2)
    second.raise_signal(3)
    drained(first)
    first.raise_signal(3)
    assert not multiprocessing.connection.wait(second._sockets, 0.2)
    second.raise_signal(9)
    drained(first)
    second.announce(Kind.FINISHED, "4")
    drained(first)
    assert first.raised(9)
    for channel in (first, second):
        channel.close()
        channel.raise_signal(20)  # nobody hears it, and nothing fails


def test_signals_of_strangers_and_of_another_training_are_not_heard():
    first, second = channels(2)
    theirs = next(sock for sock in first._sockets if sock.getsockname()[0] == "127.0.0.1").getsockname()
    packet = second._seal(0, Kind.FINISHED, bytes(16), b"7")
    second._training, mine = 6, second._training
    of_another = second._seal(0, Kind.FINISHED, bytes(16), b"7")
    second._training = mine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for wrong in (packet[:-1] + bytes([packet[-1] ^ 1]), of_another):
            stranger.sendto(wrong, theirs)
        drained(first)
        assert not first.raised(0)
        stranger.sendto(packet, theirs)  # whoever can read and change packets is not kept out
        drained(first)
        assert first.raised(6)
    for channel in (first, second):
        channel.close()
