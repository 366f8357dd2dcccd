r"""All figures of a report, from a recorded run: a pure function ``figures(run)``.

``attribution`` has the mathematics of where the time went and which rank cost how much, ``work`` that of speeds,
``alternatives`` what another split would have made. With
E = sum_k e_k over the rounds that count, and T_k the ideal:

    slowdown            E / sum_k T_k: 1 for a run in which all ranks compute all the time
    cost of rank i      sum_k cost_ik / E: the fraction of the run for which it held all others up
    last                fraction of the rounds that ended with rank i, ties counting for each
    waiting of rank i   sum_k w_ik / E, over rounds in which all waits are known (``Run.waiting_share``)

The result does not grow with the rounds, and only its tables per rank grow with the ranks.

Shapes: K rounds, n ranks, B blocks of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.report.alternatives import Alternatives, alternatives
from hvd_hetero.tools.report.attribution import KINDS, Attribution, TimeFractions, attribute, time_fractions
from hvd_hetero.tools.report.work import LONGEST_ROUND_S, Work, counted, mean_speed, speeds, work
from hvd_hetero.tools.simulation.recorded_machines import totals_of

Floats = npt.NDArray[np.float64]

# A picture is some hundred points wide.
BLOCKS_DRAWN = 160
# As many as there are colours that people can distinguish; of more ranks, quantiles are shown.
RANKS_DRAWN_AS_LINES = 8
# More rows could not be told apart on a page (arbitrary).
HEAT_ROWS = 100
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One entry per rank; NaN: not known."""

    cost: Floats
    """Fraction of the run for which this rank held all others up."""
    cost_input: Floats
    """The part of ``cost`` that comes from waiting for data."""
    input: Floats
    """Fraction of the run in which this rank waited for its own data."""
    last: Floats
    """Fraction of the rounds that ended with this rank."""
    samples_per_s: Floats
    """Mean speed."""
    of_best_rank: Floats
    """Its speed over the fastest rank's."""
    waiting: Floats
    """Fraction of the time spent waiting for others, and for the transfer."""


@dataclass(frozen=True, slots=True)
class Curves:
    """One figure over time: a row for each rank, or for each of ``QUANTILES`` over the ranks; (rows, B)."""

    rows: Floats
    by_rank: bool

    @classmethod
    def of(cls, means: Floats) -> Curves:
        """Return the curves of block means, (B, n)."""
        if means.shape[1] <= RANKS_DRAWN_AS_LINES:
            return cls(means.T, True)
        known = np.isfinite(means).any(axis=1)
        rows = np.full((len(QUANTILES), len(means)), np.nan)
        if known.any():
            rows[:, known] = np.nanquantile(means[known], QUANTILES, axis=1)
        return cls(rows, False)

    @property
    def top(self) -> float:
        """The largest value that a scale should hold: a short peak may leave the picture."""
        known = self.rows[np.isfinite(self.rows)]
        return float(min(known.max(), 1.5 * np.percentile(known, 98))) if known.size else 0.0


@dataclass(frozen=True, slots=True)
class Heat:
    """One figure over time, for ranks in groups: the worst of each group; (rows, B)."""

    rows: Floats
    first_rank: tuple[int, ...]
    """The first rank of each row."""


@dataclass(frozen=True, slots=True)
class OverTime:
    """Figures by blocks of rounds."""

    edges: npt.NDArray[np.int64]
    """The first round of each block, and behind the last block the round after it; (B + 1,)."""
    round_s: Floats
    """Mean seconds of a round; (B,)."""
    ideal_s: Floats
    """Mean ideal seconds of a round; (B,)."""
    kinds_s: dict[str, Floats]
    """Mean seconds of each kind of loss in a round; (B,) each."""
    batches: Curves
    speed: Curves
    waiting_s: Curves
    cost: Heat
    """Fraction of the time for which a rank held all others up."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The content of a report."""

    policy: str
    workers: int
    global_batch: int
    """Samples of a full round; the mean, if the batch has adapted."""
    rounds: int
    """Rounds that count."""
    micro_batches: int
    """The most that a rank did in a round."""
    epochs: int
    elapsed_s: float
    samples: int
    samples_per_s: float
    noise_scale: float
    """The batch at which noise and gradient are equally large, in the last tenth of the rounds; NaN: not known."""
    slowdown: float
    kinds: dict[str, float]
    """Fraction of the time lost to each kind; with ``ideal`` they sum to 1."""
    ideal: float
    """Fraction of the time that the ideal takes: 1 / slowdown."""
    ranks: RankFigures
    over_time: OverTime
    alternatives: Alternatives | None
    no_alternatives: str
    """Why there are no alternatives."""

    @property
    def waiting_for_ranks(self) -> float:
        """Fraction of the time lost because ranks were later than the ideal."""
        return self.kinds["computing"] + self.kinds["input"] + self.kinds["loop"]

    @property
    def fractions(self) -> TimeFractions:
        """Which fraction of the time each kind of loss, and each rank, has taken."""
        return TimeFractions(self.ideal, self.kinds, self.ranks.cost, self.ranks.cost_input)


