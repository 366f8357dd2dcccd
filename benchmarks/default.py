"""LB-BSP's decision against others that were tried for it, in simulated time: each on the same ranks and the same luck.

    python benchmarks/default.py [--write] [--rounds N] [--seeds N] [--only WORD ...] [--entrants NAME ...]
                                 [--traces DIR]
    python benchmarks/default.py --ranks KIND ... [--runs N] [--rounds N] [--entrants NAME ...]

Every entrant is a policy object under production's planner, meters and table (``RoundSimulation``). Ranks need
s f (m x + k b) seconds for x samples in k micro-batches: s moves with the case and is what the oracle knows, f is luck
that nobody knows. φ is the fixed share of an equal batch, or micro-batch. Figures are of the times without f:

- *over the oracle*: a round over the shortest one for that round's s, in integers; the mean over a case's rounds but
  the first 20, then over a group's cases (*all*: over the groups); and the worst case.
- *over equal*: the worst 200 rounds in a row (all, if a job has no more), over the same rounds with equal batches.
- *new splits*: plans that differ from the one before, in 100 rounds. They cost nothing here.
- *least share*: on the two ranks of the group *equal* (φ of 0.8 and more, no stumbles), the least share that any rank
  has held, of 64 samples.

Jobs have 200 rounds, and three times as many where equal ranks wander (equal, 8 ranks, stumbles) or tables are late:
then gradients are another reducer's, and a table tells of as many rounds as ``late_tables`` lets it. Rounds that end an
epoch early do not count. Traces of others are used if ``--traces`` names their folder. ``--ranks`` trains on real ranks
that sleep.
"""

from __future__ import annotations

# ruff: noqa: E402 - some are found by the path set below
import argparse
import copy
import csv
import importlib
import inspect
import itertools
import multiprocessing
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path[:0] = [
    str(Path(__file__).resolve().parent / "papers"),
    str(Path(__file__).resolve().parents[1] / "tests/unit"),
]

import alibaba
from _default_candidates import (
    ByMeans,
    Candidate,
    Cautious,
    Control,
    LeastSquares,
    Sketch,
    SketchByReverting,
    TrustRegion,
)
from _report import write_result
from late_jobs import Job
from rich.progress import track

from hvd_hetero.policies import LBBSP, Policy
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.tools.simulation import Cluster, Compute, Recorded, RoundSimulation, Worker
from hvd_hetero.tools.simulation.engine import Options
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

Floats = npt.NDArray[np.float64]
SHARE, SAMPLE_S, LOOKS, WINDOW = 64, 1e-3, 20, 200
LEAST = 16  # of SHARE samples, on equal ranks
# How much slower each real rank is; where they switch, by turns of so many rounds.
REAL, TURN = {"equal": (1, 1), "half": (1, 2), "three": (1, 2, 3), "switching": (1, 2)}, 60
SERIES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"


@dataclass(frozen=True)
class Case:
    """One job: ``slopes`` and ``fixed`` are m and b of every rank, ``moves`` and ``luck`` s and f of every round."""

    group: str
    name: str
    slopes: Floats
    fixed: Floats
    moves: Floats
    luck: Floats
    rounds_ahead: int = 0
    largest: int | None = None
    epoch: float = 0.0
    """Rounds of an epoch; 0: it has no end."""
    beside: bool = False
    """True: gradients are another reducer's, so tables come late and tell of several rounds (``late_tables``)."""

    @property
    def total(self) -> int:
        """The samples of a round."""
        return SHARE * len(self.slopes)

    def seconds(self, shares: npt.NDArray[np.int64]) -> Floats:
        """Return what each rank's share takes in each round, without luck."""
        count = np.ceil(shares / self.largest) if self.largest else 1.0
        return self.moves * (self.slopes * shares + count * self.fixed)

    def best_s(self) -> Floats:
        """Return the seconds of the best integer split of every round, by bisection."""
        low, high = np.zeros(len(self.moves)), self.seconds(np.full(len(self.slopes), self.total)).max(axis=1)
        for _ in range(50):
            middle = 0.5 * (low + high)
            enough = np.maximum(self._done_in(middle), 1.0).sum(axis=1) >= self.total
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.maximum(high, (self.moves * (self.slopes + self.fixed)).max(axis=1))

    def _done_in(self, seconds: Floats) -> Floats:
        left, done = seconds[:, None] / self.moves, np.zeros(self.moves.shape)
        if self.largest:
            whole = np.floor(left / (self.slopes * self.largest + self.fixed))
            left, done = left - whole * (self.slopes * self.largest + self.fixed), whole * self.largest
        return done + np.maximum(np.floor((left - self.fixed) / self.slopes * (1.0 + 1e-12)), 0.0)


