"""Waiting for a collective without spinning."""

from __future__ import annotations

import time

import horovod.torch as hvd

__all__ = ["wait"]

_LONGEST_SLEEP_S = 0.5e-3
_SLEEP_SHARE = 1 / 16


def wait(handle: int) -> None:
    """Wait for a collective.

    Horovod's own ``synchronize`` spins on the processor until the operation is done, which on shared cores takes time
    from the very ranks that are waited for. Here each sleep is a sixteenth of the time waited so far, half a
    millisecond at most: the wait overshoots by that share, and a short one is still polled finely.
    """
    began = time.perf_counter()
    while not hvd.poll(handle):
        time.sleep(min(_LONGEST_SLEEP_S, (time.perf_counter() - began) * _SLEEP_SHARE))
    hvd.synchronize(handle)
