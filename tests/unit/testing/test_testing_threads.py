"""Ranks as threads: results in order of rank, and an end in any case."""

import queue
import subprocess
import sys
import threading

import pytest

from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.errors import PeerLostError
from hvd_hetero.testing import ThreadHangError, ThreadRankError, run_on_threads


def test_results_come_in_order_of_rank():
    returned = [threading.Event() for _ in range(4)]
    returned[3].set()

    def case(rank):
        assert returned[rank + 1].wait(20), "the last rank returns first"
        returned[rank].set()
        return rank, wire_of_this_thread().rank, wire_of_this_thread().size

    assert run_on_threads(case, ranks=3) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert wire_of_this_thread() is None, "the caller is no rank"


def test_objects_travel_as_copies():
    def case(rank):
        mine = [rank]
        gathered = wire_of_this_thread().allgather_object(mine, name="all")
        first = wire_of_this_thread().broadcast_object(mine, root_rank=0, name="first")
        for received in (*gathered, first):
            received.append("changed")
        wire_of_this_thread().allgather_object(None, name="all have changed theirs")
        return mine, gathered, first

    for rank, (mine, gathered, first) in enumerate(run_on_threads(case, ranks=2)):
        assert mine == [rank]
        assert gathered == [[0, "changed"], [1, "changed"]]
        assert first == [0, "changed"]


def test_the_first_failure_is_raised_with_its_rank_and_ends_the_others_waiting():
    caught = []

    def case(rank):
        if rank == 1:
            raise KeyError("lost")
        try:
            wire_of_this_thread().allgather_object(rank, name="never")
        except PeerLostError as error:
            caught.append(str(error))
            raise

    with pytest.raises(ThreadRankError, match=r"rank 1: KeyError: 'lost'") as error:
        run_on_threads(case, ranks=3)
    assert error.value.rank == 1
    assert isinstance(error.value.__cause__, KeyError)
    assert caught == ["'never' waits for rank 1, which has failed (KeyError: 'lost')"] * 2


HANGS = """
import threading
from hvd_hetero.testing import ThreadHangError, run_on_threads

def sleeps_in_here(rank):
    if rank == 1:
        threading.Event().wait(300)

try:
    run_on_threads(sleeps_in_here, ranks=2, timeout_s=2.0)
except ThreadHangError as error:
    print(error)
"""


def test_at_the_time_limit_all_stacks_are_printed():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ranks [1] were still at work after 2 s; their stacks are above\n"
    assert "in sleeps_in_here" in done.stderr


def test_ranks_that_wait_for_one_that_hangs_end_with_it():
    ended, seen = queue.Queue(), threading.Event()

    def case(rank):
        if rank == 0:
            seen.wait(30.0)
            return
        try:
            wire_of_this_thread().allgather_object(rank, name="waits")
        finally:
            ended.put(rank)

    with pytest.raises(ThreadHangError, match=r"ranks \[0, 1\]"):
        run_on_threads(case, ranks=2, timeout_s=0.2)
    assert ended.get(timeout=20) == 1, "while rank 0 still hangs"
    seen.set()
