"""Plans keep their sums, rows survive the sum over ranks, and plans that differ have different fingerprints."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.columns import COLUMNS
from hvd_hetero.rounds import MAX_ROUND_SAMPLES, RoundPlan, RoundReport, RoundTable

plans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=6).map(
    lambda rows: RoundPlan(tuple(x for x, _ in rows), tuple(min(x, k) for x, k in rows))
)


def row(**figures: float) -> RoundReport:
    known = dict.fromkeys(COLUMNS, 0.0)
    return RoundReport(**{**known, **figures})


@given(plans)
def test_micro_batches_add_up_to_the_samples_and_differ_by_one_at_most_the_smaller_first(plan):
    for rank in range(plan.workers):
        sizes = plan.sizes(rank)
        assert sum(sizes) == plan.samples[rank]
        assert len(sizes) == plan.micro_batches[rank]
        assert list(sizes) == sorted(sizes)
        assert not sizes or sizes[-1] - sizes[0] <= 1


@given(plans, st.integers(0, 200))
def test_a_shrunk_plan_has_the_total_asked_for_and_no_larger_micro_batches(plan, total):
    if plan.total == 0:
        return
    short = plan.resize(total := min(total, plan.total))
    assert short.total == total
    for rank in range(plan.workers):
        assert max(short.sizes(rank), default=0) <= max(plan.sizes(rank), default=0)
        if plan.samples[rank] == 0:
            assert short.samples[rank] == 0, "a rank that was to have nothing gets nothing"
    if total >= sum(x > 0 for x in plan.samples):
        assert all((a > 0) == (b > 0) for a, b in zip(short.samples, plan.samples, strict=True)), "nobody sits idle"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 400),
)  # fmt: skip
def test_shares_keep_their_minimum_and_multiple_in_short_and_in_longer_rounds(units, minimum, multiple_of, total):
    share = -(-minimum // multiple_of) * multiple_of
    plan = RoundPlan.of([share + multiple_of * unit for unit in units])
    changed = plan.resize(total, minimum, multiple_of)
    assert changed.total == total
    if total >= minimum * plan.workers:
        assert min(changed.samples) >= minimum
    if total - total % multiple_of >= share * plan.workers:
        assert sum(x % multiple_of > 0 for x in changed.samples) <= (total % multiple_of > 0)


def test_a_rank_starts_where_the_ranks_before_it_end():
    plan = RoundPlan.of([3, 0, 5])
    assert [plan.start(rank) for rank in range(3)] == [0, 3, 3]


def test_micro_batches_are_at_most_as_large_as_asked_for():
    assert RoundPlan.of([10, 4, 0], micro_batch=4).micro_batches == (3, 1, 0)


@pytest.mark.parametrize(
    ("samples", "micro_batches", "message"),
    [
        ((1, 2), (1,), r"micro_batches.* 2\b.* 1\b"),
        ((3,), (4,), r"rank 0: .*3 .* 4 "),
        ((0, 1), (1, 1), r"rank 0: .*0 .* 1 "),
        ((5, 4), (1, 0), r"rank 1: .*4 .* 0 "),
        ((MAX_ROUND_SAMPLES, 1), (1, 1), f"{MAX_ROUND_SAMPLES}.*lower global_batch"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(samples, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        RoundPlan(samples, micro_batches)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_summing_the_vectors_of_all_ranks_gives_every_row_exactly(dtype):
    rng = np.random.default_rng(0)
    told = [{"samples": i + 1, "compute_s": rng.random(), "samples_per_s": 1e3 * rng.random()} for i in range(5)]
    vectors = [RoundReport(**figures).vector(rank, 5).astype(dtype) for rank, figures in enumerate(told)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        summed = np.zeros_like(vectors[0])
        for rank in order:
            summed += vectors[rank]
        table = RoundTable(summed, 5)
        for rank, figures in enumerate(told):
            for name, figure in figures.items():
                assert table.column(name)[rank] == dtype(figure)
    assert table.total == 15
    assert len(summed) == RoundTable.length(5)


@pytest.mark.parametrize("apart", [None, 0, 1, 64])
def test_a_table_is_a_copy_and_tells_whether_all_rows_have_the_same_fingerprint(apart):
    ranks = 65
    rows = [row(samples=i, cpu=0.5 * i, fingerprint=7.0 + (i == apart), settings=0.1) for i in range(ranks)]
    summed = sum(r.vector(i, ranks) for i, r in enumerate(rows))
    table = RoundTable(summed, ranks)
    assert table.figures("cpu") == table.column("cpu").tolist() == [0.5 * i for i in range(ranks)]
    assert table.unanimous == (apart is None)
    assert table.total == sum(range(ranks))
    assert not table.replaced("fingerprint", [math.nan, *[7.0] * (ranks - 1)]).unanimous
    assert table.replaced("fingerprint", [math.nan] * ranks).unanimous  # as NaN agrees with NaN
    assert table.replaced("cpu", [2.0] * ranks).figures("cpu") == [2.0] * ranks
    table.column("cpu")[1] = summed[:] = 0.0
    assert table.figures("cpu")[1] == 0.5


def test_not_a_number_stays_in_its_own_row():
    vectors = [row(cpu=float("nan")).vector(0, 2), row(cpu=0.5).vector(1, 2)]
    cpu = RoundTable(sum(vectors), 2).column("cpu")
    assert np.isnan(cpu[0])
    assert cpu[1] == 0.5


def test_fingerprints_tell_plans_and_data_apart_and_survive_float32():
    plan = RoundPlan.of([3, 5])
    others = [RoundPlan.of([5, 3]), RoundPlan((3, 5), (1, 2)), RoundPlan.of([3, 5, 0])]
    prints = {plan.fingerprint(), plan.fingerprint(data=1), *(other.fingerprint() for other in others)}
    assert len(prints) == 5
    assert all(int(np.float32(value)) == value for value in prints)


def test_ranks_that_disagree_with_rank_0_are_named():
    rows = [row(fingerprint=f).vector(i, 4) for i, f in enumerate([7, 7, 8, float("nan")])]
    assert RoundTable(sum(rows), 4).disagreement("fingerprint") == [2, 3]


def test_figures_agree_to_the_tolerance_given_and_what_nobody_knows_agrees():
    rows = [row(parameter_norm=w, settings=float("nan")).vector(i, 3) for i, w in enumerate([1.0, 1.0005, 1.1])]
    table = RoundTable(sum(rows), 3)
    assert table.disagreement("parameter_norm", 1e-3) == [2]
    assert table.disagreement("parameter_norm") == [1, 2]
    assert table.disagreement("settings") == []
