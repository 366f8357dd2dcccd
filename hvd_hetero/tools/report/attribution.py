r"""Where the time of each round went, and which rank cost how much of it.

Shapes: K rounds, n ranks. Round k takes e_k seconds. In it rank i does x_ik samples in κ_ik micro-batches, computes for
c_ik seconds, waits d_ik for its own data, and later w_ik for others. ``work`` fills in figures that are not known.

**The ideal.** Every rank computes all the time, at the pace that it showed in that round. Nothing waits:

    T_k = (sum_i x_ik + sum_i a_ik) / sum_i v_ik,     over the ranks with v_ik T_k > a_ik
    v_ik = (x_ik + β_ik κ_ik) / (c_ik - u_ik),        a_ik = β_ik κ_ik + u_ik v_ik

a is the part that does not move with the samples: the fixed cost β of each micro-batch, and the update, u.
T_k is the least max_i of the computing time over all real splits of the same samples, so T_k <= max_i c_ik.

**Own time.** What rank i did alone ends at t_ik: computing, waiting for its data, and what its loop does between rounds
more than the loops of the fast ranks do (such as evaluation, logging and checkpoints on rank 0 alone):

    t_ik = c_ik + d_ik + b_ik - q_k,     b_ik = e_k - w_ik - c_ik - d_ik,     q_k = the lower quartile of b_k

**Kinds.** What a round takes beyond the ideal is one of five things, and they add up exactly:

    e_k - T_k = (computing_k + input_k + loop_k) + transfer_k + between_k
    computing_k + input_k + loop_k = max_i t_ik - T_k     the others wait for the last rank; see below for which
    transfer_k = min_i w_ik                               the last rank waits for the transfer alone; at most the rest
    between_k = e_k - max_i t_ik - transfer_k             q_k: what all ranks' loops do between rounds; balancing

**Ranks.** The ranks in S alone would delay a round by v(S) = max(max_{i in S} t_ik - T_k, 0). Rank i costs its Shapley
value. In closed form (the airport game; Littlechild & Owen 1973), each moment s between T_k and the end is shared
equally by the ranks N(s) that are still at work:

    cost_ik = F_k(t_ik),     F_k(s) = ∫ from T_k to s of dz / |N_k(z)|,     N_k(z) = {j : t_jk > z}

One late rank bears all. Of two equally late ranks each bears half, where "the round without it" would blame neither.
The costs of a round sum to max t - T. While a rank computes, its part counts as computing, F_k(min(c_ik, t_ik)); while
it waits for data, F_k(min(c_ik + d_ik, t_ik)) less that, as input; the rest as loop. Summed over the ranks these are
the kinds.

A cost is not how slow a rank is: a slow rank whose batch is small enough holds no other up. ``slowness`` measures that.
The ideal ignores that a batch below saturation saves no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.work import LONGEST_ROUND_S, Bools, Floats, Work

KINDS = {
    "computing": "waiting for ranks that compute longer",
    "input": "waiting for ranks that wait for their data",
    "loop": "waiting for ranks that do other work between rounds",
    "transfer": "transfers between ranks",
    "between": "other work between rounds, on all ranks",
}
"""The kinds of loss, and their meanings."""

_OF_ONE_RANK = {"input": "waiting for data", "transfer": "synchronising", "between": "other work between rounds"}


@dataclass(frozen=True, slots=True)
class Attribution:
    """Seconds: (K,) of each round, (K, n) of each rank in it."""

    elapsed_s: Floats
    own_s: Floats
    """When each rank had done all its own work."""
    ideal_s: Floats
    kinds_s: dict[str, Floats]
    cost_s: Floats
    cost_input_s: Floats
    """The part of ``cost_s`` that comes from waiting for data."""


@dataclass(frozen=True, slots=True)
class TimeFractions:
    """Fractions of the time that a run took, over the rounds that count; ``ideal`` and ``kinds`` sum to 1."""

    ideal: float
    kinds: dict[str, float]
    cost: Floats
    """The fraction of the run for which each rank held all others up; (n,)."""
    cost_input: Floats
    """The part of ``cost`` that comes from waiting for data; (n,)."""


def kinds_of(workers: int) -> dict[str, str]:
    """Return the kinds of loss that so many ranks can have, and their meanings: a single rank waits for no other."""
    return KINDS if workers > 1 else _OF_ONE_RANK


def fast(figures: Floats) -> Floats:
    """Return the fast ranks' figure: the lower quartile along the last axis, which of up to four ranks is the least.

    Figures that are not finite do not count; if none is finite, the answer is NaN.
    """
    ordered = np.sort(np.where(np.isfinite(figures), figures, np.nan), axis=-1)
    place = np.maximum(np.isfinite(ordered).sum(axis=-1, keepdims=True) - 1, 0) // 4
    return np.asarray(np.take_along_axis(ordered, place, axis=-1)[..., 0])


def ideal(done: Work) -> Floats:
    """Return T, (K,): the least time in which the same samples can be computed; 0 if no pace is known."""
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
        # Each pass takes out ranks that are better without samples: at most n passes, mostly none.
        able &= ~over


def airport(ends_s: Floats, from_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Share the time from ``from_s`` (K,) to the last of ``ends_s`` (K, n): each moment equally among ranks at work.

    Return each rank's part, (K, n), and F by its nodes: moments in rising order and F there, both (K, n + 1).
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


def _borne_until(until_s: Floats, moments: Floats, borne: Floats) -> Floats:
    """Return F, (K, n), at these moments, from its nodes: by one interpolation, in which round k lies at 2 k."""
    # A gap between the rounds keeps the interpolation of one from the nodes of the next.
    begin_s, rows = moments[:, :1], 2.0 * np.arange(len(moments))[:, None]
    length_s = np.maximum(moments[:, -1:] - begin_s, np.finfo(np.float64).tiny)
    passed = (np.clip((moment - begin_s) / length_s, 0.0, 1.0) for moment in (until_s, moments))
    at, nodes = (np.asarray(rows + part, dtype=np.float64) for part in passed)
    # A run without rounds has no nodes, and np.interp wants some.
    if not at.size:
        return at
    return np.asarray(np.interp(at.ravel(), nodes.ravel(), borne.ravel()), dtype=np.float64).reshape(until_s.shape)


def attribute(run: Run, done: Work) -> Attribution:
    """Return where the time went, for all rounds of the run."""
    ideal_s = ideal(done)
    own_s = _own_s(run, done)
    last_s = own_s.max(axis=1)
    # Rounding, or another rank's clock, may put the ideal a little above the last rank's time.
    ideal_s = np.minimum(ideal_s, last_s)
    cost_s, moments, borne = airport(own_s, ideal_s)
    until_input_s = np.minimum(_borne_until(done.busy_s, moments, borne), cost_s)
    computing_s = until_input_s
    if done.input_s.any():
        computing_s = np.minimum(_borne_until(done.computing_s, moments, borne), until_input_s)
    transfer_s = _transfer(run, run.elapsed_s - last_s)
    kinds = {
        "computing": computing_s.sum(axis=1),
        "input": (until_input_s - computing_s).sum(axis=1),
        "loop": (cost_s - until_input_s).sum(axis=1),
        "transfer": transfer_s,
        "between": run.elapsed_s - last_s - transfer_s,
    }
    return Attribution(run.elapsed_s, own_s, ideal_s, kinds, cost_s, until_input_s - computing_s)


def time_fractions(lost: Attribution, counts: Bools) -> TimeFractions:
    """Return what took which fraction of the run's time, over the rounds that count; all 0 if none does."""
    elapsed_s = float(lost.elapsed_s[counts].sum()) or 1.0
    parts = {"ideal": float(lost.ideal_s[counts].sum()) / elapsed_s}
    parts |= {kind: float(lost.kinds_s[kind][counts].sum()) / elapsed_s for kind in KINDS}
    # Clocks of different ranks measure the parts, so the last one may be below zero; another part pays for it.
    if (missing := -parts["between"]) > 0.0:
        parts["between"] = 0.0
        parts["transfer" if parts["transfer"] >= missing else max(parts, key=parts.__getitem__)] -= missing
    return TimeFractions(
        ideal=parts.pop("ideal"),
        kinds=parts,
        cost=lost.cost_s[counts].sum(axis=0) / elapsed_s,
        cost_input=lost.cost_input_s[counts].sum(axis=0) / elapsed_s,
    )


