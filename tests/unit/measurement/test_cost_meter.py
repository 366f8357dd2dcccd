"""What samples cost in units that all ranks have in common."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_hetero.measurement.cost_fit import CostMeter
from hvd_hetero.rounds import CostRule, SampleFigures

FIGURES = SampleFigures.of(np.array([1.0, 2.0, 9.0]))


def test_work_goes_by_the_rule_that_ranks_divide_by_and_not_by_what_this_one_has_measured():
    costs = CostMeter()
    costs.add_round(FIGURES)
    assert costs.work_of(FIGURES) == pytest.approx(3), "by lengths, in samples of the mean length"
    for _ in range(20):
        costs.learn(SampleFigures.of(np.array([5.0] * 3)), 1, 0.1)
    rules = CostRule(1.0, 0.0, 0.0, 0.0, 0.0), CostRule(0.0, 0.0, 0.0, 1.0, 0.0)
    works = []
    for rule in rules:
        costs.set_agreed_rule(rule, 0.0, 3.0)
        works.append(costs.work_of(FIGURES))
    assert works == [3.0, 27.0]


def test_the_unit_makes_the_work_of_all_ranks_their_samples_with_what_padding_costs():
    costs, padded = CostMeter(), CostRule(0.0, 0.0, 0.0, 0.25, 0.0)
    costs.set_agreed_rule(padded, 0.0, 64.0)
    for _ in range(5):
        costs.set_agreed_rule(padded, 20 * costs.work_of(FIGURES), 60.0)
    assert 20 * costs.work_of(FIGURES) == pytest.approx(60)
