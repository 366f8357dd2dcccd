"""One rank of the exactness test: trainings of every kind, compared with a plain single-process run."""

from __future__ import annotations

import sys
from functools import partial

import averaging
import torch
import torch_around
from exactness_cases import SAMPLES, compared, policies, train
from pool import serve
from ranks import DEVICE, hvd
from simulated import SimulatedClock

from torch_hooks.gradients import buckets

# Sizes at which a small model takes every way of a large one: weights go alone and are weighed as they arrive.
buckets._ALONE_BYTES, buckets._BUCKET_BYTES = 200, 100
PAUSE_S = 5e-3


def pass_on_device(seconds: float) -> None:
    """Keep the device at work about as long as asked for; its own events tell how long."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # cycles, of some 1.5 GHz


def case(policy: str) -> dict | None:
    rank, ranks = hvd.rank(), hvd.size()
    pass_s = CLOCK.pass_s if CLOCK is not None else pass_on_device
    outcome = train(policy, rank, ranks, int(sys.argv[1]), pass_s, PAUSE_S)
    outcomes = hvd.allgather_object(outcome)
    return compared(outcomes) | {"samples": SAMPLES} if rank == 0 else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    CLOCK = SimulatedClock() if DEVICE == "cpu" else None
    serve(hvd, {policy: partial(case, policy) for policy in policies(2)} | averaging.CASES | torch_around.CASES)
