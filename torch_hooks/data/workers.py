"""Worker processes of a loader end with their rank."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import get_worker_info

from torch_hooks.data.turns import Turns


class EndsWithRank:
    """A ``worker_init_fn`` that ends the worker with the process that made this object, and calls the user's."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._rank = os.getpid()
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin to wait for the rank's end, in a thread."""
        # A worker is a fork of its rank, with a copy of each of its connections to other ranks. If the rank is killed,
        # these stay open, and no other rank learns of it before the worker ends. By itself it looks for its parent,
        # which may be a fork server, every five seconds. So it does on other systems, old Linuxes, or without a thread.
        with suppress(AttributeError, OSError, RuntimeError):
            threading.Thread(target=_end_after, args=(os.pidfd_open(self._rank),), daemon=True).start()
        if self._then is not None:
            info: Any = get_worker_info()
            if isinstance(info.dataset, Turns):
                object.__setattr__(info, "dataset", info.dataset.dataset)  # where a function looks for the user's
            self._then(worker)


def _end_after(process: int) -> None:
    # Not select(), which takes no descriptor from 1,024 on: a rank may have as many connections.
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)
