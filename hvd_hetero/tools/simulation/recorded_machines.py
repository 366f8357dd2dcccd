r"""A recorded run as a cluster: how another policy would have done on these machines.

From the telemetry, for round k and rank i: x_ik samples in κ_ik micro-batches, and t_ik seconds of work: computing, and
waiting for its own data, which moves with the samples; not the update. A micro-batch costs as much as β_i samples
besides its own (``micro_batch_cost`` finds β_i, and its range). The rank's pace
v_ik = (x_ik + β_i κ_ik) / t_ik is kept as it was, whatever the batch:

    Γ_i(x) = (x + β_i) / v_i,  v_i = median_k v_ik;      f_i(k) = v_i / v_ik;      transfer_k = elapsed_k - max_i t_ik

so a simulated round takes max_i f_i(k) (x_i + β_i κ_i) / v_i + transfer_k, and the recorded policy, with its
recorded plans, takes exactly as long as it took, whatever β. ``extremes`` are the same machines with the least and with
the most β of all ranks: their difference is what the run leaves open. Where samples cost unequally much, x_ik is the
recorded work: samples, each as many as it costs of a mean one.

What is assumed: time is a line in the samples of a micro-batch; what was slow at round k would have been slow at round
k of the other policy too; and the rest of the round, transfer_k, does not depend on the policy. Drivers of the record
move no speed here, which is v_ik whatever they are.

**By how much luck moves the rate** (`rate_error`). Round k took T_k seconds, and E_k were to be expected: of its plan,
at each rank's median pace. The rounds, in order, make up to ten blocks, with u_j = (sum of T_k) / (sum of E_k) over the
rounds of block j. Another run as long meets luck of its own, so its rate differs from this one's, with 95 % of
probability, by the share

    t_{J-1} √2 s / (ū √J) at most,      s² = sum_j (u_j - ū)² / (J - 1)

with t_{J-1} Student's. It says nothing of what the rounds have not met, such as a machine that is slower all day.

Shapes: K rounds, n ranks, J blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hvd_hetero.measurement.readings import Resources
from hvd_hetero.policies.policy_names import policy_class
from hvd_hetero.telemetry import Run
from hvd_hetero.tools.simulation.cluster import Cluster, Drivers, Worker
from hvd_hetero.tools.simulation.compute import Compute, Devices
from hvd_hetero.tools.simulation.micro_batch_cost import Fixed, FixedSamples, fixed_samples, if_it_waits_once
from hvd_hetero.tools.simulation.network import Network
from hvd_hetero.tools.simulation.settings import MAX_SPEED
from hvd_hetero.tools.simulation.variation import Recorded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Thirty years: no clock that works says so.
_LONGEST_ROUND_S = 1e9
# CPU and memory scatter by less while nothing else runs (arbitrary).
_DRIVER_CHANGE = 0.05
# Blocks of which luck is estimated (arbitrary): fewer see slower changes, and know their scatter less well.
_LUCK_BLOCKS = 10
# Of a figure not being exceeded: both sides together leave out 5 %.
_CONFIDENCE = 0.975
# A shorter wait for the first micro-batch moves no figure of the fit.
_WAITING_FITTED_FROM = 1e-3
# A plan that drifts changes log s by less, and the pace changes with it.
_PLAN_CHANGE = 0.1
# Work is counted in mean samples of the run. A rank's mean sample that costs more is not believed (arbitrary).
_BELIEVED_COST = 10.0
# The first rounds of a real job pay for buffers, kernels and connections (arbitrary) ...
WARM_UP_ROUNDS = 5
# ... and fits leave out fewer: one odd pair does no harm, and a run of long rounds has few.
_COLD_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Replay:
    """The cluster of a run."""

    run: Run
    """The record."""
    cluster: Cluster
    rounds: int
    """Rounds that were usable."""
    totals: tuple[int, ...]
    """Samples of the global batch in each of these rounds: another one where the batch has adapted."""
    measured_rate: float
    """Samples per second, in those rounds."""
    dataset: int | None
    """Samples of an epoch, if the run saw the end of one."""
    extremes: tuple[Cluster, Cluster]
    """The machines with the least and the most fixed cost that the run allows."""
    fixed_s: tuple[tuple[float, float, float], ...]
    """For each rank the least, the likely and the most seconds of a micro-batch besides its samples'."""
    kept: tuple[int, ...]
    """The usable rounds, by their place in the run."""
    rate_error: float
    """The share by which another run's samples per second may differ, from how rounds scatter."""


