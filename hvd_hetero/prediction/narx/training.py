"""Where predictors train: a few low-priority threads, shared by all predictors of the process (lb-bsp section 4.2).

At most ``max(1, cores // 2)`` threads, where cores are those this process may run on; jobs queue first come, first
served, which is the paper's round robin when every predictor asks at most once at a time. Each thread lowers its own
priority (Linux keeps one per thread) by 10: not by 19, because a thread that is starved while it holds the
interpreter's lock would make the training wait for it. For the same reason jobs should be short and give way often.

Across the processes of one machine nothing is coordinated: ranks on the same cores may train at the same moment, each
within its own limit. A job is a few milliseconds of every hundred rounds, so a lock for all of them would cost more
(files that outlive a crash, permissions) than it saves. Instead, each process puts its first training off by another
number of rounds.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

log = logging.getLogger(__name__)

NICENESS = 10


def thread_limit() -> int:
    """Return half the cores that this process may use, at least one."""
    return max(1, len(psutil.Process().cpu_affinity() or ()) // 2)


def submit(job: Callable[[], None]) -> None:
    """Queue a job that reports on its own; returns at once. An exception in it is logged, never lost."""
    _pool(os.getpid()).submit(_guarded, job)


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the pool of this process: threads do not survive a fork, so the child (another ``pid``) gets its own."""
    return ThreadPoolExecutor(thread_limit(), f"hvd-hetero-training-{pid}", initializer=_lower_priority)


def _lower_priority() -> None:
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    except OSError as error:  # another system than Linux, or a sandbox: training still works, at full priority
        log.warning("training of predictors runs at normal priority: %r", error)


def _guarded(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        log.exception("training of a predictor failed; it goes on with the parameters it has")
