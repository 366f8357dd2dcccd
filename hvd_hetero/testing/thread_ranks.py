"""Ranks of PyTorch as threads of this process: a case of three takes milliseconds, without launcher and Horovod.

    def case(rank):
        balance = torch_hooks.LoadBalance("lb-bsp", global_batch=12)   # finds the wire of its thread
        ...
        return balance.rounds

    assert run_on_threads(case, ranks=3) == [10, 10, 10]

Keras's ranks are processes, because TensorFlow's collectives are operations of a graph (``testing.launch``).

Everything of a process is shared: random number generators, environment, the count of its processor's time. So seed and
build models under a lock, or before, and give the policy speeds by the test's own clock. Import beforehand what is
imported at its first use; PyTorch imports a thousand modules when it makes the first optimizer.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hvd_hetero.communication.thread_wire import ThreadGroup, ThreadWire, set_wire_of_this_thread
from hvd_hetero.errors import HeteroError, PeerLostError

_STDERR = 2  # the file itself: sys.stderr may be none, as under pytest
_GRACE_S = 5.0  # for ranks that wait for one that has failed to come to an end (arbitrary)

Result = TypeVar("Result")


class ThreadRankError(HeteroError):
    """A rank failed; ``rank`` is its number, and ``__cause__`` its exception."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {type(error).__name__}: {error}")
        self.rank = rank


class ThreadHangError(HeteroError):
    """Ranks were still at work at the time limit. Their stacks are on standard error."""


def run_on_threads(function: Callable[[int], Result], ranks: int = 3, timeout_s: float = 60.0) -> list[Result]:
    """Call ``function(rank)`` in a thread for each rank, and return what they return, in order of rank.

    The first exception of a rank is raised as a ``ThreadRankError``; the others' waiting for that rank ends. After
    ``timeout_s`` the stacks of all threads are printed and ``ThreadHangError`` is raised; a thread that does not wait
    for others cannot be ended, and stays as a daemon.
    """
    thread_group = ThreadGroup(ranks)
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        set_wire_of_this_thread(ThreadWire(thread_group, rank))
        try:
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append((rank, error))
            thread_group.drop(rank, f"has failed ({type(error).__name__}: {error})")
        else:
            thread_group.drop(rank, "has returned")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    _join(threads, deadline_s, until=lambda: bool(errors))
    if errors:
        _join(threads, min(deadline_s, time.monotonic() + _GRACE_S))
        rank, error = next((e for e in errors if not isinstance(e[1], PeerLostError)), errors[0])
        raise ThreadRankError(rank, error) from error
    if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        for rank in late:
            thread_group.drop(rank, f"was still at work after {timeout_s:g} s")
        raise ThreadHangError(f"ranks {late} were still at work after {timeout_s:g} s; their stacks are above")
    return [results[rank] for rank in range(ranks)]


def _join(threads: list[threading.Thread], deadline_s: float, until: Callable[[], bool] = lambda: False) -> None:
    for thread in threads:
        while thread.is_alive() and not until() and (left_s := deadline_s - time.monotonic()) > 0:
            thread.join(min(left_s, 0.05))
