"""Watchdogs of one process, one per rank: they find each other, and what they say and do."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from types import SimpleNamespace

from hvd_hetero.balancer import Balancer
from hvd_hetero.communication.side_channel import SideChannel
from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.measurement.stopwatch import Lap
from hvd_hetero.policies import BSP, NonBlocking
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.testing import run_on_threads
from hvd_hetero.watchdog import EXIT_CODE, Patience, Watchdog
from hvd_hetero.watchdog.progress import Progress, register_training
from hvd_hetero.watchdog.whereabouts import _frame_of, locate

SHORT = Patience(warn=0.3, deadlock=0.6, silent=1.0)


class Ranks:
    """Each in a thread, with a watchdog of its own; an allgather that they share."""

    def __init__(self, size, patience=SHORT, collective_timeout_s=math.inf, policy=None):
        self.size, self.policy = size, policy or BSP()
        self.patience, self.collective_timeout_s = patience, collective_timeout_s
        self.ended = {}

    def run(self, *bodies):
        run_on_threads(lambda rank: self._rank(rank, bodies[rank]), len(bodies), timeout_s=30.0)

    def run_alone(self):
        self._balancer = Balancer(BSP(), 0, self.size, 8, clock=time.perf_counter)
        return Progress(self._balancer, (), (), math.inf)

    def _rank(self, rank, body):
        balancer = Balancer(self.policy, rank, self.size, 8, clock=time.perf_counter)
        gather = partial(wire_of_this_thread().allgather_object, name="addresses")
        watchdog = Watchdog(
            balancer, 5, gather, patience=self.patience, waits_in=("waits_here",),
            collective_timeout_s=self.collective_timeout_s, end=lambda code: self.ended.setdefault(rank, code),
        )  # fmt: skip
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
    ranks = Ranks(3, Patience(warn=SHORT.warn, deadlock=SHORT.deadlock, silent=60))  # a busy machine is no silence
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


def test_a_silent_rank_is_named_before_collectives_give_up(caplog):
    ranks = Ranks(2, Patience(warn=60, silent=60), collective_timeout_s=1.5)

    def waits(ranks, rank, balancer):
        in_round(balancer, ends=True)
        wait(lambda: "does not answer" in caplog.text)

    ranks.run(waits, leaves)
    assert ranks.ended == {}
    assert "for rank 1, which does not answer" in caplog.text
    assert "Collectives fail after 1.5 s of it." in caplog.text


def test_ranks_whose_packets_do_not_pass_are_named_where_rounds_end_when_the_first_has_finished(caplog, monkeypatch):
    monkeypatch.setattr(SideChannel, "_send", lambda *_: None)  # a firewall
    ranks = Ranks(2, policy=NonBlocking(2))
    ranks.run(*[lambda *_: wait(lambda: len(caplog.records) == 2)] * 2)
    assert sorted(record.args[0] for record in caplog.records) == [0, 1]
    assert all("let UDP pass between the hosts" in record.getMessage() for record in caplog.records)


def test_looking_goes_on_while_other_trainings_begin_and_end_in_the_process():
    """Each look reads the progress of all trainings; a set of them changed under the one who read it."""
    progress = Ranks(1).run_alone()
    failures, begun = [], []

    def look():
        until = time.monotonic() + 0.4
        try:
            while time.monotonic() < until:
                progress.where()
        except RuntimeError as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        looking.start()
        while looking.is_alive():
            begun.append(Balancer(BSP(), 0, 2, 8, clock=time.perf_counter))
            register_training(begun[-1])
            del begun[: len(begun) // 100 * 50]
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def stack_of(thread):
    """The frames of a thread, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread.ident])]


def test_locate_names_the_users_line_and_the_call_that_waits():
    found = []

    def train():
        wait(done.is_set)

    done = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    while not any(frame.f_code.co_name == "wait" for frame in stack_of(thread)):
        time.sleep(0.01)
    found.append(locate(thread.ident, ("waits_here",)))
    done.set()
    thread.join()
    waits, of_its_own, where = found[0]
    assert waits
    assert not of_its_own
    assert where.startswith("test_watchdog.py:")
    assert "train" in where


def frames_of(**modules):
    """Where a thread is said to be whose functions call each other so, the outermost first; each is in its module."""
    done = threading.Event()
    call = partial(done.wait, 10)
    for name, (module, file) in reversed(modules.items()):
        scope = {"__name__": module, "call": call}
        exec(compile(f"def {name}(): call()", file, "exec"), scope)
        call = scope[name]
    thread = threading.Thread(target=call)
    thread.start()
    while (frame := _frame_of(thread.ident)) is None or frame.f_code.co_name != "wait":
        time.sleep(0.01)
    del frame
    try:
        return locate(thread.ident, ("horovod.",))
    finally:
        done.set()
        thread.join()


HOROVOD, INSTALLED = "/env/site-packages/horovod", "/env/site-packages/mine/train.py"


def test_a_program_that_is_installed_does_not_wait_because_horovod_has_called_it(monkeypatch):
    """Nobody's line is in it that is not a package's; it was taken for a rank that waits."""
    monkeypatch.setattr("hvd_hetero.watchdog.whereabouts._is_library", lambda module, file: True)
    elastic = ("horovod.common.elastic", f"{HOROVOD}/common/elastic.py")
    at_work = frames_of(wrapper=elastic, train=("mine.train", INSTALLED))
    assert not at_work.waits
    assert at_work.where == "train.py:1, train()"
    collective = ("horovod.torch.mpi_ops", f"{HOROVOD}/torch/mpi_ops.py")
    waiting = frames_of(wrapper=elastic, train=("mine.train", INSTALLED), synchronize=collective)
    assert waiting.waits
    assert waiting.where == "hvd.synchronize() at train.py:1, train()"


