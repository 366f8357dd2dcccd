"""The prediction benchmark's own judgement: what is counted, and that a miss cannot hide."""

import math

import numpy as np
import pytest
from script_modules import load


@pytest.fixture(scope="module")
def benchmark():
    return load("prediction", "benchmarks")


@pytest.fixture(scope="module")
def cost():
    return load("prediction_cost", "benchmarks")


@pytest.fixture(scope="module")
def synthetic():
    return load("prediction_synthetic", "benchmarks")


def test_nan_misses_a_target_and_every_series_that_misses_is_named(benchmark):
    line, met = benchmark.verdict("ratio", 1.02, {"a": math.nan, "b": 1.0, "c": 1.021})
    assert not met
    assert "MISSED on 2 of 3 series: a (nan), c (1.0210)" in line
    assert benchmark.verdict("ratio", 1.02, {"b": 1.02})[1]


def test_every_member_of_the_mixture_is_a_single_and_the_mixture_is_none(benchmark):
    errors = {"EMA": 2.0, "EMA, 0.5": 1.0, "NARX": 0.5, "Mixture": 1.1, "Mixture, CPU": 0.6}
    assert benchmark.blind(errors) == pytest.approx(1.1)
    assert benchmark.driven(errors) == pytest.approx(1.2)
    assert math.isnan(benchmark.blind(errors | {"EMA": math.nan}))
    assert "EMA, 0.5" in benchmark.CONFIGURATION


def test_narx_is_judged_on_each_series_that_has_drivers(benchmark, monkeypatch):
    """One series without drivers must not excuse the others; its own ratio is not judged."""
    told = {"EMA": 1.0, "NARX": 0.9, "Mixture": 0.9, "Mixture, CPU": 0.9}
    monkeypatch.setattr(benchmark, "predictors", lambda warm: {n: told.get(n, 0.95) for n in benchmark.CONFIGURATION})
    monkeypatch.setattr(benchmark, "rmse", lambda error, series: error)
    series = {"plain": [(1.0, math.nan, math.nan)], "driven": [(1.0, 0.5, 0.5)]}
    lines, met = benchmark.judge("both", series, lambda number: {})
    assert not met
    assert any("NARX / EMA <= 0.61: MISSED on 1 of 1 series: driven" in line for line in lines)


def test_too_few_trainings_are_a_miss_that_says_so(cost, monkeypatch):
    monkeypatch.setattr(cost, "cost", lambda make, series: cost.Cost(1.0, 2.0, 3.0, 2))
    lines, met = cost.report([])
    assert not met
    assert sum("only 2 trainings finished" in line for line in lines) == 1


def test_a_slow_mixture_is_a_miss(cost, monkeypatch):
    slow = cost.MAKERS["Mixture"]
    monkeypatch.setattr(cost, "cost", lambda make, series: cost.Cost(60.0 if make is slow else 1.0, 2.0, 3.0, 9))
    lines, met = cost.report([])
    assert not met
    assert [line for line in lines if "MISSED" in line] == ["- Mixture <= 50 µs (median): MISSED"]


def test_costs_are_counted_on_every_round_of_a_predictor_in_use(cost):
    measured = cost.cost(cost.Mixture, [(100.0, 0.5, 0.5), (110.0, 0.6, 0.5)], rounds=30)
    assert 0 < measured.median_us <= measured.high_us <= measured.longest_us
    assert measured.trainings == 0


def test_made_up_series_that_miss_are_named_and_only_excused_kinds_may(synthetic):
    good = {name: [1.0, 1.01] for name in synthetic.KINDS}
    assert synthetic.judge(good)[1]
    lines, met = synthetic.judge(good | {"reverting": [1.0, 1.1], "alternating": [1.2, 1.3]})
    assert not met
    assert lines[0].endswith("MISSED by reverting (1.050)")
    assert lines[1].endswith("above it: alternating (1.250)")
    assert not synthetic.judge(good | {"walk": [math.nan]})[1]
    assert synthetic.judge(good | {"alternating": [1.2, 1.3]})[1]


def test_every_kind_of_made_up_series_has_its_length_and_is_judged_by_hand_computed_errors(synthetic):
    rng = np.random.default_rng(0)
    for name, kind in synthetic.KINDS.items():
        logs = kind.make(kind.rounds, rng)
        assert logs.shape == (kind.rounds,), name
        assert np.isfinite(logs).all(), name
    found = synthetic.errors(np.log([100.0, 120.0, 90.0]), 2)
    assert found.members[0] == pytest.approx(30.0)  # memoryless said 120
    assert found.members[1] == pytest.approx(20.0)  # EMA 0.5 said 110
    assert found.ema == found.best == pytest.approx(14.0)  # EMA 0.2 said 104, the others more
    assert found.average == pytest.approx(math.prod(90.0 + by for by in found.members) ** (1 / 3) - 90.0)


def test_worlds_are_the_same_for_the_same_seed_and_memory_runs_low_in_every_second(monkeypatch, tmp_path):
    worlds = load("prediction_worlds", "benchmarks")
    rng = np.random.default_rng(0)
    used = [(float(c), float(m)) for c, m in zip(rng.uniform(0.2, 1, 4000), rng.uniform(0, 0.3, 4000), strict=True)]
    monkeypatch.setattr(worlds, "schedule", lambda path, rounds, seed: used[:rounds])
    found = [worlds.world(tmp_path, 3, number) for number in range(4)]
    assert found[1] == worlds.world(tmp_path, 3, 1)
    assert found[1] != worlds.world(tmp_path, 4, 1)
    least = [min(memory for _, _, memory in rounds) for rounds in found]
    assert [low < 0.01 for low in least] == [False, True, False, True]
    assert all(v > 0 and 0 < c <= 1 and 0 < m <= 1 for rounds in found for v, c, m in rounds)


def test_worlds_that_miss_are_counted_and_the_worst_is_told():
    worlds = load("prediction_worlds", "benchmarks")
    good = {"Mixture": 1.0, "Mixture, drivers": 1.0}

    def found(**ratios):
        return {str(n): worlds.Found(r, good) for n, r in enumerate([good, good | ratios, good])}

    assert worlds.judge(found())[1]
    lines, met = worlds.judge(found(**{"Mixture, drivers": 1.1}))
    assert not met
    assert "MISSED in 1 of 3 worlds" in lines[1]
    assert "number 1" in lines[1]
    assert "met in 1 of these worlds" in lines[2]
    assert not worlds.judge(found(Mixture=math.nan))[1]


def test_a_miss_made_in_few_rounds_is_told_from_one_made_in_many():
    worlds = load("prediction_worlds", "benchmarks")
    best = np.ones(100)
    few, many = best.copy(), best * 1.3
    few[[3, 50, 70]] += 10.0
    assert few.mean() == pytest.approx(many.mean())
    assert worlds.without_costliest(few, best) == pytest.approx(1.0)
    assert worlds.without_costliest(many, best) == pytest.approx(math.sqrt(1.291))
