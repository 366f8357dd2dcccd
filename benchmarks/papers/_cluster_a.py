"""Cluster-A of LB-BSP (section 5.2): 32 equal workers, each with a competing process that comes and goes.

"We inject artificial stragglers by running on each worker a competing process [that] periodically run[s] or sleep[s]
with certain probability; in different workers that probability and the resource consumption are different." Here
worker i of n has, while the process runs, the share s_i = 1 - (1 - 1/L) i / (n - 1) of its CPU, so that the slowest
runs at 1/L of the fastest (Homo: L = 1); it runs in nine of ten slots of 300 s, drawn by the seed. Assumed, as the
paper has no figures: slots and probability, and 1 % scatter of every batch.
"""

from __future__ import annotations

import numpy as np

from hvd_hetero.tools.simulation import Availability, Cluster, Compute, Drivers, Jitter, Network, Worker

WORKERS = 32
LEVELS = {"Homo": 1.0, "Hetero-L2": 2.0, "Hetero-L3": 3.0}
SLOT_S, SLOTS, RUNNING = 300.0, 60, 0.9


def cluster_a(level: str, batch: int, batch_s: float, seed: int) -> Cluster:
    """Return workers whose batch takes ``batch_s`` seconds undisturbed."""
    workers = []
    for i in range(WORKERS):
        share = 1.0 - (1.0 - 1.0 / LEVELS[level]) * i / (WORKERS - 1)
        running = np.random.Generator(np.random.PCG64([seed, 77, i])).random(SLOTS) < RUNNING
        workers.append(
            Worker(
                Compute.at_speed(batch / batch_s),
                Availability.series(np.where(running, share, 1.0), SLOT_S),
                (Jitter("round", 0.01),),
                drivers=Drivers(lag_s=0.25, noise=0.01),
            )
        )
    # c5.2xlarge, 2.5 Gbit/s and more: communication is below 1 % of an iteration (section 3.2).
    return Cluster(tuple(workers), Network(latency_s=1e-4, message_bytes=1.9e6, bandwidth=3e8), seed)
