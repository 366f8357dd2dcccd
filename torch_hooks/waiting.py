"""Waiting for a collective: asleep while others compute, awake while the data moves."""

from __future__ import annotations

import os
import time
from typing import cast

import horovod.torch as hvd
import torch

__all__ = ["wait"]

_LONGEST_SLEEP_S = 0.5e-3
_SLEEP_SHARE = 1 / 16
_UNKNOWN_TRANSFER_S = 2e-3
_LONGEST_TRANSFER_S = 20e-3
_YIELDS = 8  # between two looks: yielding is cheaper than looking, and what gives Horovod its turn


def wait(handle: int, expected_s: float, transfer_s: float) -> torch.Tensor:
    """The result of a collective that is expected to take ``expected_s``, the last ``transfer_s`` of it to move data.

    Horovod's own ``synchronize`` spins on the processor until the operation is done, which on shared cores takes time
    from the very ranks that are waited for. Sleeping all the while costs too: Horovod's thread moves the data in many
    small steps, and a processor that falls idle between them is slow to wake (two hundredths of a step of 80 ms,
    measured on a virtual machine). So this sleeps until the end is near, a sixteenth of the time waited so far at
    a stretch, half a millisecond at most, so that an early end is not slept through. It stays awake from two
    transfer times before the expected end to two after it, yielding the processor to whoever wants it; then it sleeps
    again. Figures may be NaN where nothing is known yet.
    """
    # NaN is not below anything, so what is not known takes the other branch.
    transfer_s = transfer_s if transfer_s < _LONGEST_TRANSFER_S else _UNKNOWN_TRANSFER_S
    awake_from_s = expected_s - 2 * transfer_s if expected_s > 2 * transfer_s else 0.0
    awake_to_s = max(awake_from_s, 0.0) + 4 * transfer_s
    began = time.perf_counter()
    while not hvd.poll(handle):
        waited_s = time.perf_counter() - began
        if awake_from_s <= waited_s <= awake_to_s:
            for _ in range(_YIELDS):
                os.sched_yield()
        else:
            time.sleep(min(_LONGEST_SLEEP_S, waited_s * _SLEEP_SHARE))
    return cast(torch.Tensor, hvd.synchronize(handle))
