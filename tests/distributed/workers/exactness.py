"""One rank of the exactness test: trains under several policies and compares with a plain single-process run."""

from __future__ import annotations

import math

import horovod.torch as hvd
import torch
from exactness_cases import GLOBAL_BATCH, SAMPLES, Case, cases, compared, train
from simulated import SimulatedClock

from hvd_hetero.communication import buckets as division
from hvd_hetero.testing import report
from torch_hooks.gradients import buckets

# Sizes at which a small model takes every way of a large one: weights go alone and are weighed as they arrive.
buckets._AT_ONCE, division.ALONE, division.MEMBERS = 100, 200, 2
ROUNDS = 100
PAUSE_S = 5e-3


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    rank, n = hvd.rank(), hvd.size()
    clock = SimulatedClock()
    chosen = cases(n)
    if n == 4:  # twice the cores that a small machine has: the policies whose rounds differ most
        chosen = [Case(policy) for policy in ("lb-bsp", "non-blocking", "elastic-bsp", "every round another")]
    results = []
    for case in chosen:
        outcome = train(case, rank, n, ROUNDS, clock.pass_s, PAUSE_S)
        outcomes = hvd.allgather_object(outcome)
        if rank == 0:
            results.append(compared(case, outcomes))
    if rank == 0:
        report({"rounds_per_epoch": math.ceil(SAMPLES / GLOBAL_BATCH), "samples": SAMPLES, "cases": results})


if __name__ == "__main__":
    main()
