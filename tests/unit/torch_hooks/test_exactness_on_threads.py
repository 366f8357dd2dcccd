"""The gradient is exact under every policy, on ranks that are threads; on real ranks in tests/distributed."""

from __future__ import annotations

import time

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")

from hvd_hetero.testing import run_on_threads  # noqa: E402
from tests.distributed.workers.exactness_cases import (  # noqa: E402
    SAMPLES,
    ZERO_GRAD_FIRST,
    Case,
    cases,
    compared,
    policies,
    train,
)

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
TIMEOUT_S = 300.0  # for a machine with other things to do
ROUNDS = 24  # three epochs of eight rounds; the last of each has two samples more
ROUNDS_THAT_END_EARLY = 40  # two epochs, whatever is left undone and returns to the queue
PAUSE_S = 1e-3
TRIALS = "lb-non-blocking, with trials"
CASES = [(policy, 3) for policy in policies(3)]
CASES += [(TRIALS, ranks) for ranks in (2, 4)]  # of each other one, 2, 3 and 4 real ranks show the same


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    # Sizes at which a small model takes every way of a large one.
    for name, size in (("_ALONE", 200), ("_MOST", 100)):
        monkeypatch.setattr(f"torch_hooks.gradients.bundles.{name}", size)
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def rounds_of(policy):
    return ROUNDS_THAT_END_EARLY if "non-blocking" in policy else ROUNDS


def outcome(case, ranks, clock):
    rounds = rounds_of(case.policy)
    outcomes = run_on_threads(lambda rank: train(case, rank, ranks, rounds, clock.pass_s, PAUSE_S), ranks, TIMEOUT_S)
    return compared(case, outcomes)


def require_exact(result):
    # In float32 steps with momentum carry the rounding of each, which differs with the order of the sum.
    assert result["difference"] <= {"torch.float64": 1e-10, "torch.float32": 5e-5}[result["dtype"]]
    assert result["between_ranks"] == 0.0
    assert result["epochs"][-1] >= 2
    for epoch in range(result["epochs"][-1]):
        rounds = zip(result["rounds"], result["epochs"], strict=True)
        assert sorted(i for of_round, of in rounds if of == epoch for i in of_round) == list(range(SAMPLES))


@pytest.mark.parametrize(("policy", "ranks"), CASES)
def test_every_policy_trains_as_one_process_does(policy, ranks, clock):
    result, rounds = outcome(Case(policy), ranks, clock), rounds_of(policy)
    require_exact(result)
    if policy in ("bsp", "bsp in micro-batches", "lb-bsp", "static", "self-adaptive", "elastic-bsp"):
        assert result["idle"] == [0] * ranks, "also where an epoch of 98 samples ends"
    if policy == "static, one rank without data":
        assert result["idle"][0] == rounds
    elif policy == "every round another":
        assert sum(result["idle"]) > 0
        assert all(len(sizes) > 2 for sizes in result["sizes"])
    elif policy == "non-blocking":
        done = zip(result["shares"], result["planned"], strict=True)
        assert sum(of_round[-1] < plan[-1] for of_round, plan in done) >= rounds // 5, "rounds did end early"
    elif policy == "lb-non-blocking":
        done = zip(result["shares"], result["planned"], strict=True)
        assert any(sum(of_round) < sum(plan) for of_round, plan in done), "rounds did end early"
        assert sum(plan[0] > plan[-1] for plan in result["planned"]) > rounds // 2, "the slow rank was given less"
    elif policy == TRIALS:
        done = zip(result["shares"], result["planned"], strict=True)
        early = any(sum(of_round) < sum(plan) for of_round, plan in done)
        assert early == (ranks < 4), "trials of several micro-batches, for which four ranks have too few samples"
    elif policy in ("lb-bsp", "self-adaptive", "elastic-bsp"):
        assert sum(of_round[0] > of_round[-1] for of_round in result["shares"]) > rounds // 2, "the slow rank did less"


OTHERS = [case for case in cases(3) if case != Case(case.policy)]


@pytest.mark.parametrize("case", OTHERS, ids=lambda c: f"{c.policy}, {c.optimizer}, {c.dtype}, {c.order}")
def test_other_optimizers_types_and_orders_of_calls_change_nothing(case, clock):
    result = outcome(case, 3, clock)
    require_exact(result)
    if case.order != ZERO_GRAD_FIRST and case.policy == "every round another":
        assert sum(result["idle"]) > 0, "a rank without data, whose loop clears nothing"
