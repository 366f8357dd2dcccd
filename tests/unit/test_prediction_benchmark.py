"""The prediction benchmark's own judgement: what is counted, and that a miss cannot hide."""

import importlib
import math
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("prediction")


def test_nan_misses_a_target_and_every_series_that_misses_is_named(benchmark):
    line, met = benchmark.verdict("ratio", 1.02, {"a": math.nan, "b": 1.0, "c": 1.021})
    assert not met
    assert "MISSED on 2 of 3 series: a (nan), c (1.0210)" in line
    assert benchmark.verdict("ratio", 1.02, {"b": 1.02})[1]


def test_every_member_of_the_mixture_is_a_single_and_the_mixture_is_none(benchmark):
    assert benchmark.best_single({"EMA": 2.0, "EMA, 0.5": 1.0, "Mixture": 0.1}) == 1.0
    assert math.isnan(benchmark.best_single({"EMA": math.nan, "EMA, 0.5": 1.0}))
    assert "EMA, 0.5" in benchmark.CONFIGURATION


def test_narx_is_judged_on_each_series_that_has_drivers(benchmark, monkeypatch):
    """One series without drivers must not excuse the others; its own ratio is not judged."""
    told = {"EMA": 1.0, "NARX": 0.9, "Mixture": 0.9}
    monkeypatch.setattr(benchmark, "predictors", lambda warm: {n: told.get(n, 0.95) for n in benchmark.CONFIGURATION})
    monkeypatch.setattr(benchmark, "rmse", lambda error, series: error)
    series = {"plain": [(1.0, math.nan, math.nan)], "driven": [(1.0, 0.5, 0.5)]}
    lines, met = benchmark.judge("both", series, lambda number: {})
    assert not met
    assert any("NARX / EMA <= 0.61: MISSED on 1 of 1 series: driven" in line for line in lines)


def test_too_few_trainings_are_a_miss_that_says_so(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "cost", lambda make, series: benchmark.Cost(1.0, 2.0, 3.0, 2))
    lines, met = benchmark.cost_section([])
    assert not met
    assert sum("only 2 trainings finished" in line for line in lines) == 2
