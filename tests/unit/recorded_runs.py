"""Finished rounds and records for tests of what looks on."""

from __future__ import annotations

import numpy as np
import tables

from hvd_hetero.columns import COLUMNS
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable
from hvd_hetero.telemetry import TelemetryWriter

MEMORY = ("memory_base_mib", "memory_slope_mib", "memory_peak_mib")


def table(workers: int = 2, **figures) -> RoundTable:
    """A table with these figures, one for all ranks or one for each; all else is 1."""
    zeros = ("lap_s", "limit", "slope_s", "intercept_s", "saturation", "fixed_samples", "once_s", *MEMORY)
    return tables.table(workers, **dict.fromkeys(COLUMNS, 1.0) | dict.fromkeys(zeros, 0.0) | figures)


def finished(number: int, workers: int = 2, elapsed_s: float = 2.5, **figures) -> FinishedRound:
    """Round ``number`` of an epoch of three rounds."""
    samples = np.broadcast_to(figures.pop("samples", 10), workers)
    plan = RoundPlan.of(samples)
    return FinishedRound(number, number // 3, plan, table(workers, samples=samples, **figures), elapsed_s)


def write(settings, rounds: int, workers: int = 2) -> TelemetryWriter:
    """Write so many rounds; the waiting of round r is r seconds on every rank. The writer is left open."""
    writer = TelemetryWriter(settings, policy="bsp", workers=workers, global_batch=10 * workers)
    for number in range(rounds):
        writer(finished(number, workers, wait_s=number - 1.0))
    return writer


def recorded(path, rounds=6, workers=3, settings=None):
    """A run whose ranks take different times, with some time of the user's own between rounds."""
    rng = np.random.default_rng(0)
    work = rng.uniform(0.01, 0.05, (rounds, workers)).round(6)
    wait = (0.06 - work).round(6)
    writer = write(settings or path, 0, workers)
    for i in range(rounds):
        told = {"compute_s": work[i], "input_s": 0.002, "wait_s": wait[i - 1] if i else 0.0}
        writer(finished(i, workers, 0.0734567, samples=[10, 20, 30][:workers], **told))
    writer.close()
    return work, wait
