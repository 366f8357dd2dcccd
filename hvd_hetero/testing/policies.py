"""The conformance suite for policies, to run on your own.

    class TestMine(PolicyConformance):
        def make(self, workers):
            return Mine()

pytest runs the methods that begin with ``test_``; without pytest, call ``run(TestMine())``. A policy that passes
decides alike on all ranks, survives figures that are missing or absurd, and goes on after a restart.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from hvd_hetero.policies import Policy
from hvd_hetero.rounds import FinishedRound, RoundPlan, RoundReport, RoundTable

_ABSURD = (float("nan"), 0.0, -1.0, float("inf"))


class PolicyConformance(ABC):
    """The conformance suite. Override ``make``, and the numbers below if your policy needs others."""

    workers: ClassVar[Sequence[int]] = (1, 2, 3, 5)
    """Numbers of ranks to try."""
    global_batch: ClassVar[int] = 60
    """Samples of a round."""
    rounds: ClassVar[int] = 60
    """Rounds to simulate; 12 make an epoch."""

    @abstractmethod
    def make(self, workers: int) -> Policy:
        """Return a new policy for so many ranks."""

    def test_the_first_plan_holds_the_global_batch(self) -> None:
        """Check that the first plan names all ranks, and holds the global batch if the policy keeps it."""
        for n in self.workers:
            policy = self.make(n)
            plan = policy.first(n, self.global_batch)
            assert plan.workers == n
            assert plan.total == self.global_batch or not policy.keeps_total

    def test_every_plan_holds_the_global_batch(self) -> None:
        """Check the same of every later plan."""
        for n in self.workers:
            policy = self.make(n)
            for plan in self._plans(policy, n):
                assert plan.workers == n
                assert plan.total > 0
                assert plan.total == self.global_batch or not policy.keeps_total

    def test_two_ranks_that_hear_the_same_decide_alike(self) -> None:
        """Check that a policy is a function of the tables: it draws no random numbers and reads no clock."""
        for n in self.workers:
            assert list(self._plans(self.make(n), n)) == list(self._plans(self.make(n), n))

    def test_the_last_bits_of_a_figure_change_no_plan(self) -> None:
        """Check that a policy quantises before it compares, because unlike processors round differently."""
        for n in self.workers:
            exact = list(self._plans(self.make(n), n))
            for error in (1e-15, -1e-15):
                assert list(self._plans(self.make(n), n, error=error)) == exact

    def test_figures_that_are_missing_or_absurd_leave_a_plan(self) -> None:
        """Check the plans if a rank does not know its speed, or a clock jumps."""
        for n in self.workers:
            for absurd in _ABSURD:
                policy = self.make(n)
                plan = policy.first(n, self.global_batch)
                for number in range(12):
                    plan = policy.next(plan, _finished(plan, _speeds(n, number), number, absurd=absurd))
                    assert plan.workers == n
                    assert plan.total > 0

    def test_a_policy_that_is_restored_goes_on_as_before(self) -> None:
        """Check that the state is plain data, and complete."""
        for n in self.workers:
            for stop in (1, 5, self.rounds // 2):
                plans = self._plans(before := self.make(n), n)
                plan = [next(plans) for _ in range(stop)][-1]
                after = self.make(n)
                after.first(n, self.global_batch)
                after.load_state_dict(json.loads(json.dumps(before.state_dict())))
                rest = self._plans(after, n, plan=plan, begin=stop)
                assert list(plans) == list(rest)

    def test_a_new_membership_begins_with_a_plan(self) -> None:
        """Check the plan if some ranks know their speed, and others have only just come."""
        for n in self.workers:
            policy = self.make(n)
            first = policy.first(n, self.global_batch)
            speeds = [float("nan") if rank % 2 else 10.0 * (rank + 1) for rank in range(n)]
            plan = policy.renegotiate(first, speeds)
            assert plan.workers == n
            assert plan.total == first.total

    def _plans(
        self, policy: Policy, n: int, *, error: float = 0.0, plan: RoundPlan | None = None, begin: int = 0
    ) -> Iterator[RoundPlan]:
        """Yield the plans of a training whose ranks differ, scatter, and change their speed half-way."""
        plan = policy.first(n, self.global_batch) if plan is None else plan
        for number in range(begin, self.rounds):
            speeds = _speeds(n, number, change=number >= self.rounds // 2)
            signs = 1.0 - 2.0 * ((np.arange(n) + number) % 2)  # another one for each rank and round
            plan = policy.next(plan, _finished(plan, speeds * (1 + error * signs), number))
            yield plan


def run(suite: object) -> list[str]:
    """Run all tests of a suite (of this module or ``predictors``) without pytest, and return their names."""
    names = [name for name in dir(suite) if name.startswith("test_")]
    for name in names:
        getattr(suite, name)()
    return names


def _speeds(n: int, number: int, *, change: bool = False) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return samples per second: rank i at 1 / (i + 1) of rank 0's speed, or reversed, with 2 % of scatter."""
    steady = 100.0 / (1 + np.arange(n, dtype=np.float64))
    scatter = 0.02 * np.random.Generator(np.random.PCG64([n, number])).standard_normal(n)
    return (steady[::-1] if change else steady) * np.exp(scatter)


def _finished(
    plan: RoundPlan, speeds: np.ndarray[tuple[int], np.dtype[np.float64]], number: int, absurd: float | None = None
) -> FinishedRound:
    """Return the round that ranks of these speeds make of a plan. Rank 0's figures may be absurd."""
    last_s = max(x / v for x, v in zip(plan.samples, speeds.tolist(), strict=True))
    rows = np.zeros(RoundTable.length(plan.workers))
    for rank, (x, k, v) in enumerate(zip(plan.samples, plan.micro_batches, speeds.tolist(), strict=True)):
        believed, busy_s = v, x / v
        if absurd is not None and rank == 0:
            believed = busy_s = absurd
        report = RoundReport(
            samples=x, micro_batches=k, compute_s=busy_s, input_s=0.0, wait_s=last_s - x / v, samples_per_s=believed,
            cpu=1.0, memory=1.0, fingerprint=0.0, settings=0.0, parameter_norm=0.0, timed_samples=x,
        )  # fmt: skip
        mine = slice(rank * len(rows) // plan.workers, (rank + 1) * len(rows) // plan.workers)
        rows[mine] = report.vector(rank, plan.workers)[mine]
    return FinishedRound(number, number // 12, plan, RoundTable(rows, plan.workers), last_s)
