"""Where the time of a round went: by hand, by an independent oracle, and by what must hold whatever the figures."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import by_hand, run_of

from hvd_hetero.balancer import Balancer
from hvd_hetero.policies import BSP
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.telemetry import Recorder
from hvd_hetero.tools.report import figures
from hvd_hetero.tools.report.attribution import KINDS, airport, attribute, ideal
from hvd_hetero.tools.report.tables import kinds_table
from hvd_hetero.tools.report.work import counted, impossible, work


def lost(run):
    return attribute(run, work(run))


def test_a_run_of_two_ranks_and_four_rounds_by_hand():
    """Rank 1 computes longer, waits for data, neither, and then rank 0 computes longer while rank 1 waits for data."""
    found = lost(by_hand())
    assert found.ideal_s[1:] == pytest.approx([4 / 3, 1, 2, 1.6])  # 20 samples at 10 + 5, 10 + 10, 5 + 5, 2.5 + 10
    assert found.cost_s[1:, 0] == pytest.approx([0, 0, 0, 2.2])  # with rank 1 from 1.6 to 2 s, alone to 4 s
    assert found.cost_s[1:, 1] == pytest.approx([2 / 3, 1, 0, 0.2])
    assert found.kinds_s["computing"][1:] == pytest.approx([2 / 3, 0, 0, 2.2])
    assert found.kinds_s["input"][1:] == pytest.approx([0, 1, 0, 0.2])
    assert found.kinds_s["transfer"][1:] == pytest.approx([0.5, 0.25, 0.25, 0.25])  # the last round's is not known
    assert found.kinds_s["between"][1:] == pytest.approx([0, 0, 0.25, 0.25])


def test_a_last_round_whose_waiting_is_not_known_waits_as_the_others_did():
    """As the median of the others; as the first one, which pays for the start, only where there is no other."""
    waits = np.array([[0.75, 1.0], [0.25, 0.5], [np.nan, np.nan]])
    three = run_of([[10, 10]] * 3, [[1.0, 1.0]] * 3, [2.0] * 3, wait_s=waits, start=0)
    three = three.replace(first_round=0)
    assert lost(three).kinds_s["transfer"].tolist() == [0.75, 0.25, 0.25]
    two = three.take(np.array([True, False, True]))
    assert lost(two).kinds_s["transfer"].tolist() == [0.75, 0.75]
    assert lost(two).kinds_s["between"][1] == pytest.approx(0.25)
    one = three.take(np.array([False, False, True]))
    assert lost(one).kinds_s["transfer"].tolist() == [0.0]


def test_airport_is_shapleys_value():
    """Costs are the mean over all orders of what a rank adds to the time of those before it."""
    rng = np.random.default_rng(0)
    ends = rng.uniform(0, 3, (20, 4))
    begins = rng.uniform(0, 2, 20)
    each, _, _ = airport(ends, begins)
    for k in range(20):
        value = {(): 0.0} | {
            s: max(ends[k, list(s)].max() - begins[k], 0)
            for n in range(1, 5)
            for s in itertools.combinations(range(4), n)
        }
        orders = list(itertools.permutations(range(4)))
        for rank in range(4):
            before = [tuple(sorted(order[: order.index(rank)])) for order in orders]
            adds = [value[tuple(sorted((*s, rank)))] - value[s] for s in before]
            assert each[k, rank] == pytest.approx(np.mean(adds))


def test_a_rank_whose_loop_takes_longer_bears_what_the_others_wait_for_it():
    """All loops take 0.5 s between rounds, and that of rank 0, which saves, 1 s more; no figure of its own tells."""
    run = run_of([[10, 10]] * 3, [[2, 2]] * 3, [4] * 3, wait_s=[[0.5, 1.5]] * 3)
    found = lost(run)
    assert found.cost_s.tolist() == [[1, 0]] * 3
    assert found.kinds_s["loop"].tolist() == [1] * 3
    assert found.kinds_s["between"].tolist() == [0.5] * 3
    assert found.kinds_s["transfer"].tolist() == [0.5] * 3
    assert figures(run, replayed=False).ranks.last.tolist() == [1, 0]


def test_the_parts_of_a_cost_are_those_that_interpolation_finds():
    """An independent oracle: F by NumPy's interpolation between its nodes, round by round."""
    rng = np.random.default_rng(2)
    compute_s, input_s = (
        rng.normal(0.05, 0.01, (200, 7)),
        rng.exponential(0.01, (200, 7)) * rng.integers(0, 2, (200, 7)),
    )
    loop_s = rng.exponential(0.005, (200, 7))
    own_s = compute_s + input_s + loop_s
    elapsed_s = own_s.max(axis=1) + 0.004
    run = run_of(
        np.full((200, 7), 64), compute_s, elapsed_s, input_s=input_s, wait_s=elapsed_s[:, None] - own_s, start=0
    )
    found = lost(run)
    _, moments, borne = airport(found.own_s, found.ideal_s)
    for k in range(200):
        at = [np.interp(s, moments[k], borne[k]) for s in (compute_s[k], compute_s[k] + input_s[k])]
        computing_s, until_input_s = (np.minimum(each, found.cost_s[k]) for each in at)
        assert found.kinds_s["computing"][k] == pytest.approx(computing_s.sum())
        assert found.cost_input_s[k] == pytest.approx(until_input_s - computing_s, abs=1e-12)
        assert found.kinds_s["loop"][k] == pytest.approx((found.cost_s[k] - until_input_s).sum(), abs=1e-12)


