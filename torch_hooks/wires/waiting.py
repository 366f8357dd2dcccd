"""Waiting for a collective: asleep while others compute, awake while the data moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache

_LONGEST_SLEEP_S = 0.5e-3
_SLEEP_SHARE = 1 / 16
_UNKNOWN_TRANSFER_S = 2e-3
_LONGEST_TRANSFER_S = 50e-3  # 25 ms is the longest that was seen to gain by it; beyond 50 it is arbitrary
_YIELDS = 8  # between two looks: yielding is cheaper than looking, and gives Horovod its turn


def wait(
    done: Callable[[], bool], expected_s: float, transfer_s: float, imminent: Callable[[], bool] | None = None
) -> None:
    """Wait until a collective is ``done``, which probably takes ``expected_s``, the last ``transfer_s`` to move data.

    Horovod's own ``synchronize`` spins on the processor until the operation is done, which on shared cores takes time
    from the very ranks that are waited for. Sleeping all the while costs too: Horovod's thread moves the data in many
    small steps, and a processor that falls idle between them is slow to wake (a transfer of 20 ms took a third longer,
    measured on a virtual machine). So this is awake whenever the data is likely to move, which is when the last rank
    has come: for two transfer times from the beginning, since that may be this one, and from two before the expected
    end to two after it; when ``imminent`` says so for the first time, the end is expected two transfer times later.
    Awake, it yields the processor to others. Otherwise it sleeps, a sixteenth of the time waited so far at a
    stretch, half a millisecond at most, so that an early end is not slept through. Figures may be NaN where nothing is
    known yet; a transfer of more than 50 ms counts as that long.

    With ``HOROVOD_WAIT_SLEEP_US`` it is never awake, as Horovod's own waits then are not, and sleeps that long at a
    stretch: where there are more ranks than processors, one that yields gets its part of them all the same.
    """
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
        if waited_s <= awake_s or abs(waited_s - expected_s) <= awake_s:
            for _ in range(_YIELDS):
                os.sched_yield()
        else:
            time.sleep(min(_LONGEST_SLEEP_S, waited_s * _SLEEP_SHARE))


@cache
def _pause_s() -> float:
    """Return the seconds to sleep at a stretch, from the variable of Horovod's build; 0 if it is not set."""
    told = os.environ.get("HOROVOD_WAIT_SLEEP_US", "")
    return int(told) * 1e-6 if told.isdecimal() else 0.0
