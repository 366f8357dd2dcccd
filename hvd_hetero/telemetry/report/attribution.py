r"""Where the time of each round went, and which rank cost how much of it.

Shapes: K rounds, n ranks. Round k takes e_k seconds. In it rank i does x_ik samples in κ_ik micro-batches, computes for
c_ik seconds and waits d_ik for its own data, so it is at work for t_ik = c_ik + d_ik. Then it waits w_ik.

**The ideal.** Every rank computes all the time, at the pace that it showed in that round. Nothing waits:

    T_k = (sum_i x_ik + sum_i a_ik) / sum_i v_ik,     over the ranks with v_ik T_k > a_ik
    v_ik = (x_ik + β_ik κ_ik) / (c_ik - u_ik),        a_ik = β_ik κ_ik + u_ik v_ik

a is what does not move with the samples. β is the fixed cost of a micro-batch in samples: ``fixed_samples``, or
intercept / slope of a known curve, else 0. u is the update, once a round: ``once_s`` less the wait for data.
T_k is the least max_i of the computing time over all real splits of the same samples, so T_k <= max_i c_ik.

**Kinds.** What a round takes beyond the ideal is one of four things, and they add up exactly:

    e_k - T_k = (computing_k + input_k) + transfer_k + between_k
    computing_k + input_k = max_i t_ik - T_k      the others wait for the last rank; see below which of the two
    transfer_k = min_i w_ik                       the last rank waits for the transfer alone; at most the rest
    between_k = e_k - max_i t_ik - transfer_k     the loop's other work: evaluation, checkpoints, logging; balancing

between_k may be below zero in a round, because clocks of different ranks measure its parts. Its sum seldom is.

**Ranks.** The ranks in S alone would delay a round by v(S) = max(max_{i in S} t_ik - T_k, 0). Rank i costs its Shapley
value: the round's time with it less that without it, in the mean over all orders in which the ranks could be added. In
closed form (the airport game; Littlechild & Owen 1973), each moment s between T_k and the end is shared equally by the
ranks N(s) that are still at work:

    cost_ik = F_k(t_ik),     F_k(s) = ∫ from T_k to s of dz / |N_k(z)|,     N_k(z) = {j : t_jk > z}

One late rank bears all. Of two equally late ranks each bears half, where "the round without it" would blame neither.
The costs of a round sum to max t - T, and permuting the ranks permutes them. While a rank computes, its part counts as
computing, F_k(min(c_ik, t_ik)); the rest, while it waits for data, as input. Summed over the ranks these are the kinds.

**Unknown figures.** Where a rank's computing time is not known, it has the pace of its latest round before (or else the
first one after), and the time that follows. A rank that never has a figure takes no part, nor do its samples. Rounds
that take no time, or more than thirty years, are left out by ``counted``.

Simplifications: the ideal ignores that a batch below saturation saves no time. On CUDA devices ``compute_s`` is that of
the round before, so rounds are off by one there, and sums over the run are not.

Cost: O(K n log n).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.simulation.limits import MOST_SPEED
from hvd_hetero.telemetry.records import Run

__all__ = ["KINDS", "LONGEST_ROUND_S", "Attribution", "Work", "airport", "attribute", "counted", "ideal", "work"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS = {
    "computing": "waiting for ranks that compute longer",
    "input": "waiting for ranks that wait for their data",
    "transfer": "transfers between ranks",
    "between": "other work between rounds",
}
"""The kinds of loss, and what each is."""

LONGEST_ROUND_S = 1e9
"""Thirty years."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each rank did in each round, with unknown figures filled; (K, n)."""

    samples: Floats
    fixed: Floats
    """β κ: what the micro-batches cost besides their samples, in samples."""
    computing_s: Floats
    input_s: Floats
    update_s: Floats
    pace: Floats
    """Samples, with the fixed ones, per second of computing; 0 for a rank that never has a figure."""
    known: Bools
    """Whether the pace was measured in this very round."""

    @property
    def busy_s(self) -> Floats:
        """Computing, and waiting for data."""
        return self.computing_s + self.input_s


@dataclass(frozen=True, slots=True)
class Attribution:
    """Seconds: (K,) of each round, (K, n) of each rank in it."""

    elapsed_s: Floats
    ideal_s: Floats
    kinds_s: dict[str, Floats]
    cost_s: Floats
    cost_input_s: Floats
    """Of ``cost_s``, what comes from waiting for data."""


def counted(run: Run) -> Bools:
    """Return which rounds count: not the first, which pays for the start, unless it is the only one; (K,)."""
    possible = np.asarray((run.elapsed_s > 0) & (run.elapsed_s <= LONGEST_ROUND_S))
    later = possible & (run.round > run.first_round)
    return later if later.any() else possible


