"""The driver of jobs whose two ranks Ray starts, on a cluster that ``RAY_ADDRESS`` names.

    python ray_jobs.py JOB ARGUMENTS

The last line that it prints has what came of it. Ranks get the functions of this file by value, all else by import: in
the functions, since this process needs neither PyTorch nor what imports it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from functools import partial
from typing import Any

import ray
from horovod.ray import ElasticRayExecutor, RayExecutor

from hvd_hetero.communication.addresses import job_key
from hvd_hetero.watchdog.patience import VARIABLE

PAUSE_S = 5e-3
LATE_S = 3.0  # once, of rank 1: long enough for the other one to ask and to say so
LATE_AT, DEAD_AT = 5, 10  # micro-batches, one a round


def exact(policies: list[str], rounds: int) -> dict[str, Any]:
    """Train on one rank under each policy beside a single process, then say where this rank listens."""
    import horovod.torch as hvd
    import torch
    from exactness_cases import SAMPLES, compared, train
    from hosts import addresses
    from simulated import SimulatedClock

    hvd.init()
    torch.set_num_threads(1)
    clock = SimulatedClock()
    found: dict[str, Any] = {}
    for policy in policies:
        outcome = train(policy, hvd.rank(), hvd.size(), rounds, clock.pass_s, PAUSE_S)
        outcomes = hvd.allgather_object(outcome)
        found[policy] = compared(outcomes) | {"samples": SAMPLES} if hvd.rank() == 0 else None
    keys = hvd.allgather_object(hashlib.sha256(job_key()).hexdigest() if job_key() else "")
    return found | {"rank": hvd.rank(), "keys": keys, "interface": os.environ["HOROVOD_GLOO_IFACE"], **addresses()}


def dead(rounds: int) -> None:
    """Train on one rank that was of `exact`, until rank 1 is first late, and then is no more."""
    import horovod.torch as hvd
    from exactness_cases import train

    os.environ[VARIABLE] = "warn=1"
    clock, done = time.perf_counter, 0

    def pass_s(seconds: float) -> None:
        nonlocal done
        clock.pass_s(seconds)  # type: ignore[attr-defined]  # which `exact` has put there
        done += 1
        if hvd.rank() == 1 and done == LATE_AT:
            time.sleep(LATE_S)
        if hvd.rank() == 1 and done == DEAD_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    train("lb-bsp", hvd.rank(), hvd.size(), rounds, pass_s, PAUSE_S)


def of_fixed_size(policies: list[str], rounds: int) -> dict[str, Any]:
    """A job that trains, and then loses a rank."""
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    executor.start()
    ranks = executor.run(exact, [policies, rounds])
    begin_s = time.monotonic()
    try:
        executor.run(dead, [rounds])
        lost = "nothing"
    except ray.exceptions.RayError as error:
        lost = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - begin_s
    executor.shutdown()
    return {"ranks": ranks, "lost": lost, "took_s": took_s}


def elastic(nic: str, environ: dict[str, str], spec: str) -> int:
    """One job whose ranks write down what they see; how many came to the end.

    As on Debian, the name of this host means loopback to itself.
    """
    resolve, own = socket.gethostbyname, socket.gethostname()
    socket.gethostbyname = lambda name: "127.0.1.1" if name == own else resolve(name)
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, nics={nic}, reset_limit=3)
    executor = ElasticRayExecutor(settings, env_vars=environ)
    executor.start()
    return len(executor.run(partial(reliable, spec)))


def reliable(spec: str) -> None:
    """One rank of it."""
    import _reliability_rank

    sys.argv = ["_reliability_rank.py", spec]
    _reliability_rank.main()


if __name__ == "__main__":
    ray.init()
    jobs = {"of fixed size": of_fixed_size, "elastic": elastic}
    result = json.dumps(jobs[sys.argv[1]](*json.loads(sys.argv[2])))
    sys.stdout.write(f"RESULT {result}\n")  # at once, where print() takes two calls
    sys.stdout.flush()
