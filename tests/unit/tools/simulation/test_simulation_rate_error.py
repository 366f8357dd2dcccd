"""How far the luck of a recorded run goes: by hand, on runs whose truth is known, and in what the command tells."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hvd_hetero.policies import BSP
from hvd_hetero.telemetry import TelemetryWriter, read_run
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, RoundSimulation, Worker
from hvd_hetero.tools.simulation.replay import rate_error, replay
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

BATCH, DATASET = 96, 96 * 8 + 40


def test_two_rounds_by_hand():
    """0.9 and 1.1 of what was expected: s = 0.1414, s √2 / √2 = 0.1414, and t of one degree of freedom is 12.706."""
    assert rate_error(np.array([0.9, 2.2]), np.array([1.0, 2.0])) == pytest.approx(12.706 * 0.02**0.5, rel=1e-4)


@pytest.mark.parametrize("seconds", [[1.0], [2.0, 4.0, 6.0], [0.0, 0.0]])
def test_rounds_of_which_none_scatters_allow_no_error(seconds):
    assert rate_error(np.array(seconds), np.array([1.0, 2.0, 3.0][: len(seconds)])) == 0.0


@pytest.mark.parametrize(("rounds", "slow_minutes"), [(60, False), (60, True), (8, False)])
def test_another_run_is_within_the_error_in_nineteen_of_twenty(rounds, slow_minutes):
    """300 pairs of runs, also where rounds are slow by the dozen. 19 in 20 of 300 are 285, give or take 11."""
    dice, held = np.random.default_rng(0), 0
    for _ in range(300):
        runs = np.exp(dice.normal(0, 0.1, (2, rounds)))
        if slow_minutes:
            runs *= np.repeat(np.exp(dice.normal(0, 0.2, (2, rounds // 6))), 6, axis=1)
        here, there = runs
        error = rate_error(here, np.ones(rounds))
        ratio = here.sum() / there.sum()
        held += 1 / (1 + error) <= ratio <= 1 + error
    assert held >= 274
    assert held < 300  # it does not hold everything


def recorded(path, sigma: float, policy=BSP):
    variation = (Jitter("round", sigma),)
    cluster = Cluster(tuple(Worker(Compute(m / 1e3, 0.01), variation=variation) for m in (2, 2, 4)), seed=3)
    writer = TelemetryWriter(path, policy="bsp", workers=3, global_batch=BATCH)
    RoundSimulation(cluster, policy(), BATCH, data=WholeRounds(DATASET, shuffle=True), observer=writer).run(54)
    writer.close()
    return path


def test_a_run_whose_rounds_scatter_tells_a_range_of_its_rate_and_a_figure_of_ratios(tmp_path, capsys):
    """Luck moves all schemes alike, so it belongs to samples per second alone."""
    run = recorded(tmp_path / "run.jsonl", 0.15)
    told = replay(read_run(run)).rate_error
    assert 0.03 < told < 0.3
    assert cli.main(["simulate", "--from", str(run), "--json"]) == 0
    from_run = json.loads(capsys.readouterr().out)
    assert from_run["recorded"]["rate_error"] == told
    bsp = next(row for row in from_run["schemes"] if row["scheme"] == "bsp")
    assert "times_bsp" not in bsp["between"]
    least, most = bsp["between"]["samples_per_s"]
    assert 1 + told - 1e-9 <= math.sqrt(most / least) < 1 + told + 0.03  # the short rounds depend on the fixed cost


def test_a_steady_run_tells_figures(tmp_path, capsys):
    """Below a twentieth in all nothing is a range, and the command says how far the rate may be off."""
    run = recorded(tmp_path / "run.jsonl", 0.002)
    assert cli.main(["simulate", "--from", str(run), "--policies", "lb-bsp"]) == 0
    out = capsys.readouterr().out
    assert f"another run's samples/s may differ by {replay(read_run(run)).rate_error:.1%}" in out
    assert "…" not in out.split("scheme", 1)[1]
