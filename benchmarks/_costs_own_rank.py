"""One rank of ``costs.py --only own``: what weights and costs take of this rank's time in steps of about 50 ms."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch.distributed as dist
from _costs_rank import FIRST, GLOBAL_BATCH, TICK, Job, join_job

from hvd_hetero.data.sample_costs import SampleCosts
from hvd_hetero.measurement.cost_fit import CostMeter
from hvd_hetero.testing import report
from torch_hooks.beside.loss_factors import LossFactors
from torch_hooks.data.counting import Weights

STEP_S = 0.05
PARTS = {
    "dividing by cost": (SampleCosts, "share_out"),
    "learning costs": (CostMeter, "learn"),
    "weighing a batch": (Weights, "__call__"),
    "starting the weights' sum": (LossFactors, "announce"),
    "hearing the weights' sum": (LossFactors, "of_batch"),
}


class Spent:
    """Seconds of the processor, and of the clock, in calls of one method."""

    def __init__(self, owner: Any, method: str) -> None:
        self.cpu_s = self.wall_s = 0.0
        inner = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **named)
            finally:
                self.cpu_s += time.thread_time() - cpu
                self.wall_s += time.perf_counter() - wall

        setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    join_job()
    step_s = seconds(Job(padded=True), 10)[0]
    texts = max(round(GLOBAL_BATCH * STEP_S / step_s), 2 * dist.get_world_size())
    spent = {name: Spent(*of) for name, of in PARTS.items()}
    step_s, before = seconds(Job(padded=True, global_batch=texts), options.rounds, spent)
    each = {
        name: [(after - was) / options.rounds for after, was in zip((of.cpu_s, of.wall_s), before[name], strict=True)]
        for name, of in spent.items()
    }
    report({"step_s": step_s, "texts": texts, "spent": each})
    dist.destroy_process_group()


def seconds(job: Job, rounds: int, spent: dict[str, Spent] | None = None) -> tuple[float, dict[str, Any]]:
    """Return the median seconds of a round, after some that do not count, and what was spent until these."""
    costs = {"cost_of": job.lengths, "weight_of": lambda batch: sum(batch[1])}
    trained = job.balanced("own", [], **(costs if spent else {}))
    for _ in range(FIRST):
        next(trained)
    before = {name: (of.cpu_s, of.wall_s) for name, of in (spent or {}).items()}
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        next(trained)
        took.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(TICK, flush=True)
    return statistics.median(took), before


if __name__ == "__main__":
    main()