def figures(run: Run, *, replayed: bool = True) -> Figures:
    """Return a run's figures; a ``ValueError`` says which one it lacks. ``replayed``: also simulate other splits."""
    counts = counted(run)
    if not counts.any():
        raise ValueError(
            f"a report needs a round with a plausible duration, and none of the {len(run.round)} recorded rounds has "
            "one; train for more rounds"
        )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of figures that cannot be true
        done = work(run)
        lost = attribute(run, done)
        measured = speeds(run, done)
        if not lost.ideal_s[counts].sum() > 0:
            raise ValueError(
                "a report needs a round with samples and a plausible computing time, and no rank has one; record the "
                "run again"
            )
        fractions = time_fractions(lost, counts)
        elapsed_s = float(lost.elapsed_s[counts].sum())
        samples = run.samples[counts].sum(axis=0)
        other, no_other = _replayed(run, replayed)
        return Figures(
            policy=run.policy,
            workers=run.workers,
            global_batch=_global_batch(run, counts),
            rounds=int(counts.sum()),
            micro_batches=int(run.micro_batches[counts].max()),
            epochs=len(np.unique(run.epoch)),
            elapsed_s=elapsed_s,
            samples=int(samples.sum()),
            samples_per_s=float(samples.sum() / elapsed_s),
            noise_scale=_recent(run.noise_scale),
            slowdown=elapsed_s / float(lost.ideal_s[counts].sum()),
            kinds=fractions.kinds,
            ideal=fractions.ideal,
            ranks=_ranks(run, done, lost.own_s, fractions, measured, counts),
            over_time=_over_time(run, lost, measured, counts),
            alternatives=other,
            no_alternatives=no_other,
        )


def _recent(scales: Floats) -> float:
    """Return the median over the last tenth of the rounds; NaN unless it is known in most of them."""
    # Noise grows as the loss falls, so a mean over the run would tell nothing of where it stands. One round scatters.
    recent = scales[-max(len(scales) // 10, 1) :]
    known = recent[recent > 0.0]
    return float(np.median(known)) if 2 * len(known) > len(recent) else float("nan")


def _ranks(
    run: Run, done: Work, own_s: Floats, fractions: TimeFractions, measured: Floats, counts: npt.NDArray[np.bool_]
) -> RankFigures:
    mean = mean_speed(measured[counts])
    last = own_s[counts] >= own_s[counts].max(axis=1, keepdims=True)
    waits = ((run.wait_s >= 0) & (run.wait_s <= LONGEST_ROUND_S)).all(axis=1) & counts
    return RankFigures(
        cost=fractions.cost,
        cost_input=fractions.cost_input,
        input=done.input_s[counts].sum(axis=0) / run.elapsed_s[counts].sum(),
        last=last.mean(axis=0),
        samples_per_s=mean,
        of_best_rank=mean / np.nanmax(mean) if np.isfinite(mean).any() else mean,
        waiting=np.asarray(run.wait_s[waits].sum(axis=0) / run.elapsed_s[waits].sum()),  # NaN if none is known
    )


def _over_time(run: Run, lost: Attribution, measured: Floats, counts: npt.NDArray[np.bool_]) -> OverTime:
    number, workers = run.round[counts], run.workers
    begins = _parts(len(number), BLOCKS_DRAWN)

    def means(values: Floats) -> Floats:
        """Return the mean of the known values of each block, along the first axis; NaN if none is."""
        known = np.isfinite(values[counts])
        total = np.add.reduceat(np.where(known, values[counts], 0.0), begins, axis=0)
        return np.asarray(total / np.add.reduceat(known.astype(np.float64), begins, axis=0))

    first, round_s = _parts(workers, HEAT_ROWS), means(lost.elapsed_s)
    # The worst rank of each group, because a mean would hide a single slow rank.
    cost = np.fmax.reduceat((means(lost.cost_s) / round_s[:, None]).T, first, axis=0)
    return OverTime(
        edges=np.append(number[begins], number[-1] + 1),
        round_s=round_s,
        ideal_s=means(lost.ideal_s),
        kinds_s={kind: means(lost.kinds_s[kind]) for kind in KINDS},
        batches=Curves.of(means(run.samples.astype(np.float64))),
        speed=Curves.of(means(measured)),
        waiting_s=Curves.of(means(run.wait_s)),
        cost=Heat(cost, tuple(first.tolist())),
    )


def _parts(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return the beginnings of at most ``most`` equal parts of ``count`` things."""
    return np.unique(np.linspace(0, count, min(count, most), endpoint=False).astype(np.int64))


def _global_batch(run: Run, counts: npt.NDArray[np.bool_]) -> int:
    # An epoch's last round holds what the others leave. That is no other global batch.
    whole = counts & np.append(run.epoch[1:] == run.epoch[:-1], False)
    return round(float(totals_of(run)[whole if whole.any() else counts].mean()))


def _replayed(run: Run, replayed: bool) -> tuple[Alternatives | None, str]:
    """Return the other splits, or why there are none."""
    if run.workers == 1:
        return None, "a single rank gets all samples under every policy."
    if not replayed:
        return None, "--no-replay was given."
    try:
        return alternatives(run), ""
    except ValueError as error:
        return None, str(error)
