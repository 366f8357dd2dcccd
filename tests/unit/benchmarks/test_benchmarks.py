"""Benchmarks that need no ranks, from end to end on a small part of their work."""

import pytest
from script_modules import load

SMALL = {  # arguments, and constants that are smaller than those of the stored tables
    "theory": ([], {"WORKERS": (3, 20), "ROUNDS": 50_000, "WITHIN": 0.03}),
    "stumbles_bound": ([], {"RANKS": (2, 3), "FIXED": (0.01,), "NUMBERS": (2, 4), "ROUNDS": 400, "FORESEEN": 60}),
    "goodput": (["--clusters", "1"], {"ROUNDS": 200, "AT_LEAST": 0.8}),
    "barriers": ([], {"CELLS": [(10, 15)], "SMALL": 50}),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_and_meets_what_it_asks_for(name, monkeypatch, capsys):
    arguments, smaller = SMALL[name]
    script = load(name, "benchmarks", "benchmarks/papers")
    for constant, value in smaller.items():
        monkeypatch.setattr(script, constant, value)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    try:
        code = script.main()
    except SystemExit as ended:
        code = ended.code
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert not code
    assert len(rows) > 2
    assert {row.count("|") for row in rows[:3]} == {rows[0].count("|")}
