"""Where NARX trains: one thread of low priority, shared by all predictors of the process (lb-bsp section 4.2).

Trainings queue first come, first served, which is the paper's round robin, since each predictor has one at a time.

Across the processes of one machine nothing is coordinated: ranks on the same cores may train at the same moment.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)

# With 19 the thread would starve while it holds Python's lock.
NICENESS = 10
Parameters = tuple[float, ...]


@functools.cache
def pool(pid: int) -> ThreadPoolExecutor:
    """Return the thread of this process: threads do not survive a fork, so the child (another ``pid``) gets its own."""
    return ThreadPoolExecutor(1, f"hvd-hetero-training-{pid}", initializer=_lower_priority)


def _lower_priority() -> None:
    """Lower the thread's priority, which Linux keeps for each."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # another system, or a sandbox: it trains at full priority
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


class Trainer:
    """Trains one predictor, in a thread unless ``background`` is False; at most one training is under way."""

    def __init__(self, background: bool) -> None:
        self.background = background
        self._training: Future[Parameters | None] | None = None
        self._pid = 0  # another one than this process's: forked during a training, whose thread did not come along
        self._warned = False

    @property
    def busy(self) -> bool:
        """True while a training is under way."""
        return self._training is not None and self._pid == os.getpid()

    def begin(self, train: Callable[..., Parameters | None], *args: Any) -> None:
        """Begin a training; a function and what it is called with."""
        self._pid, self._training = os.getpid(), None
        if not self.background:
            self._training = Future()
            self._training.set_result(train(*args))
            return
        # No lock for all ranks of a machine. A training is a few milliseconds of every hundred rounds; files that
        # outlive a crash, and their permissions, would cost more. Each rank begins at another round instead.
        try:
            self._training = pool(self._pid).submit(train, *args)
        except RuntimeError as error:  # no thread is available, or the interpreter is ending
            if not self._warned:
                log.warning("NARX keeps its parameters, a training could not be started: %r", error)
            self._warned = True

    def result(self) -> Parameters | None:
        """Return the parameters that a training has found since the last call; None if there are none."""
        if not self.busy or self._training is None or not self._training.done():
            return None
        training, self._training = self._training, None
        if error := training.exception():
            log.error("training of a predictor failed; it goes on with the parameters it has", exc_info=error)
            return None
        return training.result()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: a training under way reports to the original only."""
        return {**self.__dict__, "_training": None}
