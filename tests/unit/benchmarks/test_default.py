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


@pytest.mark.parametrize("name", ["LB-BSP", "cautious steps", "sketch", "least squares", "control"])
def test_every_entrant_finds_unequal_ranks(default, name):
    job = case(default, "1 : 10")
    found = default.run(job, default.ENTRANTS[name](None), job.best_s())
    assert found.over_best < 1.1
    assert found.over_equal < 1.0
    assert found.least < default.SHARE


def test_the_table_has_every_group_and_entrant(default, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["default.py", "--rounds", "25", "--only", "1 : 10", "32", "--entrants", "LB-BSP"])
    assert default.main() == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("| | LB-BSP |")
    assert [line.split("|")[1].strip() for line in lines[at + 2 : at + 5]] == ["1 : 10 (21)", "32 ranks (8)", "**all**"]
