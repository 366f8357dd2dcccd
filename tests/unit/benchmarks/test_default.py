"""The comparison of decisions for LB-BSP: its oracle is right, and it runs."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from script_modules import load

from hvd_hetero.allocation import minimax


@pytest.fixture(scope="module")
def default():
    return load("default", "benchmarks", "benchmarks/papers")


def case(default, group):
    return next(case for case in default.cases(40, 1, None) if case.group == group)


def test_no_split_is_sooner_than_the_oracles(default):
    job = case(default, "1 : 1/2 in m alone")
    best = minimax(job.slopes, job.fixed, 0.0, job.total, 1, job.total)
    assert job.best_s() == pytest.approx(np.full(40, best.latest_s))


@pytest.mark.parametrize("largest", [16, 40])
def test_the_oracle_counts_micro_batches(default, largest):
    job = replace(case(default, "1 : 10"), largest=largest, fixed=np.array([0.02, 0.2]))
    splits = (job.seconds(np.array([x, job.total - x])).max(axis=1)[0] for x in range(1, job.total))
    assert job.best_s()[0] == pytest.approx(min(splits))


@pytest.mark.parametrize(
    "name", ["LB-BSP", "by means", "trust region", "sketch", "with Reverting", "least squares", "control"]
)
def test_every_entrant_finds_unequal_ranks(default, name):
    job = case(default, "1 : 10")
    found = default.run(job, default.ENTRANTS[name].policy(), job.best_s())
    assert found.over_best < 1.1
    assert found.over_equal < 1.0
    assert found.least < default.SHARE


def test_the_table_has_every_group_and_entrant(default, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["default.py", "--rounds", "25", "--only", "1 : 10", "32", "--entrants", "LB-BSP"])
    assert default.main() == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("| | LB-BSP |")
    assert [line.split("|")[1].strip() for line in lines[at + 2 : at + 5]] == ["1 : 10 (21)", "32 ranks (8)", "**all**"]


def test_beside_a_reducer_a_table_tells_of_several_rounds(default):
    jobs = [case for case in default.cases(60, 1, None) if case.beside and "1 : 1/2, 0.01 s, 0%" in case.name]
    for job in jobs:
        plans = default.plans_beside(job, default.ENTRANTS["LB-BSP"].policy())
        changed = [k for k in range(1, len(plans)) if plans[k] != plans[k - 1]]
        assert len(plans) == 180
        assert len(changed) > 1
        assert min(np.diff(changed)) >= 12, "a sum takes 1 % of the time of some 15 rounds of 10 ms"


def test_real_ranks_sleep_as_long_as_they_are_slow(default, monkeypatch):
    told = []
    monkeypatch.setattr("hvd_hetero.testing.launch", lambda *how, **_: told.append(how) or Launched)
    assert default.of_ranks(["three", "equal"], ["LB-BSP", "control"], 1, 30) == 1, "an equal rank held 3 samples"
    assert [(how[1], how[2][:2]) for how in told] == [
        (3, ["three", "LB-BSP"]), (3, ["three", "control"]), (2, ["equal", "LB-BSP"]), (2, ["equal", "control"]),
    ]  # fmt: skip


class Launched:
    reports = ({"least": 3, "splits": 1, "round_s": 0.05},)
