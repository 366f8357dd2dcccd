r"""Several policies on one cluster, each until it has trained on the same number of samples, and which one to take.

Policy j makes r_j times BSP's samples per second, with an error of e_j. Recommended is the largest r_j - e_j, because
then no other policy is better by more than its error:

    r_i - e_i <= r_j - e_j <= r_j          for all i
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.measurement.gradient_noise import GradientNoise
from hvd_hetero.policies import BSP, Goodput, Policy
from hvd_hetero.rounds import RoundPlan, RoundTable
from hvd_hetero.tools.simulation.best import BestSplit
from hvd_hetero.tools.simulation.description import Description
from hvd_hetero.tools.simulation.engine import Options, RoundSimulation, Simulated, mixing_on
from hvd_hetero.tools.simulation.policy_choices import PolicyChoice
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.topology.mixing import ALLREDUCE

# Blocks whose scatter is the standard error of a ratio (arbitrary).
_BLOCKS_OF_ROUNDS = 10
# Predictors and allocations converge in the first tenth of the samples, so rates leave it out (arbitrary).
WARM_UP = 0.1
# A replay is no more exact, so a narrower range is shown as one figure.
_RANGE_FROM = 0.05
# Figures are shown with two digits.
_SHOWN_DIGIT = 0.01
# A policy whose updates take so many times as long as BSP's makes fewer of them, which readers must know (arbitrary).
_MENTION_UPDATES_FROM = 1.2
_SHARES = ("waiting_share", "transfer_share")
_FIGURES = ("samples_per_s", "times_bsp", "of_best", "round_s", *_SHARES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table. Rates and shares are without the first tenth of the samples."""

    policy: str
    samples_per_s: float
    waiting_share: float
    transfer_share: float
    round_s: float
    times_bsp: float = math.nan
    of_best: float = math.nan
    error: float = math.nan
    """By how much ``times_bsp`` may be off: uncertainty of a recorded run, and two standard errors."""
    usable: bool = True
    """True if production has this policy."""
    between: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and most of each figure that a recorded run leaves open."""

    def plain(self) -> dict[str, Any]:
        """Return plain data for JSON, which has no infinity. A figure with a range is null, and in ``between``."""
        figures = asdict(self) | dict.fromkeys(self.between)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}

    def shown(self, name: str, form: str) -> str:
        """Return a figure as text, or its range."""
        if name not in self.between:
            return format(getattr(self, name), form)
        return " … ".join(format(end, form) for end in self.between[name])


def compare(
    described: Description, progress: Callable[[str, float], None] = lambda label, share: None
) -> list[Outcome]:
    """Simulate every chosen policy, after BSP and the best split, which the ratios need."""
    labels = {choice.label for choice in described.policies}
    references = [PolicyChoice("bsp", BSP), PolicyChoice("best-split", BestSplit, usable=False)]
    choices = [*(reference for reference in references if reference.label not in labels), *described.policies]
    results = {choice.label: run_policy(described, choice, progress) for choice in choices}
    bsp = results["bsp"]
    rates = {label: result.rate(settled(result)) for label, result in results.items()}

    def outcome(choice: PolicyChoice, result: Simulated) -> Outcome:
        skip, rate = settled(result), rates[choice.label]
        return Outcome(
            choice.label,
            rate,
            result.waiting_share(skip),
            result.transfer_share(skip),
            result.round_s(skip),
            times_bsp=rate / rates["bsp"],
            of_best=rate / rates["best-split"],
            error=_two_standard_errors(result, bsp),
            usable=choice.usable,
        )

    return [outcome(choice, results[choice.label]) for choice in choices]


def compare_between(
    described: Description, progress: Callable[[str, float], None] = lambda label, share: None
) -> list[Outcome]:
    """Compare on the described cluster, and on those between which it lies; figures that differ get a range."""
    others = [replace(described, cluster=replace(c, seed=described.cluster.seed)) for c in described.between]
    each = [described, *(other for other in others if other.cluster != described.cluster)]
    found = zip(*(compare(one, progress) for one in each), strict=True)
    return [_ranged(outcomes, described.rate_error) for outcomes in found]


def _ranged(outcomes: Sequence[Outcome], rate_error: float) -> Outcome:
    """Return the first of these, with the range of each figure that differs."""
    between, ratios = {}, [outcome.times_bsp for outcome in outcomes]
    for name in _FIGURES:
        figures = [getattr(outcome, name) for outcome in outcomes]
        # The luck of another run moves all policies alike, so ratios and shares leave it out.
        luck = 1.0 + rate_error if name == "samples_per_s" else 1.0
        least, most = min(figures) / luck, max(figures) * luck
        if most - least > _RANGE_FROM * (1.0 if name in _SHARES else min(figures)):
            between[name] = least, most
    return replace(outcomes[0], between=between, error=outcomes[0].error + max(abs(r - ratios[0]) for r in ratios))


class RecordedBatches(Goodput):
    """The global batches of a recorded run, whatever this one's noise; in the end they begin again."""

    def __init__(self, totals: Sequence[int]) -> None:
        super().__init__(start=totals[0], least=min(totals), most=max(totals))
        self._totals = itertools.cycle(totals)
        next(self._totals)

    def reconsider(
        self, policy: Policy, plan: RoundPlan, table: RoundTable, noise: GradientNoise, typical_size: float
    ) -> RoundPlan:
        """Return the plan for the next recorded batch."""
        total = next(self._totals)
        return plan if total == plan.total else policy.resized(plan, total).within(table.column("limit"))


