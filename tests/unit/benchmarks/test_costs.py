"""Rules that divide samples among equal ranks, and how the benchmark judges waiting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from script_modules import load


@pytest.fixture(scope="module")
def rules():
    return load("_cost_rules", "benchmarks")


@pytest.fixture(scope="module")
def costs():
    return load("costs", "benchmarks")


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("rule", ["by_formula", "equal_tokens"])
def test_a_rule_gives_each_sample_to_one_rank_and_ranks_nearly_equal_sums(rules, rule, ranks):
    lengths = rules.log_normal(16 * ranks, seed=ranks)
    parts = getattr(rules, rule)(lengths, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    cost = lengths if rule == "equal_tokens" else 6 * rules.WIDTH * lengths + lengths**2
    sums = [cost[part].sum() for part in parts]
    assert max(sums) - min(sums) <= cost.max()


def test_largest_differencing_gives_equal_numbers_and_comes_near_the_best_division(rules):
    rng = np.random.default_rng(0)
    over = []
    for _ in range(20):
        costs = rng.lognormal(4, 1, 10).astype(int).tolist()
        parts = rules.largest_differencing(costs, 2)
        assert [len(part) for part in parts] == [5, 5]
        half = (sum(costs[s] for s in some) for some in itertools.combinations(range(10), 5))
        best = min(max(one, sum(costs) - one) for one in half)
        over.append(max(sum(costs[s] for s in part) for part in parts) / best)
    assert np.median(over) < 1.03
    with pytest.raises(ValueError, match=r"costs.*global batch"):
        rules.largest_differencing([1, 2, 3], 2)


def test_the_rule_of_transformers_is_what_its_sampler_gives_each_rank(rules):
    sampler = pytest.importorskip("transformers.trainer_pt_utils").BatchRebalanceSampler
    lengths = rules.log_normal(32, seed=1)
    parts = rules.batch_rebalance(lengths, 4)
    assert sorted(itertools.chain(*parts)) == list(range(32))
    for rank, part in enumerate(parts):
        assert part == next(iter(sampler(lengths.tolist(), 32, 4, grad_accum=1, shuffle=False, rank=rank)))


def test_waiting_is_what_the_mean_rank_misses_of_the_longest(rules):
    assert rules.waiting([[1.0, 1.0], [1.0, 3.0]]) == pytest.approx([0.0, 1 / 3])


def test_only_cost_of_is_held_to_the_target(costs):
    def told(slow):
        reports = [{"seconds": {"number": [2.0, 2.0], "cost_of": [1.0, 1.0]}} for _ in range(2)]
        for report, busy in zip(reports, (1.0, slow), strict=True):
            report["busy_s"] = {"number": [1.0, 1.0], "cost_of": [busy, busy]}
        return reports

    rows, met = costs.real_rows("1 : 1", "padded", told(0.95))
    assert met
    assert "| 0.500 | 0.000 | met |" in rows[1]
    assert all(row.count("|") == costs.HEAD[0].count("|") for row in rows)
    assert not costs.real_rows("1 : 1", "padded", told(0.85))[1]


@pytest.mark.parametrize(("cpu_s", "met"), [(4e-4, True), (6e-4, False)])
def test_what_the_program_itself_takes_is_held_to_a_hundredth_of_a_step(costs, cpu_s, met):
    spent = [{"dividing": [1e-4, 1e-4], "hearing": [each, 1.0]} for each in (cpu_s - 1e-4, 0.0)]
    rows, good = costs.own_rows([{"step_s": 0.05, "texts": 20, "spent": each} for each in spent])
    assert good == met
    assert all(row.count("|") == costs.OWN_HEAD[0].count("|") for row in rows[2:5])


def test_ranks_that_divide_by_cost_wait_less_than_those_that_divide_by_number(rules):
    """Padded batches are not held to the target: runs of texts of similar length alone leave 4 % there."""
    simulated = load("_costs_simulated", "benchmarks")
    for padded, most in ((False, 0.05), (True, 0.2)):
        work = simulated.simulated(4, 10, padded=padded)
        waits = {name: float(np.median(rules.waiting(work[name]))) for name in ("cost_of", "number")}
        assert waits["cost_of"] < min(most, waits["number"])
        assert np.max(work["cost_of"], axis=1).sum() < np.max(work["number"], axis=1).sum()