@dataclass(frozen=True)
class Outcome:
    """What one entrant made of one case."""

    over_best: float
    over_equal: float
    new_splits: float
    least: int


Figure = Callable[[list[Outcome]], float]


def run(case: Case, policy: Policy, best_s: Floats) -> Outcome:
    """Return the figures of one job."""
    plans = plans_beside(case, policy) if case.beside else simulated(case, policy)
    whole = np.array([plan.total == case.total for plan in plans])
    shares = np.array([plan.samples for plan in plans])
    seconds = case.seconds(shares).max(axis=1)
    equal_s = case.seconds(np.full(shares.shape[1], SHARE)).max(axis=1)
    sums = [np.convolve(s[whole], np.ones(min(WINDOW, whole.sum())), "valid") for s in (seconds, equal_s)]
    counts = whole & (np.arange(len(plans)) >= LOOKS)
    changed = (shares[whole][1:] != shares[whole][:-1]).any(axis=1)
    return Outcome(
        over_best=float((seconds / best_s)[counts].mean()),
        over_equal=float((sums[0] / sums[1]).max()),
        new_splits=float(100.0 * changed.mean()),
        least=int(shares[whole].min()),
    )


def simulated(case: Case, policy: Policy) -> list[RoundPlan]:
    """Return the plans of all rounds."""
    workers = tuple(
        Worker(Compute(float(m), float(b)), variation=(Recorded("round", tuple(f)),))
        for m, b, f in zip(case.slopes, case.fixed, (case.moves * case.luck).T.tolist(), strict=True)
    )
    data = WholeRounds(round(case.epoch * case.total), shuffle=True, seed=0) if case.epoch else None
    simulation = RoundSimulation(
        Cluster(workers), policy, case.total, options=Options(rounds_ahead=case.rounds_ahead), data=data
    )
    return [simulation.step().plan for _ in range(len(case.moves))]


def plans_beside(case: Case, policy: Policy) -> list[RoundPlan]:
    """Return the plans of all rounds where another reducer sums the gradients."""
    job, plans = Job(lambda: copy.deepcopy(policy), [1.0] * len(case.slopes), case.total), []
    for factors in case.moves * case.luck:
        plans.append(job.balancers[0].plan())
        own_s = factors * (case.slopes * plans[-1].shares + case.fixed)
        job.speeds = (plans[-1].shares / own_s).tolist()
        job.round()
    return plans