def totals_of(run: Run) -> Ints:
    """Return the samples of the global batch in each round, (K,); one for all rounds where these differ for a reason.

    A policy may choose the samples of its rounds for itself, and a remainder smaller than the ranks joins a round.
    """
    planned = run.plan.sum(axis=1)
    same = (np.abs(planned - run.global_batch) < run.workers) | (planned < run.workers)
    return np.where(same | (not policy_class(run.policy).keeps_total), run.global_batch, planned)


def in_mean_samples(run: Run) -> Run:
    """Return the run with its samples counted by what they cost, so that a rank's speed does not follow its batch.

    A mean sample costs 1. Work that contradicts this, or is below 0, becomes 0: not known.
    """
    possible = (run.work > 0) & (run.samples > 0)
    mean = run.work[possible].sum() / max(run.samples[possible].sum(), 1)
    possible &= bool(1.0 / _BELIEVED_COST <= mean <= _BELIEVED_COST)
    if not run.work.any():
        return run
    return run.replace(samples=np.where(possible, run.work, run.samples), work=np.where(possible, run.work, 0.0))


def replay(run: Run) -> Replay:
    """Return the machines that a run was recorded on."""
    run = in_mean_samples(run)
    wrong = ~((run.elapsed_s >= 0) & (run.elapsed_s <= _LONGEST_ROUND_S))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"elapsed_s must be at least 0 and at most {_LONGEST_ROUND_S:g} seconds, got {run.elapsed_s[first]:g} in "
            f"round {run.round[first]}; remove that line"
        )
    keep = _usable(run) if len(run.round) else run.round
    if len(keep) < 2:
        raise ValueError(
            f"the run must hold at least 2 rounds after the start-up ({WARM_UP_ROUNDS} rounds) besides the short last "
            f"rounds of epochs; it has {len(keep)}, of {len(run.round)} in all: record a longer one"
        )
    busy_s = run.compute_s + run.input_s
    busy_s = np.where((busy_s > 0) & (busy_s <= _LONGEST_ROUND_S), busy_s, 0.0)
    once_s = np.where((run.once_s > 0) & (run.once_s < busy_s), run.once_s, 0.0)
    # What a rank paid once: the wait for its first micro-batch, and the update, which is no part of the work.
    wait_s = np.minimum(once_s, np.where(run.input_s > 0, run.input_s, 0.0))
    busy_s = busy_s - (once_s - wait_s)
    known = (run.samples * MAX_SPEED >= busy_s) & (busy_s * MAX_SPEED >= run.samples) & (run.samples > 0)
    if not run.elapsed_s[keep].sum() > 0:
        raise ValueError("elapsed_s must be above 0 in some round after the start-up, got 0 in all; record another run")
    cut = np.clip(run.micro_batches, 1, np.maximum(run.samples, 1))  # a micro-batch has a sample
    for rank in np.flatnonzero(~known.any(axis=0)).tolist():
        raise ValueError(f"rank {rank} has no round with samples and seconds in this run, so its speed is not known")
    ranks = range(run.workers)
    drivers = [Drivers(recorded=_readings(run, keep, rank)) for rank in ranks]
    found = [_fixed(run, busy_s, wait_s, cut, known, rank) for rank in ranks]

    def cluster(fixed: Sequence[Fixed]) -> Cluster:
        amounts = run.samples + cut * [each.micro_batch for each in fixed]
        with_round = amounts + [each.round for each in fixed]
        # A rank without a sample or a fixed cost has done nothing, and takes no time in the simulation either.
        work_s = busy_s * np.divide(amounts, with_round, out=np.zeros_like(amounts), where=with_round > 0)
        rest_s = np.maximum(run.elapsed_s - work_s.max(axis=1), 0.0)[keep]
        workers = []
        for rank in ranks:
            paces = _filled(amounts[:, rank], work_s[:, rank], known[:, rank], keep)
            pace = float(np.median(paces))
            compute = Compute.at_speed(pace, fixed[rank].micro_batch / pace)
            variation = (Recorded("round", tuple((pace / paces).tolist())),)
            workers.append(Worker(compute, variation=variation, drivers=drivers[rank]))
        return Cluster(tuple(workers), Network("recorded", recorded_s=tuple(rest_s.tolist())))

    least, likely, most = (cluster(fixed) for fixed in zip(*found, strict=True))
    figures = [[worker.compute.intercept_s for worker in c.workers] for c in (least, likely, most)]
    first = run.epoch == run.epoch[0]
    devices = Devices([worker.compute for worker in likely.workers])
    ranks_s = np.where(run.samples > 0, run.samples * devices.slope_s + cut * devices.intercept_s, 0.0)[keep]
    luck = rate_error(run.elapsed_s[keep], ranks_s.max(axis=1) + np.median(likely.network.recorded_s))
    return Replay(
        run,
        likely,
        rounds=len(keep),
        totals=tuple(totals_of(run)[keep].tolist()),
        measured_rate=float(run.samples[keep].sum() / run.elapsed_s[keep].sum()),
        dataset=None if first.all() else max(_samples_of(run, first), 1),
        extremes=(least, most),
        fixed_s=tuple(zip(*figures, strict=True)),
        kept=tuple(keep.tolist()),
        rate_error=luck,
    )


