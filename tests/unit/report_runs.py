"""Runs made by hand or by the simulator, for the tests of reports."""

import contextlib

import numpy as np

from hvd_hetero.telemetry import Run, TelemetryWriter
from hvd_hetero.tools.simulation import RoundSimulation, Simulated


def run_of(samples, compute_s, elapsed_s, *, policy="bsp", start=1, **columns) -> Run:
    """Return a run of these rounds, (rounds, ranks); what is not given is 0.

    A plan is what was done, and waiting is not known.
    """
    samples = np.asarray(samples)
    rounds, workers = samples.shape
    given = {"samples": samples, "plan": samples, "compute_s": compute_s, "micro_batches": np.minimum(samples, 1)}
    given["wait_s"] = np.full((rounds, workers), np.nan)
    given |= columns
    batch = int(samples.sum(axis=1).max(initial=1))
    return Run.of(policy, workers, batch, round=np.arange(start, start + rounds), elapsed_s=elapsed_s, **given)


def by_hand() -> Run:
    """Two ranks, a start and four rounds, whose losses ``test_attribution`` works out by hand."""
    nan = np.nan
    return run_of(
        samples=[[10, 10]] * 5,
        compute_s=[[9, 9], [1, 2], [1, 1], [2, 2], [4, 1]],
        input_s=[[0, 0], [0, 0], [0, 1], [0, 0], [0, 1]],
        wait_s=[[0, 0], [1.5, 0.5], [1.25, 0.25], [0.25, 0.25], [nan, nan]],
        elapsed_s=[99, 2.5, 2.25, 2.5, 4.5],
        start=0,
    )


def record(path, cluster, policy, global_batch, rounds, **how) -> Simulated:
    """Simulate a training, and write its telemetry if there is a path."""
    named = {"policy": policy.name, "workers": len(cluster.workers), "global_batch": global_batch}
    with contextlib.ExitStack() as stack:
        writer = None if path is None else TelemetryWriter(path, **named)
        if writer is not None:
            stack.callback(writer.close)
        return RoundSimulation(cluster, policy, global_batch, observer=writer, **how).run(rounds)