def work(run: Run) -> Work:
    """Return what the ranks did, of all rounds of the run."""
    samples = run.samples.astype(np.float64)
    beta = run.fixed_samples
    if run.slope_s.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            beta = np.where((beta <= 0) & (run.slope_s > 0), run.intercept_s / run.slope_s, beta)
    fixed = np.where(np.isfinite(beta) & (beta > 0), beta, 0.0) * run.micro_batches.astype(np.float64)
    input_s = np.where((run.input_s > 0) & (run.input_s <= LONGEST_ROUND_S), run.input_s, 0.0)
    update_s = np.where(run.once_s > input_s, run.once_s - input_s, 0.0)
    c = run.compute_s
    with np.errstate(invalid="ignore"):
        known = (c > 0) & (c <= LONGEST_ROUND_S) & (samples > 0)
        known &= (samples + fixed <= MOST_SPEED * c) & (c <= MOST_SPEED * samples)
        update_s[~(update_s < 0.9 * c)] = 0.0  # more cannot be true
        pace = np.where(known, (samples + fixed) / np.where(known, c - update_s, 1.0), 0.0)
    if not known.all():
        pace = _filled(pace, known)
        guess_s = np.where(pace > 0, (samples + fixed) / np.where(pace > 0, pace, 1.0), 0.0)
        update_s[~known] = 0.0
        c = np.where(known, c, guess_s)
    return Work(samples, fixed, c, input_s, update_s, pace, known)


def _filled(values: Floats, known: Bools) -> Floats:
    """Put the latest known value, or else the first one, where none is known; 0 where there is none at all."""
    rounds = np.arange(len(values))[:, None]
    latest = np.maximum.accumulate(np.where(known, rounds, -1), axis=0)
    first = known.argmax(axis=0)
    return np.asarray(np.take_along_axis(values, np.where(latest >= 0, latest, first), axis=0))


def ideal(done: Work) -> Floats:
    """Return T, (K,): the least time in which the same samples can be computed; 0 where no pace is known."""
    able = done.pace > 0
    total = np.where(able, done.samples, 0.0).sum(axis=1)
    constant = np.where(able, done.fixed + done.update_s * done.pace, 0.0)
    while True:
        pace = np.where(able, done.pace, 0.0).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            least_s = np.where(pace > 0, (total + np.where(able, constant, 0.0).sum(axis=1)) / pace, 0.0)
        over = able & (done.pace * least_s[:, None] < constant)
        if not over.any():
            return np.asarray(least_s)
        able &= ~over  # each pass takes ranks out that are better without samples: at most n passes, mostly none


def airport(ends_s: Floats, from_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Share the time from ``from_s`` (K,) to the last of ``ends_s`` (K, n): each moment equally by who is at work.

    Return what each rank bears, (K, n), and F by its nodes: moments in rising order and F there, both (K, n + 1).
    """
    rounds, workers = ends_s.shape
    order = np.argsort(ends_s, axis=1)
    moments = np.empty((rounds, workers + 1))
    moments[:, 0] = from_s
    moments[:, 1:] = np.maximum(np.take_along_axis(ends_s, order, axis=1), from_s[:, None])
    borne = np.zeros((rounds, workers + 1))
    np.cumsum(np.diff(moments, axis=1) / (workers - np.arange(workers)), axis=1, out=borne[:, 1:])
    each = np.empty_like(ends_s)
    np.put_along_axis(each, order, borne[:, 1:], axis=1)
    return each, moments, borne


def attribute(run: Run, done: Work) -> Attribution:
    """Return where the time went, of all rounds of the run."""
    ideal_s = ideal(done)
    busy_s = done.busy_s
    last_s = busy_s.max(axis=1)
    ideal_s = np.minimum(ideal_s, last_s)  # a hair's breadth of rounding
    cost_s, moments, borne = airport(busy_s, ideal_s)
    computing_s = cost_s
    waits = done.input_s > 0
    if waits.any():
        computing_s = cost_s.copy()
        for k in np.flatnonzero(waits.any(axis=1)).tolist():
            computing_s[k] = np.minimum(np.interp(done.computing_s[k], moments[k], borne[k]), cost_s[k])
    transfer_s = _transfer(run, run.elapsed_s - last_s)
    kinds = {
        "computing": computing_s.sum(axis=1),
        "input": (cost_s - computing_s).sum(axis=1),
        "transfer": transfer_s,
        "between": run.elapsed_s - last_s - transfer_s,
    }
    return Attribution(run.elapsed_s, ideal_s, kinds, cost_s, cost_s - computing_s)


def _transfer(run: Run, rest_s: Floats) -> Floats:
    """Return the least wait of each round, within the rest; where none is known, as in the last one, the median."""
    usable = (run.wait_s >= 0) & (run.wait_s <= LONGEST_ROUND_S)
    wait_s = np.where(usable, run.wait_s, np.inf).min(axis=1, initial=np.inf)
    known = np.isfinite(wait_s)
    later = known & (run.round > run.first_round)
    usual = float(np.median(wait_s[later])) if later.any() else 0.0
    return np.asarray(np.clip(np.where(known, wait_s, usual), 0.0, np.maximum(rest_s, 0.0)))