def test_the_ideal_is_the_least_time_for_the_same_samples():
    """By bisection over the time: what the ranks get done by then, each after its fixed part, is all samples."""
    rng = np.random.default_rng(1)
    samples = rng.integers(1, 200, (50, 6))
    compute_s = samples / rng.uniform(20, 400, (50, 6)) + rng.exponential(0.2, (50, 6))
    run = run_of(
        samples, compute_s, compute_s.max(axis=1), fixed_samples=rng.exponential(40, (50, 6)), once_s=0.3 * compute_s
    )
    done = work(run)
    for k, found in enumerate(ideal(done)):
        early, late = 0.0, float(compute_s[k].max())
        for _ in range(60):
            middle = 0.5 * (early + late)
            beta = run.fixed_samples[k]
            pace = (samples[k] + beta) / (0.7 * compute_s[k])
            able = np.maximum(pace * (middle - 0.3 * compute_s[k]) - beta, 0).sum()
            early, late = (early, middle) if able >= samples[k].sum() else (middle, late)
        assert found == pytest.approx(late, rel=1e-9)


def a_run(seed, rounds=12, workers=5):
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 50, (rounds, workers))
    samples[:, 0] += 1
    compute_s = rng.exponential(1, (rounds, workers)) * (rng.random((rounds, workers)) > 0.1)
    compute_s[rng.random((rounds, workers)) > 0.9] = np.nan
    compute_s[0, 0] = 1.0
    input_s = rng.exponential(0.3, (rounds, workers)) * (rng.random((rounds, workers)) > 0.5)
    wait_s = rng.exponential(0.2, (rounds, workers))
    elapsed_s = np.nan_to_num(compute_s + input_s).max(axis=1) + rng.exponential(0.2, rounds) + 1e-3
    figures = {"once_s": rng.random((rounds, workers)), "fixed_samples": rng.exponential(5, (rounds, workers))}
    return run_of(samples, compute_s, elapsed_s, input_s=input_s, wait_s=wait_s, **figures)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_kinds_and_costs_sum_to_the_whole_whatever_the_figures(seed):
    """Unknown figures, ranks without samples and waits for data included."""
    found = lost(a_run(seed))
    assert found.ideal_s + sum(found.kinds_s.values()) == pytest.approx(found.elapsed_s)
    assert found.cost_s.sum(axis=1) == pytest.approx(
        found.kinds_s["computing"] + found.kinds_s["input"] + found.kinds_s["loop"]
    )
    assert found.cost_input_s.sum(axis=1) == pytest.approx(found.kinds_s["input"])
    for part in (found.cost_s, found.cost_input_s, *(found.kinds_s[kind] for kind in KINDS if kind != "between")):
        assert (part >= -1e-12).all()


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.permutations(range(5)))
def test_permuting_the_ranks_permutes_the_results(seed, order):
    run = a_run(seed)
    columns = ("samples", "plan", "micro_batches", "compute_s", "input_s", "wait_s", "once_s", "fixed_samples")
    moved = {name: getattr(run, name)[:, order] for name in columns}
    other = run_of(elapsed_s=run.elapsed_s, **moved)
    mine, theirs = lost(run), lost(other)
    assert theirs.ideal_s == pytest.approx(mine.ideal_s)
    assert theirs.cost_s == pytest.approx(mine.cost_s[:, order])
    assert theirs.cost_input_s == pytest.approx(mine.cost_input_s[:, order], abs=1e-12)


def test_an_unknown_time_is_that_of_the_round_before():
    """It is filled by the pace, so twice the samples take twice as long."""
    run = run_of([[10, 10], [10, 20], [10, 10]], [[1, 2], [1, np.nan], [1, np.nan]], [2, 4, 2])
    assert work(run).computing_s.tolist() == [[1, 2], [1, 4], [1, 2]]


def test_seconds_longer_than_the_rounds_took_are_not_believed():
    """4 s in a round of 2 s may be true: rank 0 may have seen the end of the one before late. 9 s may not."""
    run = run_of([[10, 10]] * 3, [[1, 2], [1, 4], [1, 9]], [2, 2, 2], wait_s=[[1, 0], [1, -1], [9, 0]])
    wrong = impossible(run)
    assert wrong["compute_s"].tolist() == [[False, False], [False, False], [False, True]]
    assert wrong["wait_s"].tolist() == [[False, False], [False, True], [True, False]]
    assert not wrong["input_s"].any()
    assert work(run).computing_s[2].tolist() == [1, 4]