def _own_s(run: Run, done: Work) -> Floats:
    """Return t, (K, n): when each rank had done all its own work."""
    busy_s = done.busy_s
    own_s = run.elapsed_s[:, None] - run.wait_s
    with np.errstate(invalid="ignore"):
        known = np.asarray((run.wait_s >= 0) & (own_s >= 0)).all(axis=1, keepdims=True)
        # What the loops of all ranks do is no rank's own delay.
        usual_s = fast(own_s - busy_s)[:, None]
        return np.asarray(np.where(known, np.maximum(own_s - usual_s, 0.0), busy_s))


def _transfer(run: Run, rest_s: Floats) -> Floats:
    """Return the least wait of each round, within the rest; if none is known, as in the last one, the median."""
    usable = (run.wait_s >= 0) & (run.wait_s <= LONGEST_ROUND_S)
    wait_s = np.where(usable, run.wait_s, np.inf).min(axis=1, initial=np.inf)
    known = np.isfinite(wait_s)
    # The first round pays for connections.
    later = known & (run.round > run.first_round)
    like = later if later.any() else known
    usual = float(np.median(wait_s[like])) if like.any() else 0.0
    return np.asarray(np.clip(np.where(known, wait_s, usual), 0.0, np.maximum(rest_s, 0.0)))
