"""Waiting for a collective: asleep while others compute, awake while the data moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache

_SLEEP_S = 0.5e-3  # at a stretch, so that an early end is not slept through
_UNKNOWN_TRANSFER_S = 2e-3  # until a transfer was timed: a small one, as waking for nothing takes others' processor
_LONGEST_TRANSFER_S = 50e-3  # 25 ms is the longest that was seen to gain by it; beyond 50 it is arbitrary
_YIELDS = 8  # between two looks: yielding is cheaper than looking, and gives Horovod its turn


def wait(
    done: Callable[[], bool], expected_s: float, transfer_s: float, imminent: Callable[[], bool] | None = None
) -> None:
    """Wait until a collective is ``done``, which probably takes ``expected_s``, the last ``transfer_s`` to move data.

    It is awake while the data is likely to move: for two transfer times from the beginning, and from two before the
    expected end to two after it; when ``imminent`` first returns True, the end is expected two transfer times later.
    Figures may be NaN where nothing is known yet. With ``HOROVOD_WAIT_SLEEP_US`` it is never awake.
    """
    # Where there are more ranks than processors, a rank that yields gets its part of them all the same. So it sleeps,
    # as Horovod's own waits then do.
    if pause_s := _pause_s():
        while not done():
            time.sleep(pause_s)
        return
    # Comparisons with NaN are false.
    awake_s = 2 * (min(transfer_s, _LONGEST_TRANSFER_S) if transfer_s > 0.0 else _UNKNOWN_TRANSFER_S)
    began = time.perf_counter()
    while not done():
        waited_s = time.perf_counter() - began
        if imminent is not None and imminent():
            expected_s, imminent = waited_s + awake_s, None
        # Awake at the beginning, too, since this rank may be the last: nothing but the transfer is left then.
        if waited_s <= awake_s or abs(waited_s - expected_s) <= awake_s:
            # Horovod's thread moves the data in many small steps, and a processor that falls idle between them is slow
            # to wake: a transfer of 20 ms took a third longer, on a virtual machine.
            for _ in range(_YIELDS):
                os.sched_yield()
        else:
            # Horovod's own synchronize() spins, on shared cores at the expense of the very ranks that are waited for.
            # A part of the time waited so far: a wait that is short is not made longer.
            time.sleep(min(_SLEEP_S, waited_s / 16))


@cache
def _pause_s() -> float:
    """Return the seconds to sleep at a stretch, from the variable of Horovod's build; 0 if it is not set."""
    value = os.environ.get("HOROVOD_WAIT_SLEEP_US", "")
    return int(value) * 1e-6 if value.isdecimal() else 0.0
