r"""Rounds in simulated time: production's policy and paces decide, simulated machines give the times.

A round begins at T for all. Worker i, its share cut into k_i micro-batches, is ready at

    r_i = finish_i(T + pull_i, f_i work_i) + push_i          (pull and push only where there is a server)

and the round ends at T' = max_i r_i + (allreduce, exchange), or, where the plan ends with the first, like this: let

    e = min_i (time at which worker i has done all its micro-batches) + signal_s;

every other worker finishes the micro-batch that it computes at e (its last but for one that ends at e exactly), and
T' is the latest of these plus the transfer. If the policy anticipates, a worker that expects the end stops before it,
and e counts only workers that did all of theirs. Nothing is approximated: between two rounds there is no other event,
so stepping from round to round is the discrete-event simulation.

**What is production here**: the policy object and the planner; one ``measurement.SpeedMeter`` per worker with its
predictor and device profile, driven by a simulated clock (``simulation.meters``); ``RoundPlan``, ``RoundTable``,
``SharedPermutation``. A test drives n real balancers by the same clock and finds the same plans.

Cost: O(n) a round: 30 to 130 microseconds a worker, mostly its meter's and predictor's.

Left out: the time that deciding takes (measured by ``benchmarks/papers/scale.py``), and what a user's loop does between
rounds. ``Network(kind="recorded")`` can carry both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_hetero.bounds import NO_BOUND
from hvd_hetero.columns import COLUMNS
from hvd_hetero.data.sample_order import EpochEnd
from hvd_hetero.planner import Planner
from hvd_hetero.policies import Goodput, Policy
from hvd_hetero.prediction import Predictor
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundTable
from hvd_hetero.tools.simulation.best import BestSplit
from hvd_hetero.tools.simulation.cluster import Cluster, Machines
from hvd_hetero.tools.simulation.compute import Pieces
from hvd_hetero.tools.simulation.meters import SpeedMeters
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.topology.mixing import ALLREDUCE, Mixing, resolve_mixing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Learner(Protocol):
    """A training in simulated time (``benchmarks/papers/_learners.py`` has update rules)."""

    @property
    def loss(self) -> float:
        """The loss over all training samples."""

    def update(self, plan: RoundPlan, samples: list[NDArray[np.int64]], done: Ints) -> None:
        """Learn that rank i has done its first ``done[i]`` micro-batches, on ``samples[i]``."""


@dataclass(slots=True)
class Simulated:
    """The results of a simulation: one entry a round, or one a worker."""

    name: str
    workers: int
    elapsed_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    """Seconds of waiting for others, the mean over workers."""
    micro_batches: list[int] = field(default_factory=list)
    loss: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, updates, loss) of each evaluation."""

    def rate(self, skip: int = 0) -> float:
        """Return the samples per second, without the first rounds."""
        return sum(self.samples[skip:]) / sum(self.elapsed_s[skip:])

    def waiting_share(self, skip: int = 0) -> float:
        """Return the share of the workers' time spent waiting for others."""
        return sum(self.idle_s[skip:]) / sum(self.elapsed_s[skip:])

    def transfer_share(self, skip: int = 0) -> float:
        """Return the share of the time spent in transfers."""
        return sum(self.transfer_s[skip:]) / sum(self.elapsed_s[skip:])

    def round_s(self, skip: int = 0) -> float:
        """Return the mean seconds of a round."""
        return sum(self.elapsed_s[skip:]) / len(self.elapsed_s[skip:])


@dataclass(frozen=True, slots=True)
class Options:
    """How to run the rounds. The defaults suit the simplest job."""

    rounds_ahead: int = 0
    """Rounds by which plans are fixed ahead, as by a loader that prefetches."""
    signal_s: float = 0.0
    """Seconds until the other workers hear that the first one has ended the round."""
    sync: str | Mixing = ALLREDUCE
    """as in production: with "d-psgd", "matcha" or a graph of one's own each worker averages with its neighbours, in
    place of the allreduce. A learner needs to know as well (``learner_for``)"""
    evaluate_every: int = 0
    """Rounds between two evaluations of the loss, which take no simulated time; 0: never."""


