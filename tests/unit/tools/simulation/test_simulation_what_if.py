"""What if: other machines, another network, another batch; a recommendation; and a recorded run as a description."""

import json
import re
from pathlib import Path

import pytest
from report_runs import record

from hvd_hetero.policies import BSP
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Worker
from hvd_hetero.tools.simulation.compare import Outcome, recommended, told
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

DESCRIBED = """
policies = ["lb-bsp"]
[training]
global_batch = 120
rounds = 40
[[workers]]
count = 2
samples_per_s = 100
[[workers]]
samples_per_s = 400
"""
DOCS = Path(__file__).parents[4] / "docs" / "simulation.md"


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(DESCRIBED)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """BSP on three ranks of 2, 2 and 4 ms a sample and 10 ms a micro-batch; its short rounds tell these."""
    return _recorded(tmp_path_factory.mktemp("recorded") / "run.jsonl", BSP(), 96 * 8 + 40)


def _recorded(path, policy, length, rounds=90):
    workers = tuple(Worker(Compute(m / 1e3, 0.01), variation=(Jitter("round", 0.01),)) for m in (2, 2, 4))
    record(path, Cluster(workers), policy, 96, rounds, data=WholeRounds(length, shuffle=True))
    return path


def rates(capsys, *arguments):
    return {row["scheme"]: row["samples_per_s"] for row in asked(capsys, *arguments)["schemes"]}


def asked(capsys, *arguments):
    assert cli.main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "bsp", "best"),
    [
        ([], 300, 600),
        (["--drop", "0"], 200, 500),
        (["--drop", "0, 1"], 400, 400),
        (["--add", "2"], 400, 1000),
        (["--add", "samples_per_s = 50", "--add", "{ slope_ms = 20 }"], 250, 700),
        (["--replace", "0: 2"], 300, 900),
        (["--replace", "0: samples_per_s = 200", "--replace", "1:2"], 600, 1000),
        (["--replace", "0: 2", "--drop", "0"], 200, 500),
        (["--global-batch", "240"], 300, 600),
        (["--network", "latency_ms = 100"], 150, 200),
    ],
)
def test_a_change_gives_the_rates_of_the_changed_machines(options, bsp, best, described, capsys):
    """By hand: BSP is n times the slowest, the best split the sum; four latencies of 100 ms add 0.4 s to a round."""
    found = rates(capsys, described, *options)
    assert found["bsp"] == pytest.approx(bsp, rel=0.01)
    assert found["best-split"] == pytest.approx(best, rel=0.025)  # samples are whole


def test_machines_of_a_recorded_run_change_alike(recorded, capsys):
    """Without the slow rank BSP and LB-BSP are one; with two of it, too, and slower. 64 ms + 10 ms, 192 ms + 10 ms."""
    fast = rates(capsys, "--from", recorded, "--policies", "lb-bsp", "--drop", "2", "--global-batch", 64)
    assert fast["bsp"] == pytest.approx(64 / 0.074, rel=0.03)
    assert fast["lb-bsp"] == pytest.approx(fast["bsp"], rel=0.02)
    slow = rates(capsys, "--from", recorded, "--policies", "lb-bsp", "--replace", "0: 2", "--replace", "1: 2")
    assert slow["bsp"] == pytest.approx(96 / 0.138, rel=0.04)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drop", "3"], "--drop must name a worker from 0 to 2, got '3'; count from 0"),
        (["--drop", "-1"], "--drop must name a worker from 0 to 2"),
        (["--drop", "0,1,2"], "--drop must leave a worker.*drop fewer"),
        (["--add", "seven"], "--add must name a worker"),
        (["--add", "sample_per_s = 3"], r"--add.workers\[0\] has no setting 'sample_per_s'"),
        (["--add", "slope_ms = "], "--add is no list of settings"),
        (["--replace", "2"], "--replace must be \"WORKER: OTHER\", got '2'"),
        (["--replace", "9: 0"], "--replace must name a worker"),
        (["--network", "bandwidth_mbps = -1000"], "--network: bandwidth_mbps must be at least .*got -1000"),
        (["--network", "bandwith_mbps = 1000"], "--network has no setting 'bandwith_mbps' .did you mean"),
        (["--global-batch", "1"], "global_batch must be at least 3 and at most"),
    ],
)
def test_a_change_that_cannot_be_is_told_by_its_option(options, said, described, capsys):
    assert cli.main(["simulate", str(described), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error), error


COMMANDS = re.findall(
    r"^hvd-hetero simulate (.*--(?:drop|add|replace|network|global-batch).*)$", DOCS.read_text(), re.M
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_questions_can_be_asked(command, tmp_path, monkeypatch, capsys):
    """Each in a folder that holds run.jsonl."""
    import shlex

    _recorded(tmp_path / "run.jsonl", BSP(), 96 * 8 + 40, 30)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "--quiet", *shlex.split(command)]) == 0
    assert "nothing else is better by more than its error" in capsys.readouterr().out


def outcome(scheme: str, times_bsp: float, error: float, *, usable: bool = True) -> Outcome:
    return Outcome(scheme, 100 * times_bsp, 0.1, 0.1, 1.0, times_bsp, 1.0, error, usable)


BASE = [outcome("best-split", 1.9, 0.0, usable=False), outcome("bsp", 1.0, 0.0)]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            [outcome("lb-bsp", 1.5, 0.04), outcome("elastic-bsp", 1.4, 0.02)],
            "lb-bsp: 1.50 of bsp, ± 0.04; nothing else is better by more than its error.",
        ),
        (
            [outcome("lb-bsp", 1.5, 0.04), outcome("non-blocking", 1.2, 0.5)],
            "lb-bsp: 1.50 of bsp, ± 0.04; nothing else is better by more than its error. "
            "non-blocking lies between 0.70 and 1.70.",
        ),
        ([outcome("lb-bsp", 1.02, 0.05)], "bsp: nothing else is better by more than its error."),
    ],
)
def test_the_recommendation_is_what_is_best_even_if_it_errs(others, said):
    assert told([*BASE, *others]).startswith(said)
    best = recommended([*BASE, *others])
    assert all(o.times_bsp - o.error <= best.times_bsp for o in others)
