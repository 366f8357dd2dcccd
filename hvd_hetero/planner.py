"""From the table of a round to the plan of a later one.

**Rounds ahead.** A loader that prefetches must know plans early. With plans L rounds ahead, the table of round r
decides the plan of round r + 1 + L; until the first table arrives, the policy's first plan holds. L must be the same on
every rank.

A table passes three stages: speeds that cannot be true are taken out (``measurement.plausibility``), the policy
decides, and micro-batches are cut to what each rank's memory holds. Where the global batch adapts, a fourth one decides
it (``policies.goodput``). Every rank's planner does the same from the same table, so the ranks agree without talking.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_hetero.bounds import NO_BOUND, Room, bounds_array, bounds_of_ranks
from hvd_hetero.errors import RoundStateError
from hvd_hetero.kept import Kept
from hvd_hetero.measurement.anticipation import Anticipation
from hvd_hetero.measurement.fixed_cost import FixedCosts
from hvd_hetero.measurement.gradient_noise import SUM_ROUNDING, GradientNoise, noise_of
from hvd_hetero.measurement.plausibility import Plausibility
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import LENGTHS, CostRule, FinishedRound, RoundPlan, RoundTable
from hvd_hetero.telemetry.changes import log_change, log_rests

if TYPE_CHECKING:
    from hvd_hetero.policies.goodput import Goodput


class Planner(Kept):
    """The plans of one training.

    ``logs``: say in the log which ranks' speeds are not believed, and what changes. ``devices``: the ranks', by name.
    """

    PARTS = ("noise", "goodput", "anticipation", "fixed_costs")

    def __init__(
        self, policy: Policy, workers: int, global_batch: int | Goodput, *, logs: bool = False,
        devices: Sequence[str] = (),
    ) -> None:  # fmt: skip
        # What it learns belongs to this training, and users may begin another one with it.
        policy = copy.deepcopy(policy)
        said = getattr(policy, "max_micro_batch", None)
        if said is not None:
            said = bounds_of_ranks("max_micro_batch", said, workers, devices, logs=logs)
            policy.max_micro_batch = said  # type: ignore[attr-defined]
        self.room = Room(bounds_array(said, workers), devices)
        self.goodput: Goodput | None = None
        """The policy of the global batch, where that adapts; None: it stays."""
        self.rate_factor = 1.0
        """The factor of the learning rate in the update of the round that was agreed."""
        if not isinstance(global_batch, int | np.integer):
            # Imported here, because few trainings need it, and it imports solvers.
            from hvd_hetero.policies.goodput import Goodput

            if isinstance(global_batch, Goodput):
                self.goodput, global_batch = copy.deepcopy(global_batch), global_batch.start
                self.goodput.begin(policy, workers)
        if isinstance(global_batch, bool) or not isinstance(global_batch, int | np.integer):
            raise TypeError(
                f"global_batch must be an integer number of samples, got {global_batch!r}; give those of a round over "
                "all ranks together, or a Goodput"
            )
        if global_batch < workers:
            raise ValueError(
                f"global_batch must be at least the number of ranks, so that each holds a sample: got {global_batch} "
                f"for {workers} ranks; raise global_batch or launch fewer ranks"
            )
        self.policy = policy
        self.global_batch = int(global_batch)
        self.noise = GradientNoise()
        self.epoch_samples = math.inf
        """Samples of an epoch; infinite if not known."""
        self.rounds = 0
        """Rounds agreed so far."""
        first = self._begins = self.room.bounded(policy.first(workers, self.global_batch))
        self._plans = deque([first])
        self._rules = deque([LENGTHS])
        self.anticipation = Anticipation() if policy.anticipates else None
        by_line = policy.weighs_fixed_cost or (self.goodput is not None and policy.profile() is None)
        self.fixed_costs = FixedCosts(first.typical_size, workers) if by_line else None
        self._said_to_rest: set[int] | None = set() if logs else None
        self._plausibility = Plausibility(workers, first.typical_size, logs=logs) if policy.measures else None

    @property
    def typical_size(self) -> float:
        """The size of micro-batches that the ranks' speeds refer to."""
        return self._begins.typical_size

    @property
    def workers(self) -> int:
        """How many ranks there are."""
        return self._begins.workers

    def require_equal_counts(self, micro_batches: int, *, exactly: bool = True) -> None:
        """Plan equally many micro-batches on all ranks, at least so many or ``exactly``; they bound the shares."""
        self.room.least, self.room.exactly = micro_batches, exactly
        if exactly and (lack := self.room.lack(self.global_batch)):
            raise ValueError(lack)
        multiple = self.policy.multiple_of
        self._plans = deque(self.room.bounded(plan, multiple_of=multiple) for plan in self._plans)

    def begin_by_memory(self, sizes: Sequence[float]) -> None:
        """Begin with shares in proportion to the devices' memory, on ranks where these are less than planned."""
        plan = self._plans[0]
        if self.rounds == 0 and self.policy.measures and min(sizes) > 0.0:
            whole = math.fsum(sizes)
            most = np.array([max(math.ceil(plan.total * size / whole), self.policy.minimum) for size in sizes])
            capped = plan.capped(np.where(most < plan.shares, most, NO_BOUND), multiple_of=self.policy.multiple_of)
            self._plans = deque([capped] * len(self._plans))

    @property
    def keeps_total(self) -> bool:
        """True if all rounds have the same number of samples, but for the last of an epoch."""
        return self.policy.keeps_total and self.goodput is None

    @property
    def progress(self) -> float:
        """Updates, each counted as the updates with the first global batch that it is worth."""
        return float(self.rounds) if self.goodput is None else self.goodput.progress

    def note_epoch(self, samples: int | None) -> None:
        """Note how many samples the present epoch has, the same on every rank; None: not known."""
        self.epoch_samples = math.inf if samples is None else samples

    def count_update(self, samples: int) -> None:
        """Count the progress of an update with so many samples, alike on all ranks, and decide its ``rate_factor``."""
        if self.goodput is not None:
            self.rate_factor = self.goodput.advance(samples, self.noise)

    def begin_anew(self) -> None:
        """Where the global batch adapts, begin another training with the first one, by the same machines."""
        self.rate_factor = 1.0
        if self.goodput is not None:
            self.goodput.begin(self.policy, self.workers)
            self.noise = GradientNoise()
            resized = (self.policy.resized(plan, self.global_batch) for plan in self._plans)
            self._plans = deque(self.room.bounded(plan) for plan in resized)

    @property
    def rounds_ahead(self) -> int:
        """How many rounds ahead plans are fixed."""
        return len(self._plans) - 1

    def set_rounds_ahead(self, rounds: int, *, begun: bool = False) -> None:
        """Fix plans this many rounds ahead. Before the first round only, and the same on every rank."""
        if rounds == self.rounds_ahead:
            return
        if self.rounds or begun:
            raise RoundStateError(
                f"plans are fixed {self.rounds_ahead} rounds ahead since training began, and cannot be fixed {rounds} "
                "ahead now; give every loader of one LoadBalance the same num_workers and prefetch_factor (in Keras, "
                "every resize_batches the same prefetch)"
            )
        self._plans = deque([self._plans[0]] * (rounds + 1))
        self._rules = deque([LENGTHS] * (rounds + 1))

    def rule(self, ahead: int) -> CostRule:
        """Return what samples cost in the round ``ahead`` rounds after the present one (or the next)."""
        return self._rules[ahead]

    def plan(self, ahead: int = 0) -> RoundPlan:
        """Return the plan of the round ``ahead`` rounds after the present one (or the next, between rounds)."""
        if not 0 <= ahead <= self.rounds_ahead:
            raise RoundStateError(
                f"plans are known up to {self.rounds_ahead} rounds ahead, asked for {ahead}; iterate over one loader "
                "of a LoadBalance at a time, and give one that is zipped or nested with it a LoadBalance of its own"
            )
        return self._plans[ahead]

    def is_short(self, plan: RoundPlan) -> bool:
        """Return whether the plan of the present round has been shortened, as at the end of an epoch."""
        return plan.total < self._plans[0].total

    def learn(self, finished: FinishedRound) -> None:
        """Decide one more plan, after the ranks have agreed on the present round."""
        short = self.is_short(finished.plan)
        self.move_on()
        self.revise(finished, short=short)

    def move_on(self) -> None:
        """End the present round: the latest plan holds for one round more, unless a table changes it."""
        self._plans.append(self._plans[-1])
        self._plans.popleft()
        self._rules.append(self._rules[-1])
        self._rules.popleft()
        self.rounds += 1

    def revise(self, finished: FinishedRound, *, short: bool) -> None:
        """Decide the latest plan again, by a table of rounds that are over."""
        self._learn_noise(finished.table)
        believed = finished
        if self._plausibility is not None:
            table = self._plausibility(finished.round, finished.table, short=short)
            believed = finished if table is finished.table else replace(finished, table=table)
        if self.fixed_costs is not None:
            self.fixed_costs.learn(finished.table, short=short)
        plan = self.policy.next(self._plans[-1], believed)
        if plan is self._plans[-1] and self.policy.shares_alone and plan.batch_counts.max() > 1:
            plan = RoundPlan.of(plan.samples)  # what memory has cut may fit again
        self.room.learn(finished)
        if self.goodput is not None:
            plan = plan.within(self.room.held)
            self.goodput.fits = self.room.most_held(plan.total)
            plan = self.goodput.reconsider(self.policy, plan, believed.table, self.noise, self.typical_size)
        fixed_samples = finished.table.column("fixed_samples")
        plan = self.room.bounded(plan, fixed_samples, self.policy.multiple_of)
        if self._said_to_rest is not None:
            log_change(self.rounds + self.rounds_ahead, self._plans[-1], plan, believed.table)
            if self.policy.may_rest:
                log_rests(self.rounds + self.rounds_ahead, plan, self._said_to_rest)
        self._plans[-1] = plan
        self._rules[-1] = CostRule.agreed(finished.table) or self._rules[-1]
        if self.anticipation is not None and finished.plan.ends == "first":
            self.anticipation.learn(finished)

    def _learn_noise(self, table: RoundTable) -> None:
        samples = table.figures("gradient_samples")
        if any(samples):
            # All ranks compute |g|² of the same numbers, and processors add up in other orders: take rank 0's. Where
            # they differ by more, another reducer sums the gradients, and had not when they were measured.
            square = table.figures("mean_square")[0]
            own, further = table.figures("gradient_square"), math.fsum(table.figures("further_batches"))
            noise = noise_of(samples, own, square, further=further, epoch_samples=self.epoch_samples)
            if noise is not None and not table.disagreement("mean_square", SUM_ROUNDING):
                self.noise.learn(noise)

    def renegotiate(self, state: Mapping[str, Any], speeds: Sequence[float], limits: Sequence[int]) -> None:
        """Continue from another membership's state; shares follow what the present ranks know of their speeds.

        Speeds and limits are one per rank, the same on every rank: the speed that it expects (NaN: not known), and the
        largest micro-batch that fits its memory (0: none has failed).
        """
        plan = self.policy.renegotiate(self._plans[0], speeds)
        # Without the forecast of a round's end, which was that of other ranks.
        super().load_state_dict({**state, "anticipation": None})
        if self.goodput is not None and state["goodput"] is not None:
            plan = self.policy.resized(plan, self.goodput.nearest(sum(state["plans"][-1]["samples"])))
        self.room.hold(limits)
        plan = self.room.bounded(plan, multiple_of=self.policy.multiple_of)
        self._plans = deque([plan] * len(self._plans))
        self._rules = deque([CostRule(*state["rules"][-1])] * len(self._plans))
        self.rounds = state["rounds"]

    @property
    def _terms(self) -> dict[str, Any]:
        """What a state must have in common with this training."""
        # The first plan differs if options do, such as max_micro_batch and the weights of StaticAllocation.
        begins = [list(self._begins.samples), list(self._begins.micro_batches)]
        return {
            "policy": self.policy.name,
            "workers": self.workers,
            "global_batch": self.global_batch,
            "adapts": self.goodput is not None,
            "begins": begins,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the plans decided and the policy's state, as plain data; the same on every rank."""
        return {
            **self._terms,
            "rounds": self.rounds,
            "devices": self.room.devices,
            "plans": [
                {"samples": p.samples, "micro_batches": p.micro_batches, "ends": p.ends, "local": p.local}
                for p in self._plans
            ],
            "rules": [list(rule) for rule in self._rules],
            "kept": self.policy.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another job's state, of the same policy, ranks, global batch and rounds ahead."""
        self.require_fitting(state)
        self.policy.load_state_dict(state["kept"])
        super().load_state_dict(state)
        if state["devices"] == self.room.devices:  # else shares begin as if nothing were known of these cards
            self._plans = deque(
                RoundPlan(tuple(p["samples"]), tuple(p["micro_batches"]), p["ends"], p["local"]) for p in state["plans"]
            )
        self._rules = deque(CostRule(*rule) for rule in state["rules"])
        self.rounds = state["rounds"]

    def require_fitting(self, state: Mapping[str, Any]) -> None:
        """Raise if the plans of that state cannot go on as they are."""
        mine = self._terms
        if others := {name: state[name] for name in mine if state[name] != mine[name]}:
            raise ValueError(
                f"the state is of a training with {others}, this one has { {name: mine[name] for name in others} }; "
                "resume with the same, or begin again with the model's parameters alone"
            )
        if len(state["plans"]) != self.rounds_ahead + 1:
            raise ValueError(
                f"the state has plans {len(state['plans']) - 1} rounds ahead, this training fixes them "
                f"{self.rounds_ahead} ahead; make the loader with the same num_workers and prefetch_factor first"
            )
