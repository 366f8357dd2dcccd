r"""A recorded run as a cluster: what would another scheme have made of these machines?

From the telemetry, for round k and rank i: x_ik samples in t_ik seconds of work (computing, and waiting for its own
data). The rank's speed v_ik = x_ik / t_ik is taken as it was, whatever the batch:

    Γ_i(x) = x / v_i,  v_i = median_k v_ik;      f_i(k) = v_i / v_ik;      transfer_k = elapsed_k - max_i t_ik

so a simulated round takes max_i f_i(k) Γ_i(x_i) + transfer_k, and the scheme that was recorded, given its recorded
plans, takes exactly as long as it took. A rank without a figure in a round has that of its round before.

What is assumed, and when it fails: time proportional to the batch (a fixed cost per round makes large batches look too
slow when small ones were recorded, by b/t of it); what was slow at round k would have been slow at round k of the other
scheme too, though that comes at another moment; and the rest of the round, transfer_k, does not depend on the scheme.
The first rounds (start-up) and short last rounds of epochs are left out.

**Drivers.** The line of round k tells what a rank read of its CPU and memory after computing it, that is before round
k + 1. So before the round made from round k a predictor reads the line of round k - 1, as it did in production: the
drivers that go with v_ik. They move no speed here, which is v_ik whatever they say. Where the recorded scheme did not
use drivers, production reads them once a second, and the readings are as old; a rank that read nothing knows nothing.

Shapes: K rounds, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.measurement.readings import Resources
from hvd_hetero.simulation.cluster import Cluster, Drivers, Worker
from hvd_hetero.simulation.compute import Compute
from hvd_hetero.simulation.limits import MOST_SPEED
from hvd_hetero.simulation.network import Network
from hvd_hetero.simulation.variation import Recorded
from hvd_hetero.telemetry import Run

__all__ = ["Replay", "replay"]

_LONGEST_ROUND_S = 1e9  # thirty years
WARM_UP_ROUNDS = 5  # arbitrary; the first rounds of a real job pay for buffers, kernels and connections


@dataclass(frozen=True, slots=True)
class Replay:
    """The cluster of a run."""

    cluster: Cluster
    rounds: int
    """rounds that were usable"""
    measured_rate: float
    """samples per second, in those rounds"""
    dataset: int | None
    """samples of an epoch, if the run saw the end of one"""


def replay(run: Run) -> Replay:
    """The machines that a run was recorded on."""
    wrong = ~((run.elapsed_s >= 0) & (run.elapsed_s <= _LONGEST_ROUND_S))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"elapsed_s must be at least 0 and at most {_LONGEST_ROUND_S:g} seconds, got {run.elapsed_s[first]:g} in "
            f"round {run.round[first]}; remove that line"
        )
    keep = _usable(run)
    if len(keep) < 2:
        raise ValueError(
            f"the run must hold at least {WARM_UP_ROUNDS + 2} rounds to be replayed, {WARM_UP_ROUNDS} of which count "
            f"as start-up; it has {len(run.round)}: record a longer one"
        )
    busy_s = (run.compute_s + run.input_s)[keep]
    known = np.isfinite(busy_s) & (busy_s > 0) & (busy_s <= _LONGEST_ROUND_S)
    speeds = np.where(known, run.samples[keep] / np.where(known, busy_s, 1.0), 0.0)
    for rank in range(run.workers):
        speeds[:, rank] = _filled(speeds[:, rank], rank)
    typical = np.median(speeds, axis=0)
    rest_s = np.maximum(run.elapsed_s[keep] - np.where(known, busy_s, 0.0).max(axis=1), 0.0)
    workers = tuple(
        Worker(
            Compute.at_speed(float(typical[rank])),
            variation=(Recorded("round", tuple((typical[rank] / speeds[:, rank]).tolist())),),
            drivers=Drivers(recorded=_readings(run, keep, rank)),
        )
        for rank in range(run.workers)
    )
    network = Network("recorded", recorded_s=tuple(rest_s.tolist()))
    if not run.elapsed_s[keep].sum() > 0:
        raise ValueError("elapsed_s must be above 0 in some round after the start-up, got 0 in all; record a run anew")
    measured = float(run.samples[keep].sum() / run.elapsed_s[keep].sum())
    first = run.epoch == run.epoch[0]
    dataset = None if first.all() else max(int(run.samples[first].sum()), 1)
    return Replay(Cluster(workers, network), len(keep), measured, dataset)


def _readings(run: Run, keep: NDArray[np.int64], rank: int) -> tuple[Resources, ...]:
    """What this rank knew of its resources before each of these rounds; the start-up leaves none without one before."""
    before = zip(run.cpu[keep - 1, rank].tolist(), run.memory[keep - 1, rank].tolist(), strict=True)
    return tuple(Resources(cpu, memory) for cpu, memory in before)


def _usable(run: Run) -> NDArray[np.int64]:
    planned = run.plan.sum(axis=1)
    last = np.append(run.epoch[1:] != run.epoch[:-1], True)
    short = last & (planned < np.median(planned))
    rounds = np.arange(len(run.round))
    return np.asarray(rounds[(rounds >= WARM_UP_ROUNDS) & ~short])


def _filled(speeds: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    known = (speeds >= 1 / MOST_SPEED) & (speeds <= MOST_SPEED)
    if not known.any():
        raise ValueError(f"rank {rank} has no round with samples and seconds in this run, so its speed is not known")
    latest = np.maximum.accumulate(np.where(known, np.arange(len(speeds)), -1))
    return speeds[np.where(latest >= 0, latest, int(np.argmax(known)))]
