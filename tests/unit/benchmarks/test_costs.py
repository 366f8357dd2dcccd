"""Rules that divide samples among equal ranks, and how the benchmark judges waiting."""

import itertools

import numpy as np
import pytest
from script_modules import load


@pytest.fixture(scope="module")
def rules():
    return load("_cost_rules", "benchmarks")


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("rule", ["by_formula", "equal_tokens"])
def test_a_rule_gives_each_sample_to_one_rank_and_ranks_nearly_equal_sums(rules, rule, ranks):
    lengths = rules.log_normal(16 * ranks, seed=ranks)
    parts = getattr(rules, rule)(lengths, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    cost = lengths if rule == "equal_tokens" else 6 * rules.WIDTH * lengths + lengths**2
    sums = [cost[part].sum() for part in parts]
    assert max(sums) - min(sums) <= cost.max()


def test_ranks_that_divide_by_cost_wait_less_than_those_that_divide_by_number(rules):
    """Padded batches are not held to the target: runs of texts of similar length alone leave 4 % there."""
    simulated = load("_costs_simulated", "benchmarks")
    for padded, most in ((False, 0.05), (True, 0.2)):
        work = simulated.simulated(4, 10, padded=padded)
        waits = {name: float(np.median(rules.waiting(work[name]))) for name in ("cost_of", "number")}
        assert waits["cost_of"] < min(most, waits["number"])
        assert np.max(work["cost_of"], axis=1).sum() < np.max(work["number"], axis=1).sum()
