"""Rounds divided by what samples cost: each sample once, alike on all ranks, in proportion to the shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.bounds import Room
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.sample_costs import SampleCosts
from hvd_hetero.data.sample_order import EpochEnd
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.measurement.cost_fit import CostMeter
from hvd_hetero.policies import LBBSP, NonBlocking
from hvd_hetero.rounds import CostRule, RoundPlan


def lengths_of(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(3.0, 1.0, samples).clip(1.0, 200.0)


def orders(ranks: int, lengths: np.ndarray, *, stream: bool = False, **options) -> list:
    made = []
    for _ in range(ranks):
        order = (
            SharedStream(lambda _: iter(range(len(lengths)))) if stream
            else SharedPermutation(len(lengths), shuffle=True, seed=1)
        )  # fmt: skip
        cost_of = (lambda i: lengths[i]) if stream else lengths
        order.costs = SampleCosts(cost_of, CostMeter(), None if stream else len(lengths), **options)
        made.append(order)
    return made


@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 3), st.booleans(), st.data())
def test_each_sample_goes_to_exactly_one_rank_exactly_once(workers, samples, in_step, stream, data):
    total = data.draw(st.integers(max(workers * max(in_step, 1), 2), 30))
    seed = data.draw(st.integers(0, 99))
    largest = data.draw(st.sampled_from([None, 250.0]))
    each = orders(workers, lengths_of(samples, seed), stream=stream, largest=largest)
    visited, rounds = [], 0
    for order in each:
        order.end = EpochEnd(joins=True, room=Room(least=in_step))
    while each[0].holds(max(workers * in_step, 1)):
        cuts = np.sort(np.random.default_rng([seed, rounds]).choice(total - 1, workers - 1, replace=False)) + 1
        plan = RoundPlan.of(np.diff(cuts, prepend=0, append=total))
        taken = [order.take(plan, rank) for rank, order in enumerate(each)]
        assert len({cut.fingerprint for cut in taken}) == 1
        micro_batches = [cut.micro_batches() for cut in taken]
        if in_step:
            assert len({len(works) for works in micro_batches}) == 1
            assert all(work.samples for works in micro_batches for work in works)
        for cut, works in zip(taken, micro_batches, strict=True):
            assert [work.last for work in works] == [False] * (len(works) - 1) + [True]
            assert sum(work.samples for work in works) == len(cut.part)
            if largest:
                assert all(work.figures.padded <= largest for work in works)
            visited += list(cut.part)
        rounds += 1
        for order in each:
            order.finish([])
    left = each[0].remaining or 0
    assert left < max(workers * in_step, 1)
    assert len(set(visited)) == len(visited) == samples - left


def test_what_ranks_hold_costs_in_proportion_to_their_shares():
    lengths = lengths_of(2_000)
    each = orders(3, lengths)
    plan = RoundPlan.of([60, 30, 10])
    for _ in range(20):
        parts = [order.take(plan, rank).part for rank, order in enumerate(each)]
        costs = np.array([lengths[part].sum() for part in parts])
        assert costs / costs.sum() == pytest.approx([0.6, 0.3, 0.1], abs=0.01)


def test_where_filling_up_costs_each_rank_gets_samples_of_similar_length():
    lengths = lengths_of(400)
    each = orders(2, lengths)
    for order in each:
        order.costs.rule = CostRule(0.0, 0.0, 0.0, 1.0, 0.0)
    padded, by_number = [], 0.0
    for _ in range(10):
        cuts = [order.take(RoundPlan.of([20, 20]), rank) for rank, order in enumerate(each)]
        padded.append([cut.figures[0].padded for cut in cuts])
        together = np.concatenate([cut.part for cut in cuts])
        by_number += 20 * lengths[together].max()
    slower = np.max(padded, axis=1).sum()
    assert slower < 0.6 * by_number, "one rank has the longest, and few of them"
    assert np.sum(padded) > 0.9 * 2 * slower, "both are done at about the same time"


def test_each_rank_has_the_least_that_the_policy_asks_for():
    lengths = np.array([100.0, 90.0] + [1.0] * 18)
    costs = SampleCosts.of(lengths, LBBSP(minimum=3), CostMeter(), 20, None, shared=True)
    plan = RoundPlan.of([10, 10])
    assert sorted(len(costs.share_out(plan, rank, np.arange(20)).places) for rank in range(2))[0] >= 3
    assert sum(len(costs.share_out(RoundPlan.of([2, 1]), rank, np.arange(3)).places) for rank in range(2)) == 3, (
        "a short round"
    )


def test_samples_without_any_length_are_divided_by_number():
    each = orders(2, np.zeros(40))
    assert [len(order.take(RoundPlan.of([15, 5]), rank).part) for rank, order in enumerate(each)] == [15, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": NonBlocking(4)}, r"cost_of.*'non-blocking'.*'lb-bsp'"),
        ({"policy": LBBSP(max_micro_batch=4)}, "max_micro_batch_cost"),
        ({"policy": LBBSP(multiple_of=2)}, "multiple_of.* 2; leave it out"),
        ({"shared": False}, "stream='shard'.*stream='whole'"),
        ({"largest": 0.0}, "max_micro_batch_cost must be a positive"),
        ({"largest": float("nan")}, "max_micro_batch_cost must be a positive"),
        ({"largest": 2.0}, "max_micro_batch_cost.*index 2 costs 3"),
        ({"cost_of": [1.0, np.inf, 1.0]}, r"cost_of\[1\].*inf"),
        ({"cost_of": [1.0, 1e308, 1.0]}, r"cost_of\[1\].*1e\+100, got 1e\+308"),
        ({"cost_of": [1.0, 2.0]}, r"cost_of.*3 samples.*\(2,\)"),
        ({"cost_of": ["a", "b", "c"]}, "cost_of must be an array"),
        ({"size": None}, "cost_of must be a function of a sample for a stream"),
    ],
)
def test_what_no_division_can_come_of_is_refused(options, message):
    given = {"cost_of": [1.0, 2.0, 3.0], "policy": LBBSP(), "size": 3, "largest": None, "shared": True} | options
    with pytest.raises((ValueError, TypeError), match=message):
        SampleCosts.of(fit=CostMeter(), **given)


def test_micro_batches_that_do_not_fit_in_memory_are_cut_by_number():
    order = SharedPermutation(12)
    order.costs = SampleCosts(np.arange(1, 13), CostMeter(), 12)
    cut = order.take(RoundPlan((6, 6), (1, 1)), 0)
    works = cut.micro_batches(2)
    assert max(work.samples for work in works) == 2
    assert sum(work.samples for work in works) == cut.samples
    assert [work.last for work in works] == [False] * (len(works) - 1) + [True]
    assert all(work.figures is not None for work in cut.micro_batches(cut.samples)), "as they were cut"
