r"""How slow each rank is, whether or not others wait for it.

Let ``o_ri`` be the seconds that rank i needed for itself in round r (t of ``attribution``): computing, waiting for its
own data, and what its loop did between rounds beyond what all loops do, which no smaller batch would shorten. Let
``x_ri`` be its samples. Where a micro-batch costs as much as β samples besides its own, a rank with few samples pays
this for fewer of them, and is no slower for it. So x + β of each micro-batch is multiplied by s / (s + β), the part of
samples in a batch of the typical size s, as for the speeds of a report (``work``).

If shares follow speed no rank waits, and a slow rank is slow all the same. With ``p_i = sum_r o_ri / sum_r x_ri``,

    lag_i = 1 - fast(p) / p_i

is the share of its own time by which it is slower per sample than the fast ranks. Ranks that pause in turns have no
lag, and hold each other up. With ``cost_ri`` of ``attribution``, and e_r the seconds of the round, the part of the
cost that comes from being slower in that very round is

    turns_i = sum_r min(cost_ri, o_ri - fast(o_r / x_r) x_ri) / sum_r e_r

and slow_i, the larger of both, is what wants a cause. It measures how slow a rank is, and not its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.attribution import Attribution, Shares, attribute, fast, shares
from hvd_hetero.tools.report.work import Bools, Floats, counted, mean_speed, of_typical_size, speeds, work


@dataclass(frozen=True)
class Slowness:
    """How slow the ranks of a run are. Arrays have one entry per rank, or (rounds, ranks)."""

    run: Run
    """The rounds that count."""
    shares: Shares
    """The cost of each rank, and of the transfer."""
    own_s: Floats
    """(rounds, ranks): seconds that the rank needed for itself."""
    work: Floats
    """(rounds, ranks): samples, as many as the work is worth in micro-batches of the typical size."""
    speed: Floats
    """Each rank's samples per second of computing and waiting for data, as reports have it; NaN: not known."""
    lag: Floats
    """Share of its own time by which the rank is slower than the fast ranks, per sample."""
    turns: Floats
    """Share of the run for which the rank held others up by being slower in that very round."""

    @property
    def slow(self) -> Floats:
        """The larger of ``lag`` and ``turns``, which wants a cause."""
        return np.maximum(self.lag, self.turns)

    @classmethod
    def of(cls, run: Run, known_shares: Shares | None = None) -> Slowness:
        """Return how slow the ranks are; zeros if no round counts. ``known_shares``: shares that are known already."""
        did = work(run)
        lost = attribute(run, did)
        known_shares = known_shares if known_shares is not None else shares(lost, counted(run))
        # Rounds whose waiting is not known, such as the last, say nothing of what a rank needed for itself.
        known = counted(run) & np.isfinite(run.wait_s + run.compute_s + run.input_s).all(axis=1)
        some = run.take(known)
        own_s = lost.own_s[known]
        done = ((did.samples + did.fixed) * of_typical_size(run, did.fixed_each))[known]
        speed = mean_speed(speeds(run, did)[counted(run)])
        if not len(own_s):
            return cls(some, known_shares, own_s, done, speed, np.zeros(run.workers), np.zeros(run.workers))
        with np.errstate(divide="ignore", invalid="ignore"):
            # Not finite for a rank without samples.
            pace = own_s.sum(axis=0) / done.sum(axis=0)
            lag = np.where(np.isfinite(pace), np.clip(1.0 - fast(pace) / pace, 0.0, 1.0), 0.0)
        return cls(some, known_shares, own_s, done, speed, np.nan_to_num(lag), _turns(lost, known, own_s, done))


def beyond_s(spent_s: Floats, work: Floats) -> Floats:
    """Return the seconds, (rounds, ranks), that something takes each rank beyond the fast ranks, per sample."""
    with np.errstate(divide="ignore", invalid="ignore"):
        usual = fast(np.where(work > 0, spent_s / work, np.nan))[:, None]
        return np.asarray(np.where(work > 0, np.clip(spent_s - np.nan_to_num(usual) * work, 0.0, None), 0.0))


def _turns(lost: Attribution, known: Bools, own_s: Floats, done: Floats) -> Floats:
    slower_s = np.minimum(lost.cost_s[known], beyond_s(own_s, done))
    return np.asarray(slower_s.sum(axis=0) / lost.elapsed_s[known].sum())