def _samples_of(run: Run, epoch: NDArray[np.bool_]) -> int:
    """Return the samples of an epoch that is followed by another. Rounds that are not recorded count as the others."""
    rounds = int(run.round[~epoch][0] - run.round[epoch][0]) if run.left_out else int(epoch.sum())
    return round(int(run.samples[epoch].sum()) * rounds / int(epoch.sum()))


def _fixed(run: Run, busy_s: Floats, wait_s: Floats, cut: Ints, known: NDArray[np.bool_], rank: int) -> FixedSamples:
    """Return β and γ of a rank, from all rounds after the start-up in which it had something to do."""
    samples, counts = run.samples[:, rank], cut[:, rank]
    # A pair shows the fixed cost if both rounds are of one epoch; a record of every k-th round has none.
    follows = (np.diff(run.round) == 1) & (np.diff(run.epoch) == 0)
    # Whole ones only: if the first rank ends a round, the pace decides how much the others have done.
    # Plans count samples; where work is known, samples are counted by cost, and no policy ends a round early.
    whole: NDArray[np.bool_] = (samples == run.plan[:, rank]) | (run.work[:, rank] > 0)
    even: NDArray[np.bool_] = samples % counts == 0
    last = np.append(run.epoch[2:] != run.epoch[1:-1], np.True_)
    short = last & (np.diff(run.plan.sum(axis=1)) < 0)
    # A policy that foresees the pace by the drivers changes the batch together with the pace, which would pass for a
    # fixed cost. So a plan that changes in the middle of an epoch counts only while the drivers stay.
    drivers = np.stack([run.cpu[:, rank], run.memory[:, rank]])
    # The forecast for round k + 1 saw the line of round k, and that for round k the line before.
    foreseen = np.append(np.False_, (np.abs(np.diff(drivers)) >= _DRIVER_CHANGE)[:, :-1].any(axis=0))
    sizes = np.log(np.maximum(samples, 1) / counts)
    unchanged = np.diff(samples * 1.0 / counts) == 0
    drifts = ~unchanged & (np.abs(np.diff(sizes)) < _PLAN_CHANGE)
    planned = short | (~foreseen & ~drifts & whole[:-1])
    paired = follows & known[1:, rank] & known[:-1, rank] & whole[1:] & (whole | even)[:-1] & planned
    used = np.flatnonzero(known[:, rank])
    used = warm if len(warm := used[used >= _COLD_ROUNDS]) else used
    done, batch_counts, seconds = samples[used].astype(np.float64), counts[used].astype(np.float64), busy_s[used, rank]
    first_s, pairs = wait_s[used, rank], paired[used[:-1]] & (np.diff(used) == 1)
    once_s = run.once_s[used, rank]
    most_s = float(np.median(once_s)) if (once_s > 0).all() else math.inf
    found = fixed_samples(done, batch_counts, seconds, pairs, most_round_s=most_s)
    waiting = float(np.median(first_s / seconds))
    if not waiting > _WAITING_FITTED_FROM:
        return found
    alone = fixed_samples(done, batch_counts, seconds - first_s, pairs, most_round_s=most_s)
    return if_it_waits_once(found, alone, done, batch_counts, waiting)


