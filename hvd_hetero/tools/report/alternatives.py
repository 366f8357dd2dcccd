"""The speeds of equal batches, the best split, LB-BSP, and fewer ranks, on the machines of a recorded run.

The run is replayed in simulated time, as ``hvd-hetero simulate --from`` does it; ``simulation.recorded_machines`` lists
the assumptions. The best split is the one to choose if a round's speeds were known before it began; with
equal transfers no split can be faster. It is what a person would set by hand, round by round. If the run leaves the
fixed cost of a micro-batch open, a figure has a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvd_hetero.telemetry.run import Run
from hvd_hetero.tools.simulation.compare import WARM_UP, compare_between
from hvd_hetero.tools.simulation.description import check, recorded_description
from hvd_hetero.tools.simulation.policy_choices import choose
from hvd_hetero.tools.simulation.worth import Worth, worth_of_run

# A replay takes time in proportion to rounds times ranks (arbitrary).
RANK_ROUNDS_REPLAYED = 100_000
# More rounds would make the figures no more exact, fewer would leave them to chance (arbitrary).
ROUNDS_REPLAYED, ROUNDS_REPLAYED_AT_LEAST = 300, 40

_NAMES = {"bsp": "equal batches", "lb-bsp": "lb-bsp", "best-split": "best split"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """A policy on the machines of the run."""

    name: str
    samples_per_s: float
    least: float
    """Least samples per second that the run allows."""
    most: float

    @property
    def certain(self) -> bool:
        """True if the run determines this figure."""
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The speeds of other splits."""

    samples_per_s: float
    """Samples per second of the run itself, in the replayed rounds."""
    rounds: int
    """Number of replayed rounds."""
    each: tuple[Alternative, ...]
    worth: Worth | None = None
    """What each rank is worth on the replayed machines."""

    def of(self, name: str) -> Alternative | None:
        """Return the alternative of this name."""
        return next((each for each in self.each if each.name == name), None)


def alternatives(run: Run) -> Alternatives:
    """Return the speeds of other splits by a replay of the run; a ``ValueError`` says why that is impossible."""
    # Of a long run the last rounds: they are what comes next.
    most = min(max(RANK_ROUNDS_REPLAYED // run.workers, ROUNDS_REPLAYED_AT_LEAST), ROUNDS_REPLAYED)
    recent = np.arange(len(run.round)) >= len(run.round) - most
    timed = (run.samples > 0) & (run.compute_s > 0)
    # Of a rank that is idle in all of these rounds, the last round that shows its speed comes with them.
    recent[len(timed) - 1 - timed[::-1].argmax(axis=0)] = True
    part = run.take(recent)
    # Of a run under lb-bsp, the run itself says what lb-bsp makes.
    balanced = [] if run.policy == "lb-bsp" else [choose("lb-bsp", "report")]
    described, machines = recorded_description(part, [choose("bsp", "report"), *balanced])
    # The rounds that were kept are whole, so these have no short last round of an epoch either.
    described = replace(described, dataset=None)
    check(described, "the run")
    found = compare_between(described)
    samples, elapsed_s = (column[list(machines.kept)] for column in (part.samples.sum(axis=1), part.elapsed_s))
    counts = np.cumsum(samples) >= WARM_UP * samples.sum()
    measured = float(samples[counts].sum() / elapsed_s[counts].sum())
    rates = {outcome.policy: outcome.samples_per_s for outcome in found}
    ends = {outcome.policy: outcome.between.get("samples_per_s", (rates[outcome.policy],) * 2) for outcome in found}
    each = [Alternative(name, rates[of], *ends[of]) for of, name in _NAMES.items() if of in rates]
    return Alternatives(measured, machines.rounds, tuple(each), worth_of_run(machines))
