"""LB-BSP with fixed costs per step: its shares against the best ones for the ranks' true costs.

    python benchmarks/fixed_cost.py [--write] [--rounds N] [--seeds N]

Each rank needs (m x + b) seconds for x samples, with b from 0 to 100 times the time of an equal share's samples. Cases
have 1, 2 or 3 ranks, equal or 1 : 1/2 (: 1/3), where a slower rank is slower in both parts or in m alone; 200 rounds in
simulated time; with or without a passing slow-down of the last rank (2, 3, 10 times, rounds 60 to 90); with or without
a short last round every 40 rounds; times that scatter by nothing, 2 % or 5 % (log-normal). Policy and measurements are
production's.

The table has, per case, the mean time of a round over the best integer split's for the true costs of that round
(``minimax``, without scatter), and the rounds in which a rank has less than half of its best share. Short rounds, and
the 20 rounds after the start and after each change of pace, do not count.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
from _report import write_result
from rich.progress import track

from hvd_hetero.allocation import minimax
from hvd_hetero.policies import LBBSP
from hvd_hetero.tools.simulation import Cluster, RoundSimulation
from hvd_hetero.tools.simulation.cluster import Worker
from hvd_hetero.tools.simulation.compute import Compute
from hvd_hetero.tools.simulation.variation import Jitter, Recorded
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

SHARE, SAMPLE_S = 64, 1e-3
SLOW_FROM, SLOW_TO, LOOKS = 60, 90, 20
RATIOS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
NOISES = (0.0, 0.02, 0.05)
FACTORS = (1.0, 2.0, 3.0, 10.0)


@dataclass(frozen=True)
class Case:
    """Parameters of one job."""

    ranks: int
    equal: bool
    both: bool
    """True if a slower rank is slower in its fixed part, too."""
    ratio: float
    factor: float
    noise: float
    short: bool

    @property
    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return m and b of every rank."""
        slowness = np.ones(self.ranks) if self.equal else np.arange(1.0, self.ranks + 1)
        fixed_s = self.ratio * SHARE * SAMPLE_S
        return SAMPLE_S * slowness, fixed_s * (slowness if self.both else np.ones(self.ranks))


def run(case: Case, rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, per counted round, the time over the best time, and the smallest share over its best one."""
    slopes, fixed = case.costs
    passing = [1.0] * SLOW_FROM + [case.factor] * (SLOW_TO - SLOW_FROM) + [1.0] * (rounds - SLOW_TO)
    workers = []
    for rank in range(case.ranks):
        variation = [Jitter("round", case.noise)] if case.noise else []
        if rank == case.ranks - 1:
            variation.append(Recorded("round", tuple(passing)))
        workers.append(Worker(Compute(float(slopes[rank]), float(fixed[rank])), variation=tuple(variation)))
    total = SHARE * case.ranks
    data = WholeRounds(40 * total - total // 2, shuffle=True, seed=seed) if case.short else None
    simulation = RoundSimulation(Cluster(tuple(workers), seed=seed), LBBSP(), total, data=data)
    times, shares = [], []
    for round in range(rounds):
        plan = simulation.step().plan
        changed = any(0 <= round - change < LOOKS for change in (0, SLOW_FROM, SLOW_TO))
        if changed or plan.total < total:
            continue
        slow = np.ones(case.ranks)
        slow[-1] = passing[round]
        best = minimax(slopes * slow, fixed * slow, 0.0, total, 1, total)
        held = np.array(plan.samples)
        times.append(float((slow * (slopes * held + fixed)).max() / best.latest_s))
        shares.append(float((held / best.shares).min()))
    return np.array(times), np.array(shares)


def cases() -> list[Case]:
    """Return all jobs."""
    found = []
    for ranks, equal, both, ratio, factor, noise, short in itertools.product(
        (1, 2, 3), (True, False), (True, False), RATIOS, FACTORS, NOISES, (True, False)
    ):
        if (ranks == 1 and not (equal and both)) or (equal and not both):
            continue
        found.append(Case(ranks, equal, both, ratio, factor, noise, short))
    return found


def kind(case: Case) -> str:
    """Return the row of the table that a job belongs to."""
    if case.ranks == 1:
        return "one rank"
    if case.equal:
        return f"{case.ranks} ranks, equal"
    slower = "1 : 1/2" + (" : 1/3" if case.ranks == 3 else "")
    return f"{case.ranks} ranks, {slower}, " + ("in both parts" if case.both else "in m alone")


def main() -> int:
    """Run all and print a table; exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    found: dict[tuple[str, float], list[tuple[str, float, float]]] = {}
    for case in track(cases(), description="simulating", transient=True):
        for seed in range(options.seeds):
            times, shares = run(case, options.rounds, seed)
            outcome = (kind(case), float(times.mean()), float(np.mean(shares < 0.5)))
            found.setdefault((kind(case), case.noise), []).append(outcome)
    lines = [
        "| ranks | scatter | cases | time over the best, mean | worst case | cases above 1.03 | "
        "cases with a rank below half of its best share | in so many of all rounds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    missed = 0
    for (name, noise), outcomes in found.items():
        times, low = np.array([t for _, t, _ in outcomes]), np.array([share for _, _, share in outcomes])
        missed += int((times > 1.03).sum() + (low > 0).sum())
        lines.append(
            f"| {name} | {noise:.0%} | {len(times)} | {times.mean():.3f} | {times.max():.3f} | "
            f"{(times > 1.03).sum()} | {(low > 0).sum()} | {low.mean():.2%} |"
        )
    verdict = "met in all cases" if not missed else f"missed {missed} times"
    text = "\n".join(lines) + f"\n\nAt most 1.03 of the best time, and no rank below half of its best share: {verdict}."
    print(text)
    if options.write:
        print(write_result("fixed_cost", text))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
