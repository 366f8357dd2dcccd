"""Speeds and forecasts, changes, other splits, verdicts: what a report says of runs whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest
from report_runs import by_hand, record, run_of

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.simulation import Availability, BestSplit, Cluster, Compute, Jitter, Network, Worker, simulate
from hvd_hetero.simulation.order import WholeRounds
from hvd_hetero.telemetry import read_run
from hvd_hetero.telemetry.causes import Cause
from hvd_hetero.telemetry.report import figures
from hvd_hetero.telemetry.report.made import report_of
from hvd_hetero.telemetry.report.over_time import MOST_BLOCKS, MOST_ROWS
from hvd_hetero.telemetry.report.verdict import comparison, verdict


def unequal(*, fixed_s: float = 0.0, lost: Availability | None = None) -> Cluster:
    workers = (
        Worker(Compute.at_speed(900, fixed_s), variation=(Jitter("round", 0.02),)),
        Worker(Compute.at_speed(300, fixed_s), lost or Availability(), (Jitter("round", 0.02),)),
        Worker(Compute.at_speed(700, fixed_s), variation=(Jitter("round", 0.02),)),
    )
    return Cluster(workers, Network(latency_s=1e-4, message_bytes=2e6, bandwidth=1e9), seed=4)


def recorded(path, policy, rounds=200, epochs=True, **how):
    data = WholeRounds(20 * 300 + 100, shuffle=True, seed=0) if epochs else None
    record(path, unequal(**how), policy, 300, rounds, data=data)
    return read_run(path)


def steady(rounds=60, **columns):
    """Two ranks, of which the second takes twice as long."""
    given = {"compute_s": [[1, 2]] * rounds, "elapsed_s": [2.1] * rounds, "wait_s": [[1.1, 0.1]] * rounds}
    return run_of([[20, 20]] * rounds, **(given | columns))


def test_forecasts_are_compared_with_the_speed_of_the_round_after():
    """Rank 0 is forecast 10 % too fast, rank 1 exactly; a naive forecast is right at constant speed."""
    found = figures(steady(samples_per_s=[[22, 10]] * 60), replayed=False)
    assert found.ranks.forecast_error == pytest.approx([0.1, 0])
    assert found.ranks.naive_error == pytest.approx([0, 0])
    alternating = np.where(np.arange(60) % 2, 1.0, 2.0)[:, None] * [1, 1]
    run = steady(compute_s=alternating, elapsed_s=[2.1] * 60, samples_per_s=np.roll(20 / alternating, -1, axis=0))
    ranks = figures(run, replayed=False).ranks
    assert ranks.forecast_error == pytest.approx([0, 0])
    assert ranks.naive_error == pytest.approx([0.5, 0.5])  # 1/2 in 30 rounds and 1 in 29, by turns


def test_a_forecast_is_drawn_only_where_the_round_that_it_is_for_is_recorded():
    """Rounds 21 to 40 are gone: what the line of round 20 forecasts is for none of the others."""
    run = steady(samples_per_s=[[22, 10]] * 60)
    gone = run.take((run.round <= 20) | (run.round > 40))
    forecast = figures(gone, replayed=False).over_time.forecast.rows
    assert np.flatnonzero(np.isnan(forecast[0])).tolist() == [0, 20]
    thinned = figures(replace(run, round=4 * run.round, every=4), replayed=False)
    assert np.isnan(thinned.over_time.forecast.rows).all()
    assert np.isnan(thinned.ranks.forecast_error).all()


@pytest.mark.parametrize(
    ("left_out", "note"),
    [
        (
            {"every": 4},
            "1 round of 4 is recorded. Figures are those of the recorded rounds, and forecasts are not judged.",
        ),
        ({"files_missing": 2}, "2 of its files are missing. Figures are those of the recorded rounds."),
        ({}, None),
    ],
)
def test_what_the_record_leaves_out_is_noted(left_out, note):
    assert report_of(replace(steady(), **left_out), "run", replayed=False).notes == ([note] if note else [])


def test_forecasts_of_ranks_that_know_their_fixed_cost_are_for_the_typical_size():
    """10 samples that cost as much as 10 more, at a pace of 100: 20 samples take 0.3 s and 10 take 0.2 s."""
    run = steady(compute_s=[[0.3, 0.3]] * 60, elapsed_s=[0.3] * 60, fixed_samples=[[10, 10]] * 60)
    run = replace(run, plan=np.full_like(run.plan, 20), samples_per_s=np.full((60, 2), 20 / 0.3))
    assert figures(run, replayed=False).ranks.forecast_error == pytest.approx([0, 0])


def test_changes_of_split_speed_and_memory_are_told():
    samples = np.array([[20, 20]] * 20 + [[26, 14]] * 40)
    seconds = samples / [20.0, 10.0] * np.where(np.arange(60) < 40, 1.0, 2.0)[:, None] ** [0, 1]
    limit = np.array([[0, 0]] * 30 + [[0, 12]] * 30)
    found = figures(run_of(samples, seconds, seconds.max(axis=1), limit=limit), replayed=False).changes
    assert [(change.round, change.kind) for change in found] == [(21, "split"), (31, "memory"), (41, "speed")]
    texts = [change.text for change in found]
    assert texts[0] == "batches 20 : 20 → 26 : 14"
    assert texts[1].startswith("rank 1 ran out of memory; its micro-batches have 12 samples")
    assert texts[2] == "rank 1 became 2.0 times slower"


def test_a_steady_run_changes_in_nothing(tmp_path):
    run = recorded(tmp_path / "run.jsonl", BSP())
    assert figures(run, replayed=False).changes == (), "scatter of 2 % and short last rounds are no change"


def test_equal_batches_and_the_best_split_from_a_balanced_run_are_those_of_such_runs(tmp_path):
    """Within 2 % of simulated trainings with equal batches and with the best split on the very same machines."""
    run = recorded(tmp_path / "run.jsonl", LBBSP(), fixed_s=0.02)
    found = figures(run).alternatives
    cluster = unequal(fixed_s=0.02)
    for name, policy in (("equal batches", BSP()), ("best split", BestSplit())):
        assert found.of(name).samples_per_s == pytest.approx(simulate(cluster, policy, 300, 200).rate(5), rel=0.02)
    assert found.of("lb-bsp") is None, "the run itself says what LB-BSP makes"


def test_a_run_with_equal_batches_is_what_equal_batches_make(tmp_path):
    found = figures(recorded(tmp_path / "run.jsonl", BSP(), 100)).alternatives
    assert found.of("equal batches").times_run == pytest.approx(1.0, abs=1e-9)
    assert found.of("lb-bsp").times_run > 1.5


def test_of_a_thinned_run_as_many_recorded_rounds_are_replayed(tmp_path, monkeypatch):
    """Every fourth round is recorded: the last 60 lines, instead of 300, are of 240 rounds."""
    monkeypatch.setattr("hvd_hetero.telemetry.report.alternatives.MOST_ROUNDS", 60)
    record(tmp_path / "run.jsonl", Cluster.of_speeds([400, 200]), BSP(), 96, 80)
    run = read_run(tmp_path / "run.jsonl")
    thinned = replace(run, round=4 * run.round, every=4)
    for each in (run, thinned):
        assert 50 <= figures(each).alternatives.rounds <= 60


def test_a_run_that_cannot_be_replayed_is_reported_without_other_splits():
    found = figures(by_hand())
    assert found.alternatives is None
    assert "at least 2 rounds after the start-up" in found.no_alternatives


def test_the_size_of_the_figures_does_not_grow_with_the_run():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(1, 2, (700, 300))
    over = figures(run_of(np.full((700, 300), 5), seconds, seconds.max(axis=1)), replayed=False).over_time
    assert len(over.round_s) == MOST_BLOCKS
    assert over.batches.rows.shape == (7, MOST_BLOCKS)
    assert over.cost.rows.shape == (MOST_ROWS, MOST_BLOCKS)
    assert over.edges[0] == 1
    assert over.edges[-1] == 701


def test_a_heat_map_shows_the_worst_rank_of_each_row():
    """One slow rank among 300 is as dark as it would be alone."""
    seconds = np.ones((20, 300))
    seconds[:, 123] = 3.0
    over = figures(run_of(np.full((20, 300), 5), seconds, [3.0] * 20), replayed=False).over_time
    row = int(np.searchsorted(over.cost.first_rank, 123, side="right")) - 1
    assert over.cost.rows.argmax(axis=0).tolist() == [row] * 20
    assert over.of_own_best.rows.min() == pytest.approx(1)


def test_the_verdict_names_the_rank_its_cause_and_the_way_out():
    run = steady()
    found = figures(run, replayed=False)
    cause = Cause("cpu", "Its CPU was throttled.", "Raise the limit.")
    said = verdict(found, [None, cause])
    assert said.verdict == f"Rank 1 held all others up for {found.ranks.cost[1]:.0%} of the time."
    assert (said.why, said.next) == ("Its CPU was throttled.", "Raise the limit.")
    assert "cause is not known. Rank 1 works at 50% of the fastest" in verdict(found, [None, None]).why


def test_no_cause_is_missed_where_none_was_looked_for():
    """1.11 s against 1 s: a round could take 40 / (20 + 18.02) = 1.052 s, which is 5 % less."""
    run = steady(compute_s=[[1, 1.11]] * 60, elapsed_s=[1.11] * 60, wait_s=[[0.11, 0]] * 60)
    said = report_of(run, "run", replayed=False).verdict
    assert said.verdict == "Rank 1 held all others up for 5% of the time."
    assert said.why == "This is too little to look for a cause: one is looked for from 10% on."


def test_a_loss_that_is_too_small_to_tell_hides_none_that_is_not():
    """Late ranks cost 6.5 % of the time, which is worth a word; transfers take 9 %, which they always may."""
    run = steady(compute_s=[[1, 1.16]] * 60, elapsed_s=[1.28] * 60, wait_s=[[0.28, 0.12]] * 60)
    found = figures(run, replayed=False)
    assert 0.05 < found.waiting_for_ranks < found.kinds["transfer"] < 0.1
    assert verdict(found, [None, None]).verdict.startswith("Rank 1 held all others up")


def test_a_slow_network_is_not_why_a_rank_is_late():
    """It is on each rank alike, so it explains no rank that is later than others."""
    found, network = figures(steady(), replayed=False), Cause("network", "All waited.", "Use a faster link.")
    said = verdict(found, [network, network])
    assert said.verdict.startswith("Rank 1 held all others up")
    assert "All waited." not in said.why
    assert "faster link" not in said.next


def test_the_verdict_tells_what_lb_bsp_would_gain(tmp_path):
    report = report_of(recorded(tmp_path / "run.jsonl", BSP(), 100, fixed_s=0.02), "run")
    assert report.verdict.verdict.startswith("Rank 1 held all others up for")
    gain = report.figures.alternatives.of("lb-bsp").times_run
    assert f'policy="lb-bsp" would be {gain:.2f} times as fast' in report.verdict.next


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"compute_s": [[2, 2]] * 60, "wait_s": [[0.1, 0.1]] * 60}, "The ranks kept together"),
        (
            {"compute_s": [[1, 2], [2, 1]] * 30, "wait_s": [[1.1, 0.1], [0.1, 1.1]] * 30},
            "The ranks took turns in being last",
        ),
        (
            {"compute_s": [[2, 2]] * 60, "elapsed_s": [4] * 60, "wait_s": [[2, 2]] * 60},
            "Transfers between ranks took 50%",
        ),
        ({"compute_s": [[2, 2]] * 60, "elapsed_s": [4] * 60, "wait_s": [[0, 0]] * 60}, "Work between rounds took 50%"),
    ],
)
def test_the_verdict_of_runs_that_no_rank_held_up(columns, expected):
    assert verdict(figures(steady(**columns), replayed=False), [None, None]).verdict.startswith(expected)


@pytest.mark.parametrize(("ranks", "expected"), [(2, "All ranks waited for their"), (1, "The rank waited for its")])
def test_a_run_that_waits_for_its_data_has_no_ranks_that_take_turns(ranks, expected):
    """0.1 s of computing and 0.1 s of input in each round, on each rank alike."""
    run = run_of([[20] * ranks] * 60, [[0.1] * ranks] * 60, [0.2] * 60, input_s=[[0.1] * ranks] * 60)
    said = report_of(run, "run").verdict
    assert said.verdict == f"{expected} own data for 50% of the time."
    assert "loaders more workers or a faster disk, or prepare" in said.next


def test_a_comparison_says_which_run_is_faster_and_whether_it_is_fair():
    one, other = (figures(steady(elapsed_s=[s] * 60), replayed=False) for s in (4.2, 2.1))
    text = comparison(["a", "b"], [one, other])
    assert text.startswith("b did 2.00 times as many samples per second as a.")
    assert comparison(["a", "b"], [other, one]).startswith("a did 2.00 times")
    assert comparison(["a", "b"], [one, one]).startswith("a and b did equally many")
    assert "differ in ranks or global batch" in comparison(["a", "b"], [one, replace(one, workers=3)])


def test_what_is_missing_from_a_run_is_noted():
    run = run_of([[10, 10]] * 6, [[1, np.nan]] * 6, [2, 2, 2, 0, 2, 2])
    notes = " ".join(report_of(run, "run").notes)
    assert "or one that cannot be true, are left out: 1." in notes
    assert "No speed is known of rank 1" in notes
    assert "they rest on 5 rounds" in notes