class RoundSimulation:
    """A training in rounds. ``step`` does one; ``run`` does many."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        global_batch: int | Goodput,
        *,
        options: Options | None = None,
        data: WholeRounds | None = None,
        learner: Learner | None = None,
        observer: Callable[[FinishedRound], None] | None = None,
        predictor: Callable[[], Predictor] | None = None,
    ) -> None:
        self.machines = Machines(cluster)
        self.options = options or Options()
        self.data = data
        self.learner = learner
        self.observer = observer
        n = self.machines.count
        self.mixing = mixing_on(cluster, policy, self.options.sync)
        self.planner = Planner(policy, n, global_batch)
        if data is not None:
            data.end = EpochEnd.of(policy, self.planner.room)
        policy = self.policy = self.planner.policy
        self.planner.set_rounds_ahead(self.options.rounds_ahead)
        self.now_s = 0.0
        self.meters = SpeedMeters(self.machines, policy, self.planner.typical_size, predictor)
        for meter, bound in zip(self.meters.each, self.planner.room.user_bounds.tolist(), strict=True):
            meter.memory.user_bound = bound if bound < NO_BOUND else 0
        self._wait_s = np.full(n, np.nan)
        self.result = Simulated(policy.name, n)

    @property
    def rounds(self) -> int:
        """Rounds agreed so far."""
        return self.planner.rounds

    def run(self, rounds: int, progress: Callable[[], None] = lambda: None) -> Simulated:
        """Run so many more rounds."""
        for _ in range(rounds):
            self.step()
            progress()
        return self.result

    def step(self) -> FinishedRound:
        """Run one round."""
        # The order of a balancer's steps is repeated here, because n balancers each hold a table of n rows, which at
        # n = 1,000 is n² numbers a round.
        machines, options, n = self.machines, self.options, self.machines.count
        begin_s, factors = self.now_s, machines.per_round.round(self.rounds)
        plan, samples = self._plan(factors)
        epoch = 0 if self.data is None else self.data.epoch
        pieces = machines.devices.pieces(plan.shares, plan.batch_counts)

        served = machines.network.kind == "server"
        link = machines.bandwidth(begin_s)
        message_s = machines.network.message_s(link) if served else np.zeros(n)
        start_s = begin_s + message_s
        done, finish_s = self._compute(plan, pieces, start_s, factors, 2 * message_s)
        ready_s = machines.network.served(finish_s + message_s) if served else finish_s
        last_s = float(ready_s.max())
        transfer_s = self._transfer_s(last_s)
        self.now_s = last_s + transfer_s

        used = pieces.samples_of(done)
        table = self._table(plan, used, done, start_s, finish_s, 2 * message_s)
        self._wait_s = self.now_s - finish_s
        finished = FinishedRound(self.rounds, epoch, plan, table, self.now_s - begin_s)
        self.planner.learn(finished)
        if self.planner.fixed_costs is not None:
            self.meters.set_fixed_cost(self.planner.fixed_costs.samples)
        if self.learner is not None:
            self.learner.update(plan, [s[:u] for s, u in zip(samples, used.tolist(), strict=True)], done)
        if self.data is not None:
            self.data.finish(used.tolist())
        self.result.elapsed_s.append(finished.elapsed_s)
        self.result.samples.append(int(used.sum()))
        self.result.transfer_s.append(transfer_s)
        self.result.idle_s.append(float((last_s - ready_s).mean()))
        self.result.micro_batches.append(int(done.sum()))
        if self.observer is not None:
            self.observer(finished)
        if self.learner is not None and options.evaluate_every and self.rounds % options.evaluate_every == 0:
            self.result.loss.append((self.now_s, self.rounds, self.learner.loss))
        return finished

    def _plan(self, factors: Floats) -> tuple[RoundPlan, list[Ints]]:
        """Return the plan of this round, and the samples of every rank."""
        plan = self.planner.plan()
        if self.data is not None:
            plan = self.data.end.fit(plan, self.data.ahead())
        if isinstance(self.policy, BestSplit):
            plan = self.policy.foresee(self.machines, self.now_s, factors, plan.total)
        if self.data is None:
            return plan, [_NOTHING] * plan.workers
        return self.data.take_round(plan)

    def _compute(
        self, plan: RoundPlan, pieces: Pieces, start_s: Floats, factors: Floats, input_s: Floats
    ) -> tuple[Ints, Floats]:
        """Return the micro-batches done, and when each worker has done its last."""
        machines, count = self.machines, pieces.count
        anticipated = plan.ends == "first" and self.planner.anticipation is not None
        if anticipated or machines.per_batch.any:
            return self._compute_one_by_one(plan, pieces, start_s, factors, input_s)
        finish_s = machines.availability.finish(start_s, pieces.work_s * factors)
        if plan.ends == "all":
            return count, finish_s
        heard_s = float(finish_s[count > 0].min()) + self.options.signal_s
        # The work done by each worker at that moment; one that has not even begun still does one micro-batch.
        work_s = machines.availability.work_between(start_s, np.maximum(heard_s, start_s)) / factors
        whole = pieces.finished_by(work_s)
        at_hand = pieces.work_of(whole) < work_s * (1 - 1e-12)
        done = np.minimum(np.maximum(whole + at_hand, 1), count)
        return done, machines.availability.finish(start_s, pieces.work_of(done) * factors)

    def _compute_one_by_one(
        self, plan: RoundPlan, pieces: Pieces, start_s: Floats, factors: Floats, input_s: Floats
    ) -> tuple[Ints, Floats]:
        machines, count = self.machines, pieces.count
        each = machines.per_batch.following(count)  # (n, K)
        number = np.arange(each.shape[1])
        work_s = np.where(number < pieces.small[:, None], pieces.small_s[:, None], pieces.large_s[:, None])
        total_s = np.cumsum(np.where(number < count[:, None], work_s * each, 0.0), axis=1) * factors[:, None]
        ends_s = np.stack([machines.availability.finish(start_s, total_s[:, j]) for j in number], axis=1)
        rows = np.arange(machines.count)
        finish_s = np.where(count > 0, ends_s[rows, np.maximum(count, 1) - 1], start_s)
        done = count
        if plan.ends == "first":
            most = count
            if (end := self.planner.anticipation) is not None:
                # A worker goes by its own clock, with its error.
                errors = self.machines.measurement.round(self.rounds)
                busy_s = (ends_s - start_s[:, None]) * errors[:, None] + input_s[:, None]
                stops = end.ends_before(busy_s, input_s[:, None], number + 1) & (number + 1 < count[:, None])
                most = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, count)
            whole = (count > 0) & (most == count)
            heard_s = float(finish_s[whole].min(initial=np.inf)) + self.options.signal_s
            # What ends at that moment exactly has ended, however its end was rounded.
            within = ends_s - start_s[:, None] < (heard_s - start_s)[:, None] * (1 - 1e-12)
            done = np.minimum(within.sum(axis=1) + 1, most)
            finish_s = np.where(done > 0, ends_s[rows, np.maximum(done, 1) - 1], start_s)
        # If luck is foreseen, a worker may get nothing to do for its bad luck, which passes all the same.
        machines.per_batch.use(np.maximum(done, 1) if isinstance(self.policy, BestSplit) else done)
        return done, finish_s

    def _transfer_s(self, time_s: float) -> float:
        network, link = self.machines.network, self.machines.bandwidth(time_s)
        if self.mixing is None:
            return network.allreduce_s(link, self.rounds)
        return network.exchange_s(link, self.mixing.exchanges(self.rounds), self.rounds)

    def _table(
        self, plan: RoundPlan, used: Ints, done: Ints, start_s: Floats, finish_s: Floats, message_s: Floats
    ) -> RoundTable:
        """Measure, learn and report for every rank; the steps of ``Balancer.report``."""
        self._run_out_of_memory(plan)
        measured_s = start_s + (finish_s - start_s) * self.machines.measurement.round(self.rounds)
        # With a server ``message_s`` is a rank's own transfers, which move with its link.
        figures = self.meters.round(start_s, measured_s, message_s, used, done, short=self.planner.is_short(plan))
        figures["wait_s"] = self._wait_s
        rows = np.zeros((len(used), len(_PLACES)))
        for name, figure in figures.items():
            rows[:, _PLACES[name]] = figure
        return RoundTable(rows, len(used))

    def _run_out_of_memory(self, plan: RoundPlan) -> None:
        """Fail the micro-batches that do not fit, and their parts until they fit."""
        fits = self.machines.devices.memory_limit
        largest = -(-plan.shares // np.maximum(plan.batch_counts, 1))
        for i in np.flatnonzero(largest > fits).tolist():
            size = int(largest[i])
            while size > fits[i]:
                size = self.meters.each[i].failed(size)


def mixing_on(cluster: Cluster, policy: Policy, sync: str | Mixing) -> Mixing | None:
    """Return which workers each one averages with, after production's checks; None: with all."""
    mixing = resolve_mixing(sync, len(cluster.workers), updates_locally=policy.updates_locally)
    if mixing is not None and cluster.network.kind == "server":
        raise ValueError(
            f"sync={sync!r} needs links between workers, and a network of kind 'server' has none; use kind 'ring'"
        )
    return mixing


def simulate(cluster: Cluster, policy: Policy, global_batch: int | Goodput, rounds: int, **how: Any) -> Simulated:
    """Run ``RoundSimulation(...).run(rounds)`` in one call."""
    return RoundSimulation(cluster, policy, global_batch, **how).run(rounds)


_PLACES = {name: i for i, name in enumerate(COLUMNS)}
_NOTHING = np.empty(0, dtype=np.int64)
