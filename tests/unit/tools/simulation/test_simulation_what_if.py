"""What if: other machines, another network, another batch; a recommendation; and a recorded run as a description."""

import re
import shlex
from pathlib import Path

import pytest
from report_runs import record

from hvd_hetero.policies import BSP
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Worker
from hvd_hetero.tools.simulation.compare import Outcome, recommendation, recommended
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

DOCS = Path(__file__).parents[4] / "docs" / "simulation.md"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """BSP on three ranks of 2, 2 and 4 ms a sample and 10 ms a micro-batch; its short rounds tell these."""
    return _recorded(tmp_path_factory.mktemp("recorded") / "run.jsonl", BSP(), 96 * 8 + 40)


def _recorded(path, policy, length, rounds=90):
    workers = tuple(Worker(Compute(m / 1e3, 0.01), variation=(Jitter("round", 0.01),)) for m in (2, 2, 4))
    record(path, Cluster(workers), policy, 96, rounds, data=WholeRounds(length, shuffle=True))
    return path


@pytest.fixture
def rates(asked):
    def ask(*arguments):
        return {name: row["samples_per_s"] for name, row in asked(*arguments)["policies"].items()}

    return ask


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
def test_a_change_gives_the_rates_of_the_changed_machines(options, bsp, best, described, rates):
    """By hand: BSP is n times the slowest, the best split the sum; four latencies of 100 ms add 0.4 s to a round."""
    path = described(('"bsp", "lb-bsp", "elastic-bsp"', '"lb-bsp"'), ("global_batch = 60", "global_batch = 120"))
    found = rates(path, *options)
    assert found["bsp"] == pytest.approx(bsp, rel=0.01)
    assert found["best-split"] == pytest.approx(best, rel=0.025)  # samples are whole


def test_machines_of_a_recorded_run_change_alike(recorded, rates):
    """Without the slow rank BSP and LB-BSP are one; with two of it, too, and slower. 64 ms + 10 ms, 192 ms + 10 ms."""
    fast = rates("--from", recorded, "--policies", "lb-bsp", "--drop", "2", "--global-batch", 64)
    assert fast["bsp"] == pytest.approx(64 / 0.074, rel=0.03)
    assert fast["lb-bsp"] == pytest.approx(fast["bsp"], rel=0.02)
    slow = rates("--from", recorded, "--policies", "lb-bsp", "--replace", "0: 2", "--replace", "1: 2")
    assert slow["bsp"] == pytest.approx(96 / 0.138, rel=0.04)


COMMANDS = re.findall(
    r"^hvd-hetero simulate (.*--(?:drop|add|replace|network|global-batch).*)$", DOCS.read_text(), re.M
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that holds run.jsonl."""
    return _recorded(tmp_path_factory.mktemp("reader") / "run.jsonl", BSP(), 96 * 8 + 40, 24).parent


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_questions_can_be_asked(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main(["simulate", "--quiet", *shlex.split(command)]) == 0
    assert "nothing else is better by more than its error" in capsys.readouterr().out


def outcome(policy: str, times_bsp: float, error: float, *, usable: bool = True) -> Outcome:
    return Outcome(policy, 100 * times_bsp, 0.1, 0.1, 1.0, times_bsp, 1.0, error, usable)


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
    assert recommendation([*BASE, *others]).startswith(said)
    best = recommended([*BASE, *others])
    assert all(o.times_bsp - o.error <= best.times_bsp for o in others)