def test_a_round_whose_predecessor_was_not_recorded_may_be_as_long_as_all():
    run = run_of([[10, 10]] * 3, [[1, 9]] * 3, [2, 2, 2]).replace(round=np.array([0, 10, 20]), every=10)
    assert not impossible(run)["compute_s"].any()


def test_others_may_wait_longer_than_a_round_of_which_rank_0_saw_the_beginning_late():
    """Two ranks in step, each with a clock of its own; rank 0 pauses for 1 s when a table has come, before it looks."""
    clocks, records = [0.0, 0.0], []
    ranks = [Balancer(BSP(), rank, 2, 20, clock=lambda rank=rank: clocks[rank]) for rank in range(2)]
    ranks[0].observer = recorder = Recorder()
    recorder.add(records.append)
    for number in range(12):
        rows = []
        for rank, balancer in enumerate(ranks):
            balancer.begin(MicroBatch(balancer.plan(), 10))
            clocks[rank] += 0.01
            rows.append(balancer.report())
        clocks[:] = [max(clocks) + 0.001] * 2
        clocks[0] += 1.0 if number == 5 else 0.0
        for balancer in ranks:
            balancer.agree(sum(rows))
    recorder.close()
    column = {name: [record[name] for record in records[:-1]] for name in ("samples", "compute_s", "wait_s")}
    run = run_of(elapsed_s=[record["elapsed_s"] for record in records[:-1]], start=0, **column)
    assert run.wait_s[6] == pytest.approx([0.001, 1.001])
    assert run.elapsed_s[5:7] == pytest.approx([1.011, 0.011])
    assert not any(wrong.any() for wrong in impossible(run).values())


def test_a_rank_without_any_figure_takes_no_part():
    found = figures(run_of([[10, 10, 10]] * 3, [[1, 2, np.nan]] * 3, [2] * 3), replayed=False)
    assert found.slowdown == pytest.approx(2 / (20 / 15))
    assert np.isnan(found.ranks.samples_per_s[2])
    assert found.ranks.cost[2] == 0


def test_the_first_round_of_a_resumed_run_counts_nowhere():
    """It begins at round 5,000, and its first round has the set-up in it, as round 0 had at the very beginning."""
    run = by_hand().replace(round=np.arange(5000, 5005), first_round=5000)
    assert counted(run).tolist() == [False, True, True, True, True]
    assert lost(run).kinds_s["transfer"].tolist() == lost(by_hand()).kinds_s["transfer"].tolist()
    assert run.throughput == by_hand().throughput
    assert run.waiting_share.tolist() == by_hand().waiting_share.tolist()
    assert counted(run.after(2)).all(), "none but the first pays for the start"


def test_a_run_without_a_usable_round_is_refused():
    with pytest.raises(ValueError, match="2 recorded rounds"):
        figures(run_of([[1, 1]] * 2, [[1, 1]] * 2, [0, -1]))
    with pytest.raises(ValueError, match="computing time"):
        figures(run_of([[0, 0]] * 2, [[1, 1]] * 2, [1, 1]))


def test_no_share_of_a_run_is_below_nothing_and_all_sum_to_it():
    """By another rank's clock rank 1 takes 2.01 s in rounds of 2 s; the 0.02 s of transfers before make up for it."""
    run = run_of([[10, 10]] * 5, [[1, 1], [1, 1.98], *[[1, 2.01]] * 3], [2] * 5, wait_s=[[1, 0.02]] * 2 + [[1, 0]] * 3)
    found = figures(run, replayed=False)
    assert found.kinds["between"] == 0
    assert min(found.kinds.values()) >= 0
    assert found.ideal + sum(found.kinds.values()) == pytest.approx(1)
    shown = [float(row[1].rstrip("%")) for row in kinds_table(found).rows]
    assert sum(shown) == pytest.approx(100)


def test_the_figures_of_the_run_by_hand():
    """Round 0 counts nowhere; shares are of the 11.75 s that the other rounds took."""
    found = figures(by_hand(), replayed=False)
    assert (found.rounds, found.elapsed_s) == (4, 11.75)
    assert found.slowdown == pytest.approx(11.75 / (4 / 3 + 4.6))
    assert found.samples_per_s == pytest.approx(80 / 11.75)
    assert found.samples_per_s == pytest.approx(by_hand().throughput)
    assert found.ranks.cost == pytest.approx([2.2 / 11.75, (2 / 3 + 1.2) / 11.75])
    assert found.ranks.cost_input == pytest.approx([0, 1.2 / 11.75])
    assert found.ranks.last == pytest.approx([0.5, 0.75])  # the third round ends with both
    assert found.ranks.waiting == pytest.approx(by_hand().waiting_share)
    assert found.ranks.samples_per_s == pytest.approx([5, 5])  # of 10, 10, 5, 2.5 and of 5, 5, 5, 5
    assert found.ranks.of_best_rank == pytest.approx([1, 1])
    assert found.ideal + sum(found.kinds.values()) == pytest.approx(1)