def run_policy(described: Description, choice: PolicyChoice, progress: Callable[[str, float], None]) -> Simulated:
    """Train by one policy on all described samples."""
    cluster, seed = described.cluster, described.cluster.seed
    wanted = described.rounds * described.global_batch
    data = WholeRounds(described.dataset, shuffle=True, seed=seed) if described.dataset else None
    policy = choice.make()
    mixing = mixing_on(cluster, policy, choice.sync)
    options = Options(rounds_ahead=described.rounds_ahead, signal_s=described.signal_s, sync=mixing or ALLREDUCE)
    follows = described.totals and policy.shares_alone and policy.keeps_total
    batch = RecordedBatches(described.totals) if follows else described.global_batch
    rounds = RoundSimulation(cluster, policy, batch, options=options, data=data)
    done = 0
    while done < wanted:
        finished = rounds.step()
        done += int(finished.table.total)
        progress(choice.label, done / wanted)
    return rounds.result


def settled(result: Simulated) -> int:
    """Return the first round that counts."""
    samples = np.cumsum(result.samples)
    return int(np.searchsorted(samples, WARM_UP * samples[-1]))


def _two_standard_errors(result: Simulated, bsp: Simulated) -> float:
    """Return two standard errors of the ratio of rates, from blocks of equally many samples."""
    blocks = min(_BLOCKS_OF_ROUNDS, min(len(result.samples), len(bsp.samples)) // 2)  # of two rounds at least
    if blocks < 2:
        return math.inf
    total = min(sum(result.samples), sum(bsp.samples))
    edges = np.linspace(WARM_UP * total, total, blocks + 1)

    def block_s(of: Simulated) -> NDArray[np.float64]:
        return np.diff(np.interp(edges, np.append(0, np.cumsum(of.samples)), np.append(0.0, np.cumsum(of.elapsed_s))))

    ratios = block_s(bsp) / block_s(result)
    return float(2.0 * ratios.std(ddof=1) / math.sqrt(blocks))


def recommended(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the policy that is best even if it is worse than it seems by its error; BSP counts, and gains 1."""
    # The best possible split is left out: it sees the future, so no training can choose it.
    usable = [outcome for outcome in outcomes if outcome.usable and math.isfinite(outcome.times_bsp)]
    return max(usable, key=lambda outcome: outcome.times_bsp - _error(outcome))


def recommendation(outcomes: Sequence[Outcome]) -> str:
    """Return the recommendation as a sentence, with what might be better still."""
    best, bsp = recommended(outcomes), next(o for o in outcomes if o.policy == "bsp")
    gain = "" if best.policy == "bsp" else f"{best.times_bsp:.2f} of bsp, ± {_error(best):.2f}; "
    text = f"{best.policy}: {gain}nothing else is better by more than its error"
    # Samples per second say nothing of the number of updates, which a training needs as well.
    if best.round_s > _MENTION_UPDATES_FROM * bsp.round_s:
        text += f". Its updates take {best.round_s / bsp.round_s:.1f} times as long as those of bsp, so there are fewer"
    above = best.times_bsp + _error(best) + _SHOWN_DIGIT
    if perhaps := [o for o in outcomes if o.usable and o.policy != best.policy and o.times_bsp + _error(o) > above]:
        other = max(perhaps, key=lambda outcome: outcome.times_bsp + _error(outcome))
        least = max(other.times_bsp - _error(other), 0.0)
        text += f". {other.policy} lies between {least:.2f} and {other.times_bsp + _error(other):.2f}"
    return text + "."


def _error(outcome: Outcome) -> float:
    return outcome.error if math.isfinite(outcome.error) else 0.0
