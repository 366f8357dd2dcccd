"""A training's session: what holds it, what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import pytest

from hvd_hetero.communication.thread_wire import wire_of_this_thread
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, StaticAllocation
from hvd_hetero.session import Session
from hvd_hetero.testing import run_on_threads
from hvd_hetero.watchdog import Patience

SHORT = Patience(warn=0.3, deadlock=0.6, silent=1.0)


def sessions(size, **options):
    """Ranks that are threads, and are taken for processes: each has sockets and a watchdog of its own."""

    def make(rank):
        return Session("non-blocking", rank, size, 32, wire=wire_of_this_thread(), patience=SHORT, **options)

    return run_on_threads(make, size)


def ours():
    """Threads of this package."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("hvd-hetero-watchdog")}


@pytest.mark.parametrize("telemetry", [False, True])
def test_a_training_that_is_dropped_is_gone_with_its_threads(tmp_path, monkeypatch, telemetry):
    """Its watchdog held it, so that each LoadBalance of a process stayed, with a thread and its sockets."""
    monkeypatch.setattr("hvd_hetero.watchdog.watchdog._ANSWERS_FOR_S", 0.0)
    before = ours()  # of other tests, which may end meanwhile
    made = sessions(2, telemetry=tmp_path / "run.jsonl" if telemetry else None)
    held = [weakref.ref(session.balancer) for session in made]
    assert len(ours() - before) == 2
    made.clear()
    until = time.monotonic() + 20
    while (any(balancer() for balancer in held) or ours() - before) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)  # a watchdog that is just looking holds its training for as long
    assert [balancer() for balancer in held] == [None, None]
    assert ours() <= before
    if telemetry:
        assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["workers"] == 2


def test_a_training_that_is_closed_leaves_no_thread():
    before = ours()
    for session in sessions(2):
        session.close()
    assert ours() <= before


@pytest.mark.parametrize(
    ("policy", "sync", "sums"),
    [
        ("lb-bsp", "allreduce", True),
        ("non-blocking", "allreduce", False),
        (ElasticBSP(updates="local"), "allreduce", False),
        ("bsp", "d-psgd", False),
    ],
)
def test_rounds_of_nothing_but_a_sum_of_gradients(policy, sync, sums):
    assert Session(policy, 0, 4, 64, sync=sync).sums_gradients == sums


def test_a_patience_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"patience.* 30\b.*patience=hvd_hetero\.watchdog"):
        Session("bsp", 0, 1, 8, patience=30)


@pytest.mark.parametrize(
    ("policy", "matters"), [(BSP(), False), (StaticAllocation([1, 2]), False), (NonBlocking(2), True), (LBBSP(), True)]
)
def test_it_matters_when_work_is_done_to_plans_and_to_rounds_that_the_first_rank_ends(policy, matters):
    session = Session(policy, 0, 2, 8)
    assert session.depends_on_time == matters
    session.close()