STALLS = """
import gc, os, sys, threading, time
from hvd_hetero.watchdog.whereabouts import _frame_of, locate

class Lets:
    def __init__(self):
        self.itself = self
        living.add(id(self))

    def __del__(self):
        living.discard(id(self))
        time.sleep(0)  # lets other threads run, in the middle of a collection

def begins_and_ends():
    while True:
        threads = [threading.Thread(target=lambda: None) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

def looks():
    while True:
        while len(living) < 200:  # more would come during each collection than it finds, and the next take for ever
            Lets()
        locate(main, ())
        looked.append(None)

def deep(calls, seconds):
    if calls:
        deep(calls - 1, seconds)
    else:
        time.sleep(seconds)

main, looked, living = threading.get_ident(), [], set()
gc.set_threshold(1)
sys.setswitchinterval(1e-5)
for _ in range(8):
    threading.Thread(target=deep, args=(150, 60), daemon=True).start()
for work in (begins_and_ends, begins_and_ends, looks, looks):
    threading.Thread(target=work, daemon=True).start()
until = time.monotonic() + 0.5
while time.monotonic() < until or len(looked) < 200:
    deep(100, 0.0005)
os._exit(0)
"""


def test_looking_at_a_stack_stops_no_thread_while_garbage_is_collected():
    """Issue 106883 of CPython: a collection in the middle of it left the whole process hanging, on Python 3.11."""
    ended = subprocess.run([sys.executable, "-c", STALLS], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_stack_is_read_only_while_nothing_goes_on(monkeypatch):
    ranks = Ranks(1)
    progress = ranks.run_alone()
    balancer, looked = progress.training, []
    monkeypatch.setattr(
        "hvd_hetero.watchdog.progress.locate", lambda *_: looked.append(1) or (True, False, "somewhere")
    )
    register_training(balancer)
    for number in range(3):
        balancer.begin(MicroBatch(balancer.plan(), 4))
        assert progress.standstill(balancer) is None, "it has gone on"
        assert len(looked) == number
        assert progress.standstill(balancer).where == "somewhere"
        assert len(looked) == number + 1
        balancer.discard_round()
        assert progress.standstill(balancer) is progress.standstill(balancer) is None, "it is in no round"
    progress.joins = True
    assert progress.standstill(balancer) is None, "its wait has only begun"
    assert progress.standstill(balancer).where == "somewhere", "it waits for all, as at the end of an evaluation"


def test_a_wait_begins_where_the_rank_last_went_on_and_anew_where_it_is_elsewhere(monkeypatch):
    ranks = Ranks(1)
    progress = ranks.run_alone()
    balancer, now, at = progress.training, [100.0], ["here"]
    monkeypatch.setattr("hvd_hetero.watchdog.progress.locate", lambda *_: (True, False, at[0]))
    monkeypatch.setattr("hvd_hetero.watchdog.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert progress.has_progressed(balancer)
    for seconds in (1.0, 2.0):
        now[0] = 100.0 + seconds
        assert progress.where().for_s == seconds
    at[0] = "there"
    assert progress.where().for_s == 0.0
    now[0] += 1.5
    assert progress.where().for_s == 1.5
    balancer.begin(MicroBatch(balancer.plan(), 4))
    assert progress.where().for_s == 0.0


def test_a_wait_at_the_end_of_an_evaluation_is_no_older_than_that_end(monkeypatch):
    """All ranks were ended in the collective that followed an evaluation of more than patience.silent seconds."""
    ranks = Ranks(1)
    progress = ranks.run_alone()
    balancer, now = progress.training, [100.0]
    monkeypatch.setattr("hvd_hetero.watchdog.progress.locate", lambda *_: (True, False, "here"))
    monkeypatch.setattr("hvd_hetero.watchdog.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(400):
        now[0] += 1.0
        assert progress.standstill(balancer) is None, "it evaluates"
    progress.joins = True
    for seconds in (0.0, 3.0):
        now[0] += seconds
        assert progress.where().for_s == seconds


def test_a_watchdog_that_is_closed_leaves_neither_thread_nor_socket():
    def there():
        """Threads, and sockets by the kernel's numbers."""
        sockets = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                sockets.add(os.readlink(f"/proc/self/fd/{number}"))
        return set(threading.enumerate()) | {link for link in sockets if link.startswith("socket:")}

    before = there()
    Ranks(2).run(lambda *_: None, lambda *_: None)
    assert there() <= before, "each body has ended, and its watchdog was closed"


def test_a_rank_waits_where_another_thread_reads_the_times_of_a_round():
    """On a GPU they are known when the sums of all ranks are there, and the training thread is in backward()."""
    asked, known = threading.Event(), threading.Event()

    def read():
        asked.set()
        known.wait(10)
        return Lap(math.nan, math.nan, math.nan)

    ranks = Ranks(1)
    progress, balancer = ranks.run_alone(), ranks._balancer
    balancer.meter.stopwatch = SimpleNamespace(start=lambda: None, stop=lambda: None, read=read)
    balancer.begin(MicroBatch(balancer.plan(), 8))
    assert not progress.where().waits
    thread = threading.Thread(target=balancer.report)
    thread.start()
    assert asked.wait(10)
    found = progress.where()
    known.set()
    thread.join()
    assert (found.waits, found.stage) == (True, "0 end")
    assert not progress.where().waits


def test_the_thread_that_trains_may_be_another_one_than_made_it():
    watchdog = Watchdog(Balancer(BSP(), 0, 1, 8, clock=time.perf_counter), 5, lambda payload: [payload])
    thread = threading.Thread(target=watchdog.trains_here)
    thread.start()
    thread.join()
    assert watchdog._progress.thread == thread.ident != threading.get_ident()
