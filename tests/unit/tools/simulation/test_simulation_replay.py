"""A recorded run fed back: the drivers that it recorded reach the predictors, each with the speed that it goes with."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
from report_runs import record

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.prediction import Predictor
from hvd_hetero.telemetry import read_run
from hvd_hetero.tools.simulation import Availability, Cluster, Compute, Drivers, Worker
from hvd_hetero.tools.simulation.compare import compare
from hvd_hetero.tools.simulation.description import recorded_description
from hvd_hetero.tools.simulation.policy_choices import choose
from hvd_hetero.tools.simulation.recorded_machines import WARM_UP_ROUNDS, replay

# Every few rounds one of them loses most of its processor; memory moves as well, and says nothing.
MEMORY = Availability.series(np.linspace(0.9, 0.1, 37), 0.7)
MACHINES = Cluster(
    (
        Worker(Compute.at_speed(300.0), Availability((0.0, 1.0), (1.0, 0.3), 2.2), drivers=Drivers(memory=MEMORY)),
        Worker(Compute.at_speed(200.0), Availability((0.0, 1.3), (0.8, 0.5), 2.0)),
        Worker(Compute.at_speed(100.0), drivers=Drivers(known=False)),
    ),
    seed=1,
)


BATCH = 40  # small, so that most changes fall between two rounds


class Proportional(Predictor):
    """So much CPU, so much speed, by the median of what it has seen; without the CPU the last speed. Keeps it all."""

    name = "proportional"
    uses_drivers = True

    def __init__(self):
        super().__init__()
        self.learnt: list[tuple[float, float, float]] = []
        self.asked: list[tuple[float, float]] = []

    def _observe(self, speed, cpu, memory):
        self.learnt.append((speed, cpu, memory))

    def _forecast(self, cpu, memory):
        self.asked.append((cpu, memory))
        if math.isnan(cpu):
            return self.learnt[-1][0]
        return cpu * statistics.median(speed / share for speed, share, _ in self.learnt)

    def _state(self):
        return {}

    def _restore(self, state):
        return


def simulate_with_spies(machines, policy, rounds, path=None):
    """The predictors of all ranks after so many rounds, and samples per second."""
    spies: list[Proportional] = []

    def spy():
        spies.append(Proportional())
        return spies[-1]

    return spies, record(path, machines, policy, BATCH, rounds, predictor=spy).rate(WARM_UP_ROUNDS)


@pytest.mark.parametrize("policy", [BSP, lambda: LBBSP(tolerance=0.0)], ids=["bsp", "lb-bsp"])
def test_predictors_learn_from_a_replayed_run_what_they_learnt_in_it(policy, tmp_path):
    """Speed, CPU and memory, line for line to the digits of the telemetry, and the drivers of each forecast."""
    path = tmp_path / "run.jsonl"
    before, _ = simulate_with_spies(MACHINES, policy(), 60, path)
    machines = replay(read_run(path))
    after, _ = simulate_with_spies(machines.cluster, policy(), machines.rounds)
    assert machines.rounds == 60 - WARM_UP_ROUNDS
    for there, here in zip(before, after, strict=True):
        # The first round of either teaches nothing.
        assert len(here.learnt) == machines.rounds - 1
        learnt = np.array(there.learnt[WARM_UP_ROUNDS:])
        # The plan of the first round differs from the recorded one, so its time is known as well as the fixed cost.
        assert np.array(here.learnt[0]) == pytest.approx(learnt[0], rel=5e-3, nan_ok=True)
        # LB-BSP's predictors are told paces, which depend on the fixed cost: a replay learns it from fewer rounds.
        rel = 1e-6 if policy is BSP else 0.02
        assert np.array(here.learnt[1:]) == pytest.approx(learnt[1:], rel=rel, nan_ok=True)
        # The last forecast is for a round after the last one, where a replay begins again.
        asked = np.array(there.asked[WARM_UP_ROUNDS:-1])
        assert np.array(here.asked[:-1]) == pytest.approx(asked, rel=1e-6, nan_ok=True)
    seen = np.array(after[0].learnt)
    assert set(seen[:, 1].round(6).tolist()) == {1.0, 0.3}
    assert len(set(seen[:, 2].tolist())) > 5
    assert np.isnan(np.array(after[2].learnt)[:, 1:]).all()


def test_a_predictor_that_reads_drivers_gains_by_them_on_a_replayed_run(tmp_path):
    """Who sees the CPU go splits in time: 3 % more than without drivers, and as much as on the machines themselves."""
    path = tmp_path / "run.jsonl"
    _, real = simulate_with_spies(MACHINES, LBBSP(tolerance=0.0), 200, path)
    machines = replay(read_run(path))
    _, told = simulate_with_spies(machines.cluster, LBBSP(tolerance=0.0), machines.rounds)
    blind = Cluster(
        tuple(Worker(w.compute, variation=w.variation, drivers=Drivers(known=False)) for w in machines.cluster.workers),
        machines.cluster.network,
    )
    _, without = simulate_with_spies(blind, LBBSP(tolerance=0.0), machines.rounds)
    assert told > 1.03 * without
    assert told == pytest.approx(real, rel=0.02)


def test_the_command_asks_a_recorded_run_for_a_predictor_that_reads_drivers(tmp_path, asked):
    """Of the same run without its drivers NARX makes something else, and the last speed the same."""

    def told():
        entries = '[{ name = "lb-bsp", predictor = "narx" }, { name = "lb-bsp", predictor = "memoryless" }]'
        rows = asked("--from", path, "--policies", entries)["policies"]
        return {name: row["between"].get("samples_per_s", [row["samples_per_s"]]) for name, row in rows.items()}

    path = tmp_path / "run.jsonl"
    simulate_with_spies(MACHINES, BSP(), 80, path)
    seeing = told()
    head, *rounds = path.read_text().splitlines()
    none = {"cpu": [None] * 3, "memory": [None] * 3}
    path.write_text("\n".join([head, *(json.dumps(json.loads(line) | none) for line in rounds)]) + "\n")
    blind = told()
    assert seeing["lb-bsp narx"] != pytest.approx(blind["lb-bsp narx"], rel=5e-2)
    # Without drivers more rounds teach the fixed cost.
    assert seeing["lb-bsp memoryless"] == pytest.approx(blind["lb-bsp memoryless"], rel=1e-2)


@pytest.mark.parametrize("name", ["cpu", "memory"])
def test_a_reading_that_is_no_share_is_an_error_that_says_where(name, tmp_path):
    path = tmp_path / "run.jsonl"
    simulate_with_spies(MACHINES, BSP(), 20, path)
    run = read_run(path)
    run.columns[name][9, 1] = 1e9
    with pytest.raises(ValueError, match=rf"{name}.* 1e\+09 .*round 9.*rank 1"):
        replay(run)


def test_a_run_without_an_end_of_an_epoch_is_replayed_in_whole_rounds(tmp_path):
    """Its 25 usable rounds make no tenth of an epoch; an epoch of two rounds and a half would end with a short one."""
    path = tmp_path / "run.jsonl"
    record(path, Cluster.of_speeds([300, 200, 100]), BSP(), 60, WARM_UP_ROUNDS + 25)
    described, machines = recorded_description(read_run(path), [choose("bsp", "test")])
    assert described.dataset == 2 * 60
    outcomes = {outcome.policy: outcome for outcome in compare(described)}
    assert outcomes["bsp"].samples_per_s == pytest.approx(machines.measured_rate)
    assert machines.kept == tuple(range(WARM_UP_ROUNDS, WARM_UP_ROUNDS + 25))
