"""The work of each rank in each round, as recorded, with unknown figures filled in.

If a rank's computing time is not known, or impossible, it gets the pace of its latest round before (or else the first
one after), and the time that follows. A rank that never has a figure takes no part, nor do its samples.

**Speeds.** Rank i does x samples in κ micro-batches in t seconds of computing and waiting for its data. A micro-batch
costs as much as β samples besides. The speed refers to one of the typical size s, an equal share in the first plan:

    speed = (x + β κ) / t · s / (s + β)

Shapes: K rounds, n ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.simulation.settings import MAX_SPEED

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Thirty years: no clock that works says so.
LONGEST_ROUND_S = 1e9
# Clocks of two ranks differ by less (arbitrary). A figure of more times the rounds' own time is not believed.
_BELIEVED_UP_TO_TIMES = 2.0
# An update that takes more of the computing time is a clock's error (arbitrary).
_UPDATE_UP_TO = 0.9


@dataclass(frozen=True, slots=True)
class Work:
    """The work of each rank in each round, with unknown figures filled; (K, n)."""

    samples: Floats
    fixed_each: Floats
    """The fixed cost of a micro-batch, in samples."""
    fixed: Floats
    """The fixed cost of all micro-batches of the round, in samples."""
    computing_s: Floats
    input_s: Floats
    update_s: Floats
    pace: Floats
    """Samples, with the fixed ones, per second of computing; 0 for a rank that never has a figure."""
    known: Bools
    """True if the pace was measured in this very round."""

    @property
    def busy_s(self) -> Floats:
        """Computing, and waiting for data."""
        return self.computing_s + self.input_s


def counted(run: Run) -> Bools:
    """Return which rounds count: not the first, which pays for the start, unless it is the only one; (K,)."""
    possible = np.asarray((run.elapsed_s > 0) & (run.elapsed_s <= LONGEST_ROUND_S))
    later = possible & (run.round > run.first_round)
    return later if later.any() else possible


def impossible(run: Run) -> dict[str, Bools]:
    """Return, for each column of seconds, which figures cannot be true; (K, n).

    No rank was busy, or waited, for less than no time, or for much longer than the round and the one before it took.
    """
    elapsed_s = np.where(run.elapsed_s > 0, run.elapsed_s, 0.0)
    # With the round before, because elapsed_s is rank 0's: if it pauses before it sees that a round is over, its next
    # round is short, and others have waited since. One that was not recorded may have taken as long as all that were.
    before_s = np.full_like(elapsed_s, elapsed_s.sum())
    follows = np.flatnonzero(np.diff(run.round) == 1) + 1
    before_s[follows] = elapsed_s[follows - 1]
    most_s = np.minimum(_BELIEVED_UP_TO_TIMES * (elapsed_s + before_s), LONGEST_ROUND_S)[:, None]
    columns = {"compute_s": run.compute_s, "input_s": run.input_s, "wait_s": run.wait_s}
    return {name: np.asarray((seconds < 0) | (seconds > most_s)) for name, seconds in columns.items()}


def work(run: Run) -> Work:
    """Return the work of the ranks, for all rounds of the run."""
    wrong = impossible(run)
    samples = run.samples.astype(np.float64)
    beta = run.fixed_samples
    # A rank that was profiled knows its fixed cost from the curve.
    if run.slope_s.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            beta = np.where((beta <= 0) & (run.slope_s > 0), run.intercept_s / run.slope_s, beta)
    beta = np.where(np.isfinite(beta) & (beta > 0), beta, 0.0)
    fixed = beta * run.micro_batches.astype(np.float64)
    input_s = np.where((run.input_s > 0) & ~wrong["input_s"], run.input_s, 0.0)
    update_s = np.where(run.once_s > input_s, run.once_s - input_s, 0.0)
    c = run.compute_s
    with np.errstate(invalid="ignore"):
        known = (c > 0) & ~wrong["compute_s"] & (samples > 0)
        known &= (samples + fixed <= MAX_SPEED * c) & (c <= MAX_SPEED * samples)
        update_s[~(update_s < _UPDATE_UP_TO * c)] = 0.0
        pace = np.where(known, (samples + fixed) / np.where(known, c - update_s, 1.0), 0.0)
    if not known.all():
        pace = _filled(pace, known)
        guess_s = np.where(pace > 0, (samples + fixed) / np.where(pace > 0, pace, 1.0), 0.0)
        update_s[~known] = 0.0
        c = np.where(known, c, guess_s)
    return Work(samples, beta, fixed, c, input_s, update_s, pace, known)


def _filled(values: Floats, known: Bools) -> Floats:
    """Put the latest known value, or else the first one, where none is known; 0 if there is none at all."""
    rounds = np.arange(len(values))[:, None]
    latest = np.maximum.accumulate(np.where(known, rounds, -1), axis=0)
    first = known.argmax(axis=0)
    return np.asarray(np.take_along_axis(values, np.where(latest >= 0, latest, first), axis=0))


def typical_size_factor(run: Run, beta: Floats) -> Floats:
    """Return s / (s + β): the part of its samples in what a micro-batch of the typical size costs; (K, n)."""
    typical = float(run.plan[0].sum() / max(int(run.micro_batches[0].sum()), 1)) if len(run.plan) else 0.0
    return typical / (typical + beta) if typical > 0 else np.ones_like(beta)


def speeds(run: Run, done: Work) -> Floats:
    """Return the speed of each rank in each round, NaN if it was not measured; (K, n)."""
    beta = done.fixed_each
    samples = (done.samples + beta * run.micro_batches) * typical_size_factor(run, beta)
    return np.where(done.known, samples / np.where(done.known, done.busy_s, 1.0), np.nan)


def mean_speed(speed: Floats) -> Floats:
    """Return each rank's harmonic mean over the rounds in which it is known; (n,)."""
    with warnings.catch_warnings():
        # NaN is the right answer for a rank without figures.
        warnings.simplefilter("ignore", RuntimeWarning)
        # The mean over samples. A rank that is slow for a third of the time has lost time, which a median would hide.
        return np.asarray(1.0 / np.nanmean(1.0 / speed, axis=0))
