"""Cluster-B of LB-BSP (section 5.3): 32 workers of Table 2's types, disturbed as machines of the Google cluster were.

    type          cores   number   speed assumed
    m4.2xlarge      8       17       1
    c5.2xlarge      8       10       1.5      (newer cores, 3.0 GHz and wider vectors, against 2.3 GHz)
    r4.2xlarge      8        2       1
    m4.4xlarge     16        2       2
    m4.xlarge       4        1       0.5

Dynamics: with ``--traces DIR``, on each worker three slots run tasks of the Google trace that come and go, and
the rest is the worker's (``benchmarks/record_traces.py`` has the schedule, whose numbers are older than this file);
else the shares that were recorded under that schedule, ``tests/data/traces``, each worker from another point on.

Assumed, since the paper has no figures: one point lasts ``STEP_S``, some ten updates of LB-BSP (the paper replays
starts and ends of tasks in real time); each batch scatters by ``scatter``, and one in 500 takes up to twice as long
(the "spikes" of Fig. 11); drivers are read with an error of 0.01.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from _tables import ROOT
from record_traces import POINT_ROUNDS, schedule

from hvd_hetero.tools.simulation import Availability, Cluster, Compute, Drivers, Jitter, Network, RandomSlowDown, Worker

TYPES = {
    "m4.2xlarge": (1.0, 17),
    "c5.2xlarge": (1.5, 10),
    "r4.2xlarge": (1.0, 2),
    "m4.4xlarge": (2.0, 2),
    "m4.xlarge": (0.5, 1),
}
BATCH, BATCH_S, STEP_S, POINTS = 128, 2.0, 30.0, 400


def series(traces: Path | None, count: int, seed: int) -> tuple[str, list[tuple[list[float], list[float]]]]:
    """Return the source, and each worker's available shares of CPU and memory, point by point."""
    if traces is not None:
        path = traces / "google_cpu_memory_200.csv.gz"
        plans = [schedule(path, POINTS * POINT_ROUNDS, 1000 * seed + i)[::POINT_ROUNDS] for i in range(count)]
        return "the Google trace", [([c for c, _ in plan], [1 - m for _, m in plan]) for plan in plans]
    rng = np.random.Generator(np.random.PCG64([seed, 11]))
    recorded = []
    for path in sorted((ROOT / "tests" / "data" / "traces").glob("series_*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))[::POINT_ROUNDS]
        recorded.append(([float(r["cpu"]) for r in rows], [float(r["memory"]) for r in rows]))
    found = []
    for i in range(count):
        cpu, memory = recorded[i % len(recorded)]
        offset = int(rng.integers(len(cpu)))
        found.append((cpu[offset:] + cpu[:offset], memory[offset:] + memory[:offset]))
    return "the project's recordings", found


def cluster_b(traces: Path | None, scatter: float, seed: int = 0) -> tuple[str, Cluster]:
    """Return the source of the dynamics, and the cluster."""
    source, available = series(traces, sum(n for _, n in TYPES.values()), seed)
    workers = []
    for speed, count in TYPES.values():
        for _ in range(count):
            cpu, memory = available[len(workers)]
            workers.append(
                Worker(
                    Compute.at_speed(BATCH * speed / BATCH_S),
                    Availability.series(cpu, STEP_S),
                    (Jitter("round", scatter), RandomSlowDown("round", 2.0, 0.002)),
                    drivers=Drivers(
                        lag_s=0.25, noise=0.01, memory=Availability.series(np.maximum(memory, 1e-3), STEP_S)
                    ),
                )
            )
    network = Network(latency_s=1e-4, message_bytes=1.9e6, bandwidth=3e8)
    return source, Cluster(tuple(workers), network, seed)
