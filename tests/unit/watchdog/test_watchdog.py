"""Watchdogs of one process, one per rank: they find each other, and what they say and do."""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
import time

import pytest

from hvd_hetero.balancer import Balancer, MicroBatch
from hvd_hetero.communication.addresses import gather_directory, listen_to_packets
from hvd_hetero.policies import BSP
from hvd_hetero.watchdog import EXIT_CODE, Patience, Watchdog
from hvd_hetero.watchdog.roll import RollCall
from hvd_hetero.watchdog.watchdog import join_known
from hvd_hetero.watchdog.whereabouts import locate

SHORT = Patience(warn=0.3, deadlock=0.6, silent=1.0)


class Ranks:
    """Each in a thread, with a watchdog of its own; an allgather that they share."""

    def __init__(self, size):
        self.size = size
        self.ended = {}
        self._met = threading.Barrier(size)
        self._told = [b""] * size
        self.watchdogs = [None] * size

    def gather(self, rank):
        def allgather(payload):
            self._told[rank] = payload
            self._met.wait(10)
            return list(self._told)

        return allgather

    def run(self, *bodies):
        threads = [threading.Thread(target=self._rank, args=(i, body)) for i, body in enumerate(bodies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def run_alone(self):
        self._balancer = Balancer(BSP(), 0, self.size, 8, clock=time.perf_counter)
        return Watchdog(self._balancer, 5, self.gather(0), patience=SHORT)

    def _rank(self, rank, body):
        balancer = Balancer(BSP(), rank, self.size, 8, clock=time.perf_counter)
        watchdog = Watchdog(
            balancer, 5, self.gather(rank), patience=SHORT, waits_in=("waits_here",),
            end=lambda code: self.ended.setdefault(rank, code),
        )  # fmt: skip
        self.watchdogs[rank] = watchdog
        try:
            body(self, rank, balancer)
        finally:
            watchdog.close()


WAIT = """
def wait(until):
    import time
    limit = time.monotonic() + 10
    while not until() and time.monotonic() < limit:
        time.sleep(0.02)
"""


_module = {"__name__": "waits_here.mpi_ops"}  # which counts as waiting for others
exec(compile(WAIT, "<waits_here>", "exec"), _module)
wait = _module["wait"]


def in_round(balancer, ends):
    balancer.begin(MicroBatch(balancer.plan(), 4))
    if ends:
        balancer.report()


def waits_at_the_end_of_the_round(ranks, rank, balancer):
    in_round(balancer, ends=True)
    wait(lambda: len(ranks.ended) == ranks.size)


def waits_in_the_body(ranks, rank, balancer):
    in_round(balancer, ends=False)
    wait(lambda: len(ranks.ended) == ranks.size)


def works(ranks, rank, balancer):
    time.sleep(6 * SHORT.deadlock)


def waits_for_one_that_works(ranks, rank, balancer):
    in_round(balancer, ends=True)
    end = time.monotonic() + 6 * SHORT.deadlock
    wait(lambda: time.monotonic() > end)


def leaves(ranks, rank, balancer):
    time.sleep(0.5)


def test_ranks_in_different_collectives_end_on_every_rank_with_a_message(caplog):
    ranks = Ranks(3)
    ranks.run(waits_at_the_end_of_the_round, waits_at_the_end_of_the_round, waits_in_the_body)
    assert ranks.ended == dict.fromkeys(range(3), EXIT_CODE)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) >= 3
    assert any(
        "all ranks wait, in different collectives" in error and "waits_in_the_body()" in error for error in errors
    )


def test_the_end_comes_where_standard_error_is_no_file(monkeypatch):
    """As in a notebook, where stacks of C cannot be written."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    ranks = Ranks(2)
    ranks.run(waits_at_the_end_of_the_round, waits_in_the_body)
    assert ranks.ended == {0: EXIT_CODE, 1: EXIT_CODE}


def test_a_rank_at_work_is_named_by_one_rank_and_nobody_ends(caplog):
    ranks = Ranks(3)
    ranks.run(waits_for_one_that_works, waits_for_one_that_works, works)
    assert ranks.ended == {}
    said = [record.getMessage() for record in caplog.records if "has waited for" in record.getMessage()]
    assert said
    assert all(text.startswith("rank 0 has waited") and "for rank 2, which is at" in text for text in said)
    assert all("works()" in text for text in said)


def test_a_rank_that_answers_no_more_ends_the_job_of_the_others(caplog):
    ranks = Ranks(2)

    def waits(ranks, rank, balancer):
        in_round(balancer, ends=True)
        wait(lambda: ranks.ended)

    ranks.run(waits, leaves)
    assert ranks.ended == {0: EXIT_CODE}
    assert "rank 1, which does not answer" in caplog.text


def test_looking_goes_on_while_other_trainings_begin_and_end_in_the_process():
    """Each look reads the progress of all trainings; a set of them changed under the one who read it."""
    watchdog = Ranks(1).run_alone()
    failures, begun = [], []

    def look():
        until = time.monotonic() + 1.0
        try:
            while time.monotonic() < until:
                watchdog.where()
        except RuntimeError as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        looking.start()
        while looking.is_alive():
            begun.append(Balancer(BSP(), 0, 2, 8, clock=time.perf_counter))
            join_known(begun[-1])
            del begun[: len(begun) // 100 * 50]
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def test_locate_names_the_users_line_and_the_call_that_waits():
    found = []

    def train():
        wait(done.is_set)

    done = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.1)
    found.append(locate(thread.ident, ("waits_here",)))
    done.set()
    thread.join()
    waits, of_its_own, where = found[0]
    assert waits
    assert not of_its_own
    assert where.startswith("test_watchdog.py:")
    assert "train" in where


def roll_calls(size):
    sockets = [listen_to_packets() for _ in range(size)]
    met, told = threading.Barrier(size), [b""] * size

    def allgather(rank):
        def gather(payload):
            told[rank] = payload
            met.wait(10)
            return list(told)

        return gather

    directories = [None] * size

    def meet(rank):
        directories[rank] = gather_directory(rank, size, *sockets[rank], allgather(rank))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        RollCall(rank, 5, directories[rank], sockets[rank][0], lambda rank=rank: b"here is %d" % rank, lambda *_: None)
        for rank in range(size)
    ]  # fmt: skip


def test_answers_come_and_what_strangers_send_does_not_count():
    first, second = roll_calls(2)
    seen = []
    second._take, take = (
        (lambda sock, packet, address: (seen.append(packet), take(sock, packet, address))),
        second._take,
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
    for roll in (first, second):
        roll.close()
