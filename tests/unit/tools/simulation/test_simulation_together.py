"""A simulation that measures and predicts for all workers at once is that of production's meters, one by one."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hvd_hetero.measurement.readings import Resources
from hvd_hetero.policies import BSP, LBBSP, NonBlocking, SelfAdaptive
from hvd_hetero.prediction import Mixture
from hvd_hetero.rounds import RoundReport
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, RoundSimulation, Worker
from hvd_hetero.tools.simulation.availability import Availability
from hvd_hetero.tools.simulation.cluster import Drivers
from hvd_hetero.tools.simulation.engine import Options
from hvd_hetero.tools.simulation.meters import OneByOne, Together
from hvd_hetero.tools.simulation.order import WholeRounds

SPEEDS = (300.0, 100.0, 200.0, 150.0, 120.0)
SLOW_AT_TIMES = Availability((0.0, 5.0, 9.0), (1.0, 0.4, 0.8), 12.0)
POLICIES = {
    "lb-bsp": LBBSP,
    "every prediction followed": lambda: LBBSP(tolerance=0.0),
    "given": lambda: LBBSP(Mixture()),
    "ema": lambda: LBBSP("ema", max_micro_batch=40),
    "bsp": BSP,
    "non-blocking": lambda: NonBlocking(4),
    "self-adaptive": lambda: SelfAdaptive(total=20),
}


def cluster(kind: str) -> Cluster:
    workers = []
    for rank, speed in enumerate(SPEEDS):
        compute = Compute(1.0 / speed, 0.05 * (kind != "quick"), 1.0, 60 if kind == "limited" and rank == 0 else None)
        if kind == "quick":  # rounds that are shorter than it takes to learn
            compute = Compute.at_speed(60.0 * speed)
        drivers = (
            Drivers(noise=0.1, lag_s=0.5),
            Drivers(recorded=(Resources(0.5, 0.2), Resources(0.25, float("nan")))),
            Drivers(known=False),
            Drivers(lag_s=2.0, memory=SLOW_AT_TIMES),
            Drivers(),
        )[rank]
        workers.append(
            Worker(compute, SLOW_AT_TIMES if rank % 2 else Availability(), (Jitter("round", 0.05),), drivers=drivers)
        )
    network = Network(kind="server", bandwidth=1e8, message_bytes=1e6) if kind == "server" else Network()
    return Cluster(tuple(workers), network, seed=3, measurement_noise=0.02)


def rounds_of(kind: str, policy: str, *, together: bool, epochs: bool) -> tuple[list, np.ndarray]:
    found = []
    simulation = RoundSimulation(
        cluster(kind),
        POLICIES[policy](),
        320,
        options=Options(together=together),
        data=WholeRounds(3300, seed=1) if epochs else None,
        observer=found.append,
    )
    assert type(simulation.meters) is (Together if together else OneByOne)
    simulation.run(40)
    names = RoundReport.__dataclass_fields__
    return [f.plan for f in found], np.array([[f.table.figures(name) for name in names] for f in found])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "epochs"), [("plain", False), ("quick", True), ("limited", True), ("server", False)], ids=str
)
def test_plans_and_all_figures_are_the_same(policy, kind, epochs):
    """Fixed costs, memory that runs out, epochs that end, drivers that scatter, and rounds of some milliseconds."""
    plans, figures = rounds_of(kind, policy, together=True, epochs=epochs)
    expected_plans, expected = rounds_of(kind, policy, together=False, epochs=epochs)
    assert plans == expected_plans
    np.testing.assert_allclose(figures, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (lambda: LBBSP(Mixture(drivers=True)), {}),
        (lambda: LBBSP(device="gpu"), {}),
        (LBBSP, {"predictor": Mixture}),
        (LBBSP, {"options": Options(together=False)}),
    ],
    ids=["drivers", "profiles", "predictors from outside", "as asked"],
)
def test_whatever_has_no_bank_has_meters_of_its_own(policy, how):
    assert type(RoundSimulation(cluster("plain"), policy(), 320, **how).meters) is OneByOne


def test_a_round_goes_through_no_worker_in_python():
    """Ten times the workers took ten times the steps of the interpreter, and 65 ms a round at 1,000."""

    def steps(workers: int) -> int:
        speeds = np.random.default_rng(0).uniform(50, 150, workers)
        machines = tuple(Worker(Compute.at_speed(v), variation=(Jitter("round", 0.05),)) for v in speeds.tolist())
        simulation, count = RoundSimulation(Cluster(machines), LBBSP(), 64 * workers), 0

        def event(frame, what, argument) -> None:
            nonlocal count
            count += 1

        sys.setprofile(event)
        try:
            simulation.run(20)
        finally:
            sys.setprofile(None)
        return count

    assert steps(1000) < 3 * steps(100), "more rounds split again where there are more workers"
