"""The time that this process has spent in Python's garbage collector.

The interpreter calls back before and after each collection, in whatever thread it happens. Collections do not overlap,
so one beginning is kept. The callbacks stay for the life of the process; a pair of them costs about a microsecond.
"""

from __future__ import annotations

import gc
import time
from typing import Any


class _Collections:
    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Take the time of a collection; ``phase`` is "start" or "stop"."""
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self.total_s += now_s - self._began_s


_collections = _Collections()


def collecting_s() -> float:
    """Return the seconds of all collections since the first call."""
    if _collections not in gc.callbacks:
        gc.callbacks.append(_collections)
    return _collections.total_s
