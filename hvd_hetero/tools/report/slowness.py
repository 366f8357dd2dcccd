r"""How slow each rank is, whether or not others wait for it.

Let ``o_ri`` be the seconds of rank i's own work in round r (t of ``attribution``), and ``x_ri`` its samples, counted
as for the speeds of a report (``work``). With ``p_i = sum_r o_ri / sum_r x_ri``, a rank is slower per sample than the
fast ranks by this fraction of its own time:

    lag_i = 1 - fast(p) / p_i

Ranks that pause in turns have no lag, and hold each other up. With ``cost_ri`` of ``attribution``, and e_r the seconds
of the round, the part of the cost that comes from being slower in that very round is

    turns_i = sum_r min(cost_ri, o_ri - fast(o_r / x_r) x_ri) / sum_r e_r

The larger of both, slow_i, needs a cause. It is not what the rank costs the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.attribution import Attribution, TimeFractions, attribute, fast, time_fractions
from hvd_hetero.tools.report.work import Bools, Floats, counted, mean_speed, speeds, typical_size_factor, work


@dataclass(frozen=True)
class Slowness:
    """How slow the ranks of a run are. Arrays have one entry per rank, or (rounds, ranks)."""

    run: Run
    """The rounds that count."""
    fractions: TimeFractions
    """The cost of each rank, and of the transfer."""
    own_s: Floats
    """(rounds, ranks): seconds of the rank's own work."""
    work: Floats
    """(rounds, ranks): samples that would take as long in micro-batches of the typical size."""
    speed: Floats
    """Each rank's samples per second of computing and waiting for data, as reports have it; NaN: not known."""
    lag: Floats
    """Fraction of its own time by which the rank is slower than the fast ranks, per sample."""
    turns: Floats
    """Fraction of the run for which others waited because the rank was slower in that very round."""

    @property
    def slow(self) -> Floats:
        """The larger of ``lag`` and ``turns``."""
        # Not the cost alone: if the split follows speed, no rank waits for the slow one, and it is slow all the same.
        return np.maximum(self.lag, self.turns)

    @classmethod
    def of(cls, run: Run, fractions: TimeFractions | None = None) -> Slowness:
        """Return how slow the ranks are; zeros if no round counts. ``fractions``: those of the run, if computed."""
        did = work(run)
        lost = attribute(run, did)
        fractions = fractions if fractions is not None else time_fractions(lost, counted(run))
        # Rounds whose waiting is not known, such as the last, say nothing of what a rank needed for itself.
        known = counted(run) & np.isfinite(run.wait_s + run.compute_s + run.input_s).all(axis=1)
        some = run.take(known)
        own_s = lost.own_s[known]
        # A rank with few samples pays the fixed cost of its micro-batch for fewer of them, and is no slower for it.
        done = ((did.samples + did.fixed) * typical_size_factor(run, did.fixed_each))[known]
        speed = mean_speed(speeds(run, did)[counted(run)])
        if not len(own_s):
            return cls(some, fractions, own_s, done, speed, np.zeros(run.workers), np.zeros(run.workers))
        with np.errstate(divide="ignore", invalid="ignore"):
            # Not finite for a rank without samples.
            pace = own_s.sum(axis=0) / done.sum(axis=0)
            lag = np.where(np.isfinite(pace), np.clip(1.0 - fast(pace) / pace, 0.0, 1.0), 0.0)
        return cls(some, fractions, own_s, done, speed, np.nan_to_num(lag), _turns(lost, known, own_s, done))


def excess_s(spent_s: Floats, work: Floats) -> Floats:
    """Return the seconds, (rounds, ranks), that something takes each rank beyond the fast ranks, per sample."""
    with np.errstate(divide="ignore", invalid="ignore"):
        usual = fast(np.where(work > 0, spent_s / work, np.nan))[:, None]
        return np.asarray(np.where(work > 0, np.clip(spent_s - np.nan_to_num(usual) * work, 0.0, None), 0.0))


def _turns(lost: Attribution, known: Bools, own_s: Floats, done: Floats) -> Floats:
    slower_s = np.minimum(lost.cost_s[known], excess_s(own_s, done))
    return np.asarray(slower_s.sum(axis=0) / lost.elapsed_s[known].sum())
