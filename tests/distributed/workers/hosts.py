"""One rank of several hosts: trainings that are compared with a single process, on links that are cut meanwhile.

A line of standard output asks the test for a cut.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from exactness_cases import SAMPLES, compared, policies, train
from pool import serve
from ranks import OVER_TORCH, hvd
from simulated import SimulatedClock

from hvd_hetero.communication.addresses import listen
from hvd_hetero.watchdog.patience import VARIABLE

PAUSE_S = 5e-3
CUT_S, FOR_GOOD = "cut for seconds: ", "cut for good"
LONG = 60  # rounds of a training that is cut off, of 20 ms at least
# What ends a job whose link is cut for good: the watchdog, or before it Horovod's collectives.
PATIENCE = "warn=2,deadlock=4,silent=6"
HOROVOD_GIVES_UP_S = 20  # more than ranks on a busy machine are apart when they first meet


def exact(policy: str, rounds: int, each: Callable[[], None] = lambda: None) -> dict | None:
    def pass_s(seconds: float) -> None:
        CLOCK.pass_s(seconds)
        each()

    outcome = train(policy, hvd.rank(), hvd.size(), rounds, pass_s, PAUSE_S)
    outcomes = hvd.allgather_object(outcome)
    return compared(outcomes) | {"samples": SAMPLES} if hvd.rank() == 0 else None


def cut_off(asks: str) -> dict[str, Any]:
    """Train on, while the link is cut a quarter of the way through; say how long the longest micro-batch took."""
    longest_s, done, last_s = 0.0, 0, time.monotonic()

    def each() -> None:
        nonlocal longest_s, done, last_s
        longest_s = max(longest_s, time.monotonic() - last_s)
        done, last_s = done + 1, time.monotonic()
        if done == LONG // 4 and hvd.rank() == 0:
            print(asks, flush=True)
        time.sleep(0.02)

    found = exact("lb-bsp", LONG, each)
    return (found or {}) | {"longest_s": longest_s}


def for_good() -> None:
    if OVER_TORCH:
        os.environ[VARIABLE] = PATIENCE
    cut_off(FOR_GOOD)


def addresses() -> dict[str, list[str]]:
    """Where this rank listens, what its sockets are bound to, and where it would listen if no interface was named."""
    bound = {c.laddr.ip.removeprefix("::ffff:") for c in psutil.Process().net_connections("tcp") if c.raddr}
    found = {"named": listening(), "bound": sorted(bound)}
    for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        os.environ.pop(name, None)
    return found | {"unnamed": listening()}


def listening() -> list[str]:
    listeners, _ = listen()
    found = [listener.getsockname()[0] for listener in listeners]
    for listener in listeners:
        listener.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(HOROVOD_GIVES_UP_S)
    CLOCK = SimulatedClock()
    rounds = int(sys.argv[1])
    cases: dict[str, Callable[[], Any]] = {policy: partial(exact, policy, rounds) for policy in policies(2)}
    cases |= {"a cut of 3 s": partial(cut_off, f"{CUT_S}3"), "a cut for good": for_good, "addresses": addresses}
    serve(hvd, cases)
