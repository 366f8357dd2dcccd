"""A recorded run whose ranks wait for their data: what it foretells of other policies."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_hetero.policies import BSP, LBBSP, SelfAdaptive
from hvd_hetero.telemetry import TelemetryWriter, read_run
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.report.alternatives import alternatives
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, RoundSimulation, Worker
from hvd_hetero.tools.simulation.micro_batch_cost import fixed_samples
from hvd_hetero.tools.simulation.replay import replay
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

BATCH, DATASET, UPDATE_S = 64, 64 * 8 + 24, 0.0005


def machines(slopes_ms, fixed_ms: float) -> Cluster:
    variation = (Jitter("round", 0.01),)
    return Cluster(tuple(Worker(Compute(m / 1e3, fixed_ms / 1e3), variation=variation) for m in slopes_ms))


def rate(cluster: Cluster, policy, path=None, waits=None) -> float:
    """Samples per second; ``path`` gets the telemetry, in which ``waits(samples)`` of each rank's work is waiting."""
    writer = path and TelemetryWriter(path, policy=policy.name, workers=2, global_batch=BATCH)
    data = WholeRounds(DATASET, shuffle=True)
    result = RoundSimulation(cluster, policy, BATCH, data=data, observer=writer).run(120)
    if writer:
        writer.close()
        head, *lines = path.read_text().splitlines()
        rounds = [_waiting(json.loads(line), waits) for line in lines]
        path.write_text("\n".join([head, *map(json.dumps, rounds)]) + "\n")
    return result.rate(18)


def _waiting(record: dict, waits) -> dict:
    waited = waits(np.array(record["samples"]))
    compute_s = np.array(record["compute_s"]) - waited
    return record | {
        "compute_s": compute_s.tolist(), "input_s": waited.tolist(), "once_s": (UPDATE_S + waited).tolist()
    }  # fmt: skip


def slow_loader(samples):
    """Rank 1 fetches for 1 ms a sample, of the 2 that a sample takes it."""
    return np.array([0.0, 0.001]) * samples


@pytest.mark.parametrize(("source", "other"), [(BSP, LBBSP), (LBBSP, BSP)])
def test_a_slow_loader_costs_by_the_sample(source, other, tmp_path, capsys):
    """BSP does 0.7 of LB-BSP, and either run tells the other within 3 %, as report and simulate have it."""
    true, path = machines((1, 2), 1.0), tmp_path / "run.jsonl"
    rate(true, source(), path, slow_loader)
    real = rate(true, other())
    names = {BSP: ("bsp", "equal batches"), LBBSP: ("lb-bsp", "lb-bsp")}
    assert cli.main(["simulate", "--from", str(path), "--json", "--policies", "bsp,lb-bsp"]) == 0
    rows = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)["schemes"]}
    assert rows[names[other][0]]["samples_per_s"] == pytest.approx(real, rel=0.03)
    assert alternatives(read_run(path)).of(names[other][1]).samples_per_s == pytest.approx(real, rel=0.03)


def test_a_wait_may_come_once_or_with_each_micro_batch(tmp_path, capsys):
    """A batch takes 2.5 ms to fetch besides its samples, and 0.5 to compute: the range holds 0.5 and 3."""
    true, path = machines((1, 2), 3.0 + 1e3 * UPDATE_S), tmp_path / "run.jsonl"
    rate(true, BSP(), path, lambda samples: np.full(2, 0.0025))
    for least, _, most in replay(read_run(path)).fixed_s:
        assert least <= 0.0005
        assert most >= 0.003
    assert cli.main(["simulate", "--from", str(path), "--json", "--policies", "self-adaptive"]) == 0
    [*_, row] = json.loads(capsys.readouterr().out)["schemes"]
    least, most = row["between"]["samples_per_s"]
    assert least < rate(machines((1, 2), 3.0), SelfAdaptive()) < most


def test_a_cost_that_the_bend_of_a_step_hides_is_in_the_range():
    """By hand: 1 + x / 320 ms a sample and 1.8 ms a micro-batch. A line through 32 and 12 samples has 0.6."""
    samples = np.where(np.arange(90) % 9 == 8, 12.0, 32.0)
    seconds = samples * (1 + samples / 320) + 1.8
    found = fixed_samples(samples, np.ones(90), seconds, np.arange(89) % 9 < 8)
    assert found.likely.micro_batch < 1.0
    assert found.least.micro_batch <= 1.8 / 1.1 <= found.most.micro_batch
