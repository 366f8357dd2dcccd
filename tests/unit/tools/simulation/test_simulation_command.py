"""``hvd-hetero simulate``: descriptions, recorded runs, tables, JSON and pictures."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import report_runs

from hvd_hetero.policies import BSP
from hvd_hetero.telemetry import Telemetry, read_run
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, Worker, simulate
from hvd_hetero.tools.simulation.description import read_description
from hvd_hetero.tools.simulation.recorded_machines import replay
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

EXAMPLE = Path(__file__).parents[4] / "examples" / "cluster.toml"


def test_json_has_every_policy_and_the_ratios(described, asked):
    """Speeds 100, 100, 400: BSP 300, the best split and ElasticBSP 600."""
    rows = asked(described())["policies"]
    assert set(rows) == {"best-split", "bsp", "lb-bsp", "elastic-bsp"}
    assert rows["bsp"]["samples_per_s"] == pytest.approx(300.0)
    assert rows["lb-bsp"]["times_bsp"] == pytest.approx(2.0, rel=0.02)
    assert rows["lb-bsp"]["of_best"] == pytest.approx(1.0, rel=0.02)
    assert rows["elastic-bsp"]["samples_per_s"] == pytest.approx(600.0, rel=0.05)


def test_the_example_is_a_valid_description():
    """It is what the documentation tells people to start from."""
    example = read_description(EXAMPLE)
    assert len(example.cluster.workers) == 8
    assert example.dataset == 1437


def test_a_time_series_from_a_file_is_a_share_or_a_factor(described, tmp_path, capsys):
    """The same column as availability over time, and row by row per round."""
    (tmp_path / "trace.csv").write_text("series,cpu\na,1.0\na,0.5\nb,9.0\n")
    trace = "file = 'trace.csv', column = 'cpu', where = 'series', equals = 'a'"
    by_time = described(("samples_per_s = 400", f"samples_per_s = 400\navailability = {{ {trace}, step_s = 2 }}"))
    assert read_description(by_time).cluster.workers[2].availability.share == (1.0, 0.5)
    by_round = described(
        ("samples_per_s = 400", f"samples_per_s = 400\nvariation = [{{ kind = 'recorded', {trace} }}]")
    )
    assert read_description(by_round).cluster.workers[2].variation[0].factors == (1.0, 0.5)
    wrong = described(
        ("samples_per_s = 400", f"samples_per_s = 400\navailability = {{ {trace.replace('cpu', 'cpus')}, step_s = 2 }}")
    )
    assert cli.main(["simulate", str(wrong)]) == 2
    assert "no column 'cpus'" in capsys.readouterr().err


def test_a_trace_of_what_others_use_leaves_the_rest(described, tmp_path, capsys):
    """A share of 0 would never finish: of a busy machine something is left, 1 %."""
    (tmp_path / "trace.csv").write_text("cpu\n0\n30\n100\n")

    def shares(more):
        trace = "file = 'trace.csv', column = 'cpu', step_s = 2, used = true"
        text = f"samples_per_s = 400\navailability = {{ {trace}, {more} }}"
        return read_description(described(("samples_per_s = 400", text))).cluster.workers[2].availability.share

    assert shares("scale = 0.01") == pytest.approx((1.0, 0.7, 0.01))
    with pytest.raises(ValueError, match="at most 1"):
        shares("scale = 1.0")


def record(path, policy, machines, rounds=60, length=1000):
    """A run, simulated, and its telemetry; samples per second without the start."""
    return report_runs.record(path, machines, policy, 120, rounds, data=WholeRounds(length, shuffle=True)).rate(5)


MACHINES = Cluster(
    tuple(Worker(Compute.at_speed(v), variation=(Jitter("round", 0.05),)) for v in (100.0, 250.0, 300.0)),
    Network(latency_s=1e-3, message_bytes=1e6, bandwidth=1e9),
)


def test_a_run_of_every_fourth_round_is_replayed_and_what_it_does_not_tell_is_said(tmp_path, capsys):
    path = tmp_path / "thin.jsonl"
    rate = record(Telemetry(path, every=4), BSP(), MACHINES, rounds=120, length=6000)
    machines = replay(read_run(path))
    assert machines.measured_rate == pytest.approx(rate, rel=0.03)
    assert machines.dataset == pytest.approx(6000, rel=4 * 120 / 6000)
    assert cli.main(["simulate", "--from", str(path), "--policies", "bsp"]) == 0
    assert "1 round of 4 is recorded. So the fixed cost of a micro-batch" in capsys.readouterr().err


def test_a_recorded_run_replayed_under_its_own_policy_takes_as_long(tmp_path):
    """BSP, whose plans are the recorded ones: to the digits of the telemetry."""
    record(tmp_path / "run.jsonl", BSP(), MACHINES)
    machines = replay(read_run(tmp_path / "run.jsonl"))
    again = simulate(machines.cluster, BSP(), 120, machines.rounds)
    assert again.rate() == pytest.approx(machines.measured_rate, rel=1e-5)


def test_the_command_replays_a_run(tmp_path, asked):
    """LB-BSP on a run of BSP gains. The measured rate is told, and BSP's range is about it: its rounds scatter."""
    record(tmp_path / "run.jsonl", BSP(), MACHINES)
    document = asked("--from", tmp_path / "run.jsonl", "--policies", "lb-bsp")
    assert document["recorded"]["policy"] == "bsp"
    rows = document["policies"]
    recorded, (least, most) = document["recorded"], rows["bsp"]["between"]["samples_per_s"]
    assert (least * most) ** 0.5 == pytest.approx(recorded["samples_per_s"], rel=0.02)
    assert (most / least) ** 0.5 == pytest.approx(1 + recorded["rate_error"], rel=0.01)
    assert rows["lb-bsp"]["times_bsp"] > 1.5


def test_a_rank_without_figures_keeps_its_last_speed(tmp_path):
    """A null in the telemetry is no speed of its own."""
    record(tmp_path / "run.jsonl", BSP(), MACHINES)
    run = read_run(tmp_path / "run.jsonl")
    run.compute_s[19, 1] = np.nan
    factors = replay(run).cluster.workers[1].variation[0].factors
    assert np.isfinite(factors).all()
    assert sum(a == b for a, b in itertools.pairwise(factors)) == 1
