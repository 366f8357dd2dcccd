"""The judgement of the papers' tables: every verdict can be met, and every one can be missed."""

import pytest
from script_modules import load

from hvd_hetero.tools.simulation import Cluster, Compute, Network, RoundSimulation, Worker


def module(name):
    return load(name, "benchmarks", "benchmarks/papers")


def missed(verdicts):
    """What each verdict that was missed is about."""
    lines = [line for line in verdicts.lines if "MISSED" in line]
    assert bool(lines) != verdicts.met
    return lines


def test_the_papers_policy_with_a_server_makes_room_for_a_slow_link():
    """Three equal devices, one link that costs the time of 60 samples each way: it gets 120 samples fewer."""
    profile = Compute(0.01, 0.1, 10, 400)
    workers = (Worker(profile), Worker(profile), Worker(profile, bandwidth=1.0 / 0.6))
    machines = Cluster(workers, Network("server", message_bytes=1.0, bandwidth=1e9))
    simulation = RoundSimulation(machines, module("lb_bsp_gpu").ProfiledLBBSP([profile] * 3), 600)
    simulation.run(3)
    assert simulation.step().plan.samples == (240, 240, 120)


@pytest.mark.parametrize(
    ("name", "arguments", "smaller"),
    [
        ("self_adaptive_fig9_10", ["--runs", "1"], {"MODELS": {"VGG19": (1.1e-3, 1.6, 80.0)}}),
        ("elastic_fig4", ["--seeds", "1"], {"EPOCHS": 1, "LOOKAHEADS": (15, 30, 240)}),
        ("elastic_table2", ["--trials", "2"], {"CELLS": [(10, 15)]}),
    ],
)
def test_the_exit_code_says_whether_all_was_met(name, arguments, smaller, monkeypatch, capsys):
    """Each script from end to end, on a small part of its work."""
    script = module(name)
    for constant, value in smaller.items():
        monkeypatch.setattr(script, constant, value)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    code = script.main()
    said = capsys.readouterr().out
    assert code == ("MISSED" in said)
    assert said.count(": met") + said.count("): MISSED") >= 7
    assert "All targets met" in said if code == 0 else "Not all targets met" in said


@pytest.mark.parametrize(
    ("name", "arguments", "smaller", "claims"),
    [
        ("self_adaptive_fig6_8", [], {"EPOCHS": 2, "TARGET": 0.9, "SETTLED": 2}, 10),
        ("self_adaptive_fig12_13", [], {"EPOCHS": 2, "COPIES": 2}, 10),
        ("nonblocking_fig2", [], {"EPOCHS": 3, "COPIES": 1}, 6),
        ("nonblocking_theorem6", [], {"ROUNDS": (20, 40, 80), "LEAST_RUN": 100}, 5),
        ("elastic_fig4b", ["--seeds", "1"], {}, 7),
    ],
)
def test_each_figure_is_judged_and_drawn(name, arguments, smaller, claims, monkeypatch, capsys, tmp_path):
    """Each script from end to end, on a part of its work: a verdict per claim, and a picture beside the table."""
    script = module(name)
    monkeypatch.setattr(module("elastic_fig4"), "EPOCHS", 2)
    for constant, value in smaller.items():
        monkeypatch.setattr(script, constant, value)
    monkeypatch.setattr(module("_pictures"), "FOLDER", tmp_path)
    monkeypatch.setattr(
        module("_tables"), "write_result", lambda name, text: tmp_path.joinpath("table").write_text(text)
    )
    monkeypatch.setattr("sys.argv", [name, "--write", *arguments])
    code = script.main()
    said = capsys.readouterr().out
    assert code == ("MISSED" in said)
    assert said.count("): met") + said.count("): MISSED") == claims
    assert tmp_path.joinpath("table").read_text() in said
    assert tmp_path.joinpath(f"{name}.png").stat().st_size > 10_000


def test_nan_misses():
    """The verdicts' own."""
    verdicts = module("_tables").Verdicts()
    verdicts.check("what", float("nan"), most=1.0)
    assert missed(verdicts)