def _readings(run: Run, keep: NDArray[np.int64], rank: int) -> tuple[Resources, ...]:
    """Return what this rank knew of its resources before each of these rounds; the start-up provides the first."""
    for name in ("cpu", "memory"):
        read = getattr(run, name)[keep - 1, rank]
        if (wrong := (read < 0) | (read > 1)).any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"{name} must be at least 0 and at most 1, got {read[first]:g} in round {run.round[keep[first] - 1]} "
                f"on rank {rank}; remove that line"
            )
    # The line of round k holds what was read after computing it. A predictor had seen the line before, so here, too.
    before = zip(run.cpu[keep - 1, rank].tolist(), run.memory[keep - 1, rank].tolist(), strict=True)
    return tuple(Resources(cpu, memory) for cpu, memory in before)


def _usable(run: Run) -> NDArray[np.int64]:
    # Short last rounds of epochs show the fixed cost best, but they are no rounds of the global batch.
    planned = run.plan.sum(axis=1)
    last = np.append(run.epoch[1:] != run.epoch[:-1], True)
    # The latest round before that ends no epoch shows how large a whole one is.
    before = np.maximum.accumulate(np.where(last, -1, np.arange(len(last))))
    short = last & (planned < np.where(before < 0, np.median(planned), planned[before]))
    return np.flatnonzero((run.round >= run.round[:1] + WARM_UP_ROUNDS) & ~short)


def _filled(amount: Floats, seconds: Floats, known: NDArray[np.bool_], keep: Ints) -> Floats:
    """Return the pace of each kept round, or of the one before; if none is known of them, the latest of the run."""
    measured = keep[known[keep]] if known[keep].any() else np.flatnonzero(known)[-1:]
    rounds = measured[np.maximum(np.searchsorted(measured, keep, side="right") - 1, 0)]
    return np.asarray(amount[rounds] / seconds[rounds])


def rate_error(seconds: Floats, expected_s: Floats) -> float:
    """Return the share by which another run's rate may differ; ``seconds`` and ``expected_s`` of each round, (K,)."""
    blocks = min(_LUCK_BLOCKS, len(seconds))
    sums = [[part.sum() for part in np.array_split(each, blocks)] for each in (seconds, expected_s)]
    if blocks < 2 or not min(sums[1]) > 0:
        return 0.0
    luck = np.array(sums[0]) / np.array(sums[1])
    share = luck.std(ddof=1) / (luck.mean() * math.sqrt(blocks)) if luck.mean() > 0 else 0.0
    return float(stdtrit(blocks - 1, _CONFIDENCE) * math.sqrt(2.0) * share)
