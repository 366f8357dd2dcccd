"""The conformance suite holds for all policies, and finds policies that break its rules."""

import itertools

import numpy as np
import pytest

from hvd_hetero.policies import (
    BSP,
    LBBSP,
    ElasticBSP,
    LBNonBlocking,
    NonBlocking,
    Policy,
    SelfAdaptive,
    StaticAllocation,
)
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.testing.policies import PolicyConformance, run

POLICIES = {
    "bsp": lambda workers: BSP(),
    "lb-bsp": lambda workers: LBBSP(),
    "lb-bsp, without tolerance": lambda workers: LBBSP(tolerance=0.0, max_micro_batch=7),
    "lb-bsp, on devices": lambda workers: LBBSP(device="gpu"),
    "static": lambda workers: StaticAllocation([1 + rank for rank in range(workers)]),
    "self-adaptive": lambda workers: SelfAdaptive(),
    "non-blocking": lambda workers: NonBlocking(micro_batches=4),
    "lb-non-blocking": lambda workers: LBNonBlocking(),
    "elastic-bsp": lambda workers: ElasticBSP(),
}


def suite(make_policy):
    class Suite(PolicyConformance):
        workers, rounds = (1, 2, 5), 40

        def make(self, workers):
            return make_policy(workers)

    return Suite()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_the_plugin_keeps_all_rules(name):
    assert len(run(suite(POLICIES[name]))) == 7


class Broken(Policy):
    """Equal shares, but for what a subclass gets wrong."""

    name = "broken"

    def first(self, workers, global_batch):
        return RoundPlan.of([global_batch // workers] * workers)

    def next(self, plan, finished):
        return plan


class Forgets(Broken):
    def __init__(self):
        self.count = 0

    def next(self, plan, finished):
        self.count += 1
        rotated = np.roll(np.arange(1, plan.workers + 1), self.count)
        return RoundPlan.of(rotated * (plan.total // rotated.sum()) + (plan.total % rotated.sum()) * (rotated == 1))


class DrawsLots(Broken):
    _numbers = itertools.count()

    def next(self, plan, finished):
        return RoundPlan.of(
            [plan.total - plan.workers + 1, *[1] * (plan.workers - 1)]
            if next(self._numbers) % 7
            else [0] * (plan.workers - 1) + [plan.total]
        )


class LosesSamples(Broken):
    def next(self, plan, finished):
        return RoundPlan.of([max(1, x - 1) for x in plan.samples])


class Believes(Broken):
    def next(self, plan, finished):
        speeds = finished.table.figures("samples_per_s")
        return RoundPlan.of([int(plan.total * v / sum(speeds)) for v in speeds])


class Compares(Broken):
    def next(self, plan, finished):
        # Equal figures are compared as they are: the last bit decides which rank gets a sample more.
        busy_s = [t / x for t, x in zip(finished.table.busy_s, plan.samples, strict=True)]
        first = max(range(plan.workers), key=lambda rank: round(busy_s[rank] * 1e17))
        digit = int(busy_s[first] * 1e17) % 2
        return RoundPlan.of(
            [plan.total - plan.workers + 1 - digit * (plan.workers > 1)]
            + [1] * (plan.workers - 2)
            + [1 + digit] * (plan.workers > 1)
        )


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Forgets, "test_a_policy_that_is_restored_goes_on_as_before"),
        (DrawsLots, "test_two_ranks_that_hear_the_same_decide_alike"),
        (Compares, "test_the_last_bits_of_a_figure_change_no_plan"),
        (LosesSamples, "test_every_plan_holds_the_global_batch"),
        (Believes, "test_figures_that_are_missing_or_absurd_leave_a_plan"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_found(broken, rule):
    with pytest.raises((AssertionError, ValueError, OverflowError)):
        getattr(suite(lambda workers: broken()), rule)()