def cases(rounds: int, seeds: int, traces: Path | None) -> Iterator[Case]:
    """Yield all jobs."""

    def job(
        group: str, name: str, slow: object, phi: float, scatter: float, seed: int,
        moves: Floats | None = None, stumbles: float = 0.0, in_both: bool = True, in_b: object = 1, times: int = 1,
        step_s: float = 0.0, **how: object,
    ) -> Case:  # fmt: skip
        slowness = np.array(slow, dtype=np.float64)
        chance = np.random.default_rng([zlib.crc32(f"{group} {name}".encode()), seed])
        shape = times * rounds, len(slowness)
        luck = chance.lognormal(-0.5 * scatter**2, scatter, shape)
        luck *= np.where(chance.random(shape) < stumbles, chance.uniform(2.0, 5.0, shape), 1.0)
        typical = min(how.get("largest") or SHARE, SHARE)
        fixed = (
            typical * SAMPLE_S * phi / (1.0 - phi) * (slowness if in_both else np.ones(len(slowness))) * np.array(in_b)
        )
        moves = np.ones(shape) if moves is None else moves[np.arange(len(luck)) % len(moves)]
        slopes, faster = SAMPLE_S * slowness, 1.0
        if step_s:
            faster = step_s / (SHARE * slopes + fixed).max()
        return Case(group, f"{name} ({seed})", faster * slopes, faster * fixed, moves, luck, **how)  # type: ignore[arg-type]

    shares = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)
    scatters = (0.02, 0.05, 0.15)
    steady = {"1 : 1/2": (1, 2), "1 : 1/2 : 1/3": (1, 2, 3), "1 : 10": (1, 10), "1 : 0.8": (1, 1.25)}
    for seed in range(seeds):
        for phi, scatter in itertools.product(shares, scatters):
            about = f"{phi:.0%} fixed, scatter {scatter:.0%}"
            for group, slow in steady.items():
                yield job(group, about, slow, phi, scatter, seed)
            yield job("1 : 1/2 in m alone", about, (1, 2), phi, scatter, seed, in_both=False)
            yield job("1 : 1.15 in b alone", about, (1, 1), phi, scatter, seed, in_b=(1, 1.15))
        for phi, scatter in itertools.product((0.0, 0.3, 0.8, 0.95), (0.02, 0.1)):
            about = f"{phi:.0%} fixed, scatter {scatter:.0%}"
            yield job("8 ranks", f"1 to 1/2, {about}", np.linspace(1, 2, 8), phi, scatter, seed, times=3)
            yield job("8 ranks", f"equal, {about}", np.ones(8), phi, scatter, seed, times=3)
            if seed == 0:
                yield job("32 ranks", f"one at half, {about}", [1] * 31 + [2], phi, scatter, seed)
            for n in (2, 3):
                turns = np.repeat([[2.0 if turn % n == rank else 1.0 for rank in range(n)] for turn in range(n)], 60, 0)
                yield job(f"switching, {n} ranks", about, np.ones(n), phi, scatter, seed, turns)
            for group, slow in {"equal": (1, 1), "1 : 1/2": (1, 2), "1 : 1/2 : 1/3": (1, 2, 3)}.items():
                yield job("stumbles", f"{group}, {about}", slow, phi, scatter, seed, stumbles=0.05, times=3)
                for epoch in (4.5, 40.5):
                    yield job("short rounds", f"{group}, {epoch}, {about}", slow, phi, scatter, seed, epoch=epoch)
                for rounds_ahead in (1, 5):
                    yield job(
                        "plans ahead",
                        f"{group}, {rounds_ahead}, {about}",
                        slow,
                        phi,
                        scatter,
                        seed,
                        rounds_ahead=rounds_ahead,
                    )
                for step_s in (0.04, 0.01):
                    yield job(
                        "late tables", f"{group}, {step_s:g} s, {about}", slow, phi, scatter, seed, step_s=step_s,
                        times=3, beside=True,
                    )  # fmt: skip
                for largest in (16, 40):
                    yield job(
                        "micro-batches", f"{group}, {largest}, {about}", slow, phi, scatter, seed, largest=largest
                    )
            wave = 1.0 + 0.5 * np.sin(np.arange(rounds)[:, None] / 25.0 + np.array([0.0, 2.0, 4.0]))
            yield job("waves and walks", f"wave, {about}", np.ones(3), phi, scatter, seed, wave)
            steps = np.random.default_rng([5, seed]).normal(0.0, 0.03, (rounds, 3)).cumsum(axis=0)
            walk = np.exp(np.clip(steps, -1, 1))
            yield job("waves and walks", f"walk, {about}", np.ones(3), phi, scatter, seed, walk)
        for phi in (0.0, 0.5, 0.9):
            for name, factors in recordings(traces).items():
                typical = np.median(factors, axis=0)
                slow = np.stack([np.median(factors[max(k - 4, 0) : k + 5], axis=0) for k in range(len(factors))])
                found = job("traces", f"{name}, {phi:.0%} fixed", typical, phi, 0.0, seed, slow / typical)
                found.luck[:] = (factors / slow)[np.arange(rounds) % len(factors)]
                if seed == 0:
                    yield found
    for phi, scatter, seed in itertools.product((0.8, 0.9, 0.95, 0.99), (0.02, 0.05, 0.1, 0.15), range(6)):
        yield job("equal", f"{phi:.0%} fixed, scatter {scatter:.0%}", (1, 1), phi, scatter, seed, times=3)


