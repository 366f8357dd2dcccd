"""A rank that was slow for a while is given its share again, by a clock that moves with the work alone."""

from __future__ import annotations

import random
import time

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")

import hvd_hetero.session  # noqa: E402
from hvd_hetero.measurement.readings import Resources  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once


class SteadyMachine:
    """Takes the place of the meter of free processor and memory, on which forecasts build."""

    def __init__(self, clock) -> None:
        pass

    def read(self) -> Resources:
        return Resources(cpu=0.9, memory=0.5)


def test_after_a_passing_slowdown_the_split_is_the_equal_one_again_where_half_of_a_step_is_fixed(monkeypatch):
    """Two ranks of t = 5 + 0.1 x ms, give or take 3 %, one of them ten times slower for 30 rounds."""
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(hvd_hetero.session, "ResourceMeter", SteadyMachine)

    def case(rank):
        dice = random.Random(rank)
        model = torch.nn.Linear(5, 1)
        balance = LoadBalance("lb-bsp", global_batch=128)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance)
        plans = []
        for round in range(100):
            plans.append(balance.plan)
            samples = balance.batch_size
            balance.batch(samples)
            slow = 10.0 if rank == 1 and 20 <= round < 50 else 1.0
            clock.pass_s(slow * (5e-3 + 1e-4 * samples) * dice.gauss(1, 0.03))
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return plans

    plans, others = run_on_threads(case, 2)
    assert plans == others
    assert plans[48][1] < 32
    assert all(abs(of_rank_1 - 64) <= 13 for _, of_rank_1 in plans[58:]), "by speeds alone it has 40 then"