def recordings(traces: Path | None) -> dict[str, Floats]:
    """Return recorded times of a round, (rounds, ranks), by name."""
    own = []
    for path in sorted(SERIES.glob("series_*.csv"))[:3]:
        with path.open(encoding="utf-8", newline="") as file:
            own.append([1.0 / float(row["samples_per_s"]) for row in csv.DictReader(file)])
    found = {"recorded here": np.array([each[: min(map(len, own))] for each in own]).T}
    found["recorded here"] /= np.median(found["recorded here"])
    if traces is not None:
        for path in sorted(traces.glob("alibaba_pai_job_*.csv")):
            workers = alibaba.cluster(path)[0].workers
            seconds = np.array([np.multiply(w.variation[0].factors, w.compute.slope_s) for w in workers]).T
            found[f"Alibaba {path.stem[-1]}"] = seconds / np.median(seconds)
        from _cluster_b import series

        cpu = np.array([share for share, _ in series(traces, 8, 0)[1]]).T
        found["Google"] = np.repeat(1.0 / np.maximum(cpu, 0.05), 10, axis=0)
    return found


CONCLUSION = """Today's decision stays: none of the others has all that was asked of one in its place. That was half the
lines of today's, and ten chosen numbers at most; within 1 % of it on the mean and in each group; at least 16 of 64
samples on equal ranks; never above 1.02 of equal batches over 200 rounds. Today's itself misses the last, and the one
before with other seeds (11 of 64 where ranks stumble). *cautious steps* and *by means* are better than today's in these
tables, but they break a rule of its that was not among what was asked, and come below 16 samples more often.

- The trust region comes nearest to 1.02 here (1.021), and not with other seeds: of 16 more jobs of two equal ranks that
  stumble (seeds 1 and 2), five are above, up to 1.046, and in one a rank came to a single sample. It is behind today's
  by 6.7 % on traces, 3.7 % on waves, and 1 to 2 % in six other groups. Likely, rounds scatter more than a step
  promises, so it widens late, and where speeds move it takes their movement for an answer. Where a move waits until the
  one before is answered, it is 6 % worse at 1 : 1/2.
- None has ten chosen numbers. Half the lines have *control*, *sketch* and *least squares*, which lack the options of
  users.
- *cautious steps* and *by means* are better than today's on the mean, and worse by 0.06 and 0.4 % in their worst
  groups. They are not taken, because they break its rule that no rank gives away more than eight times what that saves.
  Of two ranks of 5.5 and 6.3 ms, 0.06 ms of which depend on the batch, one comes down to 5 of 32 samples, to save less
  than 1 % (a test in ``test_lb_bsp_noise.py``). Most of their gain is that: with the rule by the whole φ, a trial of
  cautious steps had 1.0209, 1.0266 and 1.0450 at 1 : 1/2, 1 : 10 and switching, where today's had 1.0218, 1.0299 and
  1.0487 then. So the rule of eight is what costs time on unequal ranks whose step is mostly fixed: most of
  the 0.9 % of the mean. They also make a quarter more new splits, which cost nothing here and something in training.
  And equal ranks pay for it: of the 24 jobs of two that stumble with seeds 1 to 3, *cautious steps* has 17 above 1.02
  (up to 1.116) and seven below 16 samples, *by means* ten (1.035) and four, today's ten (1.041) and one.
- Why today's may stay above equal batches: where φ is 0.8 and rounds scatter by 15 %, two changes of size in the
  first ten rounds can show φ = 0.22. By that 79 : 49 seems right on equal ranks. Sizes change no more then, so
  nothing corrects φ, and 600 rounds are 4.7 % longer. *by means* mends that in part: 73 : 55 after 84 rounds, which is
  within the tolerance of 3 %. With stumbles, up to 5 % more come of forecasts that follow the stumbles of the first
  rounds.
- Until 29 November a stumble in the round before a change of size was taken for the level there. It taught one rank
  φ = 0.15; 126 : 2 followed, and rounds 20 % longer to the end. So did 8 of 30 jobs of two equal ranks at φ = 0.8 (15
  to 19 % longer), of which none does since a round out of line begins no level. Before, LB-BSP had 1.0335 over the
  oracle with stumbles and 1.196 over equal batches. On the 24 jobs of equal ranks that stumble with seeds 1 to 3, the
  worst over the oracle fell from 1.044 to 1.023, the worst over equal batches from 1.049 to 1.041, and the least share
  rose from 1 to 11. Where speeds switch it costs a little: 0.26 % on two ranks and 0.09 % on three (32 jobs each with
  seeds 1 to 4, errors 0.21 and 0.05), since a change of size right after a switch teaches no φ. Beginning no level
  either with a round of a new size that every φ misses made no difference in these jobs (0.02 % at most).
- Tried for the same: beginning with a scatter of 0.1 instead of 0.05 (switching: 1.1 % worse); bounding what a round
  says of φ at five deviations (no more than chance, either way); keeping the level of before, until a second round
  contradicts it (switching: 3 % worse); comparing from levels of two rounds at least (φ stays unknown while every round
  has a new size; switching: 2.7 % worse).
- φ a standard deviation above its mean helps equal ranks whose rounds scatter by 15 % (1.030 over equal batches instead
  of 1.047), and costs 1 : 1/2 there a tenth (1.132 over the oracle instead of 1.025). Not tried: taking a split back
  whose mean rounds are longer than those of equal batches were. Of these there are some six before the first change of
  size, whose mean has an error of 5 %, as large as what is to be found.
- Without stumbles, what else is above 1.02 is less than the tolerance and the doubt together: *control* leaves 8 equal
  ranks at 61 to 67.
- Nearest with less than half the lines is *control*: better than today's on the mean, with fewer new splits. It is
  2.7 % behind on waves and 2.6 % on traces, where its means lag, and 0.4 % with micro-batches and at 1 : 1/2 in m
  alone.
- *sketch* judges gains at the upper φ; at the mean of φ, in jobs of 200 rounds, it had 1.0631 with micro-batches and
  1.0335 on the mean. Of 16 jobs of equal ranks two came below 16 samples by the upper φ, and four by the mean.
  *with Reverting* and *slower* are worse on the mean than what they vary.
"""
NOTES = """Of the entrants:

- *cautious steps*: today's, but no step counts on more than φ = 3/4.
- *by means*: cautious steps, and where a split has stayed for 9 rounds a rank's mean time replaces its forecast, unless
  forecasts contradict it twice in a row. So its doubt falls with the rounds.
- *trust region*: speeds by ``Reverting`` and today's fixed cost propose; a split stays within a radius around equal
  shares (1/2 at first, 1/8 at least), which doubles where the rounds have saved more than a quarter of the promised
  time, by means and beyond doubt, and halves where they have not; then the split is taken back.
- *control*: mean times since the last change and a dead band of three errors, beside today's fixed cost and division.
  A step after which rounds are longer is taken back; in *not taken back* it is not.
- *sketch*: all from the pooled table, without predictors. Three averages of each rank's log time and size, mixed by the
  sixth power of their errors; one grid of φ, weighed by a Student likelihood; departures of eight times the gain at the
  85 % quantile of φ. *with Reverting*: by its forecasts in place of the averages.
- *least squares*: t = a x + b by rank, with forgetting (20 rounds; *slower*: 50) and a common prior for b / a; a move
  beyond two standard errors (three).

On real ranks, which sleep (``--ranks``, 160 rounds, one quiet run each), rounds of today's and of cautious steps took
60.05 and 59.56 ms (half), 76.34 and 76.08 (three), 60.47 and 62.29 (switching). On two equal ones, today's had least
shares of 48 to 64 in ten runs (``--ranks equal --runs 10 --rounds 400``), and of 45 to 64 in an earlier ten.

Lines are those of the modules and of the classes here. Only today's have the options of users (memory, multiples, ranks
that rest, states): some 350 lines. Without them *control* is nearer two thirds of today's than half. Numbers are those
that somebody chose, counted by hand; a grid counts as one. All tables but the rows of equal ranks are of one seed, so a
worst case is a lower bound: other seeds have worse ones.
"""


@dataclass(frozen=True)
class Entrant:
    """A decision: what makes it, the modules of the package that it is made of, and the numbers chosen in both."""

    kind: type[Policy]
    modules: tuple[str, ...]
    numbers: int
    figures: tuple[tuple[str, object], ...] = ()
    predictor: str = ""

    def policy(self, largest: int | None = None) -> Policy:
        """Return a policy with micro-batches of so many samples at most."""
        policy = self.kind(*filter(None, [self.predictor]), max_micro_batch=largest)  # type: ignore[call-arg]
        vars(policy).update(self.figures)
        return policy

    @property
    def lines(self) -> int:
        """Lines of the modules, and of the classes that are defined for this comparison."""
        kinds = [*self.kind.__mro__, *getattr(self.kind, "made_of", ())]
        own = [kind for kind in kinds if kind.__module__ == Candidate.__module__]
        files = [Path(str(importlib.import_module(f"hvd_hetero.{name}").__file__)) for name in self.modules]
        return sum(len(inspect.getsourcelines(kind)[0]) for kind in own) + sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in files
        )


# The numbers chosen in each module; a grid is one.
NUMBERS = {
    "policies.lb_bsp": 4, "policies.affine_shares": 1, "policies.evidence": 5, "policies.resting": 4,
    "measurement.fixed_cost": 12, "prediction.mixture": 5, "prediction.reverting": 7,
}  # fmt: skip
SHARES, FIXED, REVERTING = "policies.affine_shares", "measurement.fixed_cost", "prediction.reverting"


def entrant(kind: type[Policy], own: int, *modules: str, predictor: str = "", **figures: object) -> Entrant:
    """Return an entrant of this class, in which ``own`` numbers are chosen."""
    return Entrant(kind, modules, own + sum(map(NUMBERS.__getitem__, modules)), tuple(figures.items()), predictor)


ENTRANTS = {
    "LB-BSP": entrant(LBBSP, 0, *NUMBERS),
    "cautious steps": entrant(Cautious, 1, *NUMBERS),
    "by means": entrant(ByMeans, 4, *NUMBERS),
    "trust region": entrant(TrustRegion, 17, SHARES, FIXED, REVERTING),
    "control": entrant(Control, 14, SHARES, FIXED),
    "not taken back": entrant(Control, 12, SHARES, FIXED, takes_back=False),
    "sketch": entrant(Sketch, 26, SHARES, upper=True),
    "with Reverting": entrant(SketchByReverting, 27, SHARES, FIXED, REVERTING, upper=True),
    "least squares": entrant(LeastSquares, 14, SHARES),
    "slower": entrant(LeastSquares, 14, SHARES, keep=0.98, errors=3.0),
}


def table(found: dict[str, dict[str, list[Outcome]]]) -> list[str]:
    """Return one table of each figure: groups by entrants."""
    lines: list[str] = []
    groups = list(dict.fromkeys(group for each in found.values() for group in each))

    def add(title: str, figure: Figure, form: str, last: Callable[[list[float]], float]) -> None:
        lines.extend([f"{title}:", "", "| | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)])
        columns = {name: [figure(each[group]) for group in groups] for name, each in found.items()}
        for k, group in enumerate(groups):
            count = len(next(iter(found.values()))[group])
            lines.append(f"| {group} ({count}) | " + " | ".join(format(c[k], form) for c in columns.values()) + " |")
        lines.append("| **all** | " + " | ".join(f"**{last(c):{form}}**" for c in columns.values()) + " |")
        lines.append("")

    add("Over the oracle, mean", lambda o: mean([x.over_best for x in o]), ".4f", mean)
    add("Over the oracle, worst case", lambda o: max(x.over_best for x in o), ".3f", max)
    add("Over equal batches, worst 200 rounds", lambda o: max(x.over_equal for x in o), ".3f", max)
    add("New splits in 100 rounds", lambda o: mean([x.new_splits for x in o]), ".1f", mean)
    return lines


def summary(found: dict[str, dict[str, list[Outcome]]]) -> list[str]:
    """Return one row of each entrant."""
    columns = ("lines", "chosen numbers", "over the oracle", "most behind today's", "over equal", "new splits")
    lines = ["| | " + " | ".join([*columns, "least share on equal ranks"]) + " |", "|---" * 8 + "|"]
    means = {name: {g: mean([x.over_best for x in o]) for g, o in each.items()} for name, each in found.items()}
    todays = means[next(iter(found))]
    for name, each in found.items():
        outcomes, equal = list(itertools.chain(*each.values())), sorted(x.least for x in each.get("equal", []))
        behind, group = max((of / todays[g] - 1, g) for g, of in means[name].items())
        splits = mean([mean([x.new_splits for x in o]) for o in each.values()])
        least = f"{equal[0]}, median {equal[len(equal) // 2]}" if equal else ""
        if below := sum(share < LEAST for share in equal):
            least += f", {below} of {len(equal)} below {LEAST}"
        lines.append(
            f"| {name} | {ENTRANTS[name].lines} | {ENTRANTS[name].numbers} | {mean(list(means[name].values())):.4f} | "
            f"{f'{behind:.1%}, {group}' if behind > 0 else ''} | {max(x.over_equal for x in outcomes):.3f} | "
            f"{splits:.1f} | {least} |"
        )
    return [*lines, ""]


def mean(figures: list[float]) -> float:
    """Return the mean."""
    return float(np.mean(figures))


def of_ranks(kinds: list[str], entrants: list[str], runs: int, rounds: int) -> int:
    """Print what real ranks make of it; exit with 1 if an equal one has held fewer samples than ``LEAST``."""
    from hvd_hetero.testing import launch, torchrun

    rank, enough = Path(__file__).with_name("_default_rank.py"), True
    about = itertools.cycle([(0.9, 0.05), (0.95, 0.1), (0.8, 0.1)])
    for kind, run in itertools.product(kinds, range(runs)):
        phi, scatter = next(about) if kind == "equal" else (0.5, 0.05)
        for name in entrants[:: (-1) ** run]:
            arguments = [kind, name, phi, scatter, run, rounds]
            starter = torchrun(len(REAL[kind]))
            told = launch(rank, len(REAL[kind]), arguments, timeout_s=1800, starter=starter).reports[0]
            enough &= kind != "equal" or told["least"] >= LEAST
            print(
                f"{kind}, {phi:.0%} fixed, scatter {scatter:.0%} ({run}), {name}: "
                f"{1e3 * told['round_s']:.2f} ms a round, least {told['least']}, {told['splits']} new splits",
                flush=True,
            )
    return 0 if enough else 1


def outcomes_of(entrants: Sequence[str], case: Case) -> list[Outcome]:
    """Return what each entrant makes of a case."""
    best_s = case.best_s()
    return [run(case, ENTRANTS[name].policy(case.largest), best_s) for name in entrants]


def main() -> int:
    """Run all and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the tables in benchmarks/results")
    parser.add_argument("--rounds", type=int, default=200, help="of a short job; long ones have three times as many")
    parser.add_argument("--seeds", type=int, default=1, help="of all but equal ranks, which have six")
    parser.add_argument("--only", nargs="+", default=[], help="groups whose names hold one of these words")
    parser.add_argument("--entrants", nargs="+", choices=ENTRANTS, default=list(ENTRANTS))
    parser.add_argument("--traces", type=Path, help="folder with traces of others")
    parser.add_argument("--ranks", nargs="+", choices=REAL, help="on real ranks of these kinds, instead of all else")
    parser.add_argument("--runs", type=int, default=2, help="on real ranks")
    options = parser.parse_args()
    if options.ranks:
        return of_ranks(options.ranks, options.entrants, options.runs, options.rounds)
    found: dict[str, dict[str, list[Outcome]]] = {name: {} for name in options.entrants}
    jobs = cases(options.rounds, options.seeds, options.traces)
    chosen = [job for job in jobs if not options.only or any(word in job.group for word in options.only)]
    jobs_of = partial(outcomes_of, options.entrants)
    # No BLAS call is large enough for a second thread, so each processor simulates jobs of its own.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for case, outcomes in zip(chosen, track(pool.map(jobs_of, chosen), "simulating", len(chosen)), strict=True):
            for name, outcome in zip(options.entrants, outcomes, strict=True):
                found[name].setdefault(case.group, []).append(outcome)
    text = "\n".join([CONCLUSION, *summary(found), *table(found), NOTES])
    print(text)
    if options.write:
        print(write_result("default", text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
