"""Tables for several rounds at once, read a round later: driven by hand, with a sum in the place of a wire."""

from __future__ import annotations

import numpy as np
import pytest
from late_jobs import Job

from hvd_hetero.bounds import Room
from hvd_hetero.data.sample_order import EpochEnd
from hvd_hetero.data.stream_parts import StreamParts
from hvd_hetero.errors import HeteroError, PlanMismatchError
from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.telemetry import TelemetryWriter, read_run
from hvd_hetero.tools.report.figures import figures


def test_the_table_of_a_round_decides_the_plan_of_the_round_after_the_next():
    job = Job(LBBSP, [300.0, 100.0], 120)
    plans = []
    for _ in range(6):
        plans.append(job.balancers[0].plan().samples)
        job.round()
        assert len({balancer.plan() for balancer in job.balancers}) == 1
    assert plans[:3] == [(60, 60)] * 3, "the first round teaches nothing"
    assert plans[3][0] > 60


def test_ranks_of_unlike_speed_come_to_equal_times():
    job = Job(LBBSP, [300.0, 100.0, 200.0], 120)
    for _ in range(16):
        job.round()
    assert job.balancers[0].plan().samples == pytest.approx((60, 20, 40), abs=2)


@pytest.mark.parametrize(("seconds", "every"), [(1.0, 1), (0.15, 1), (0.03, 5), (0.01, 15), (1e-6, 64)])
def test_the_shorter_a_step_the_fewer_tables(seconds, every):
    job = Job(BSP, [60 / seconds] * 2, 120)
    for _ in range(3):
        job.round()
    assert [tables.every for tables in job.tables] == [every] * 2


def test_a_row_tells_of_the_rounds_since_the_last_one_by_their_means():
    job = Job(BSP, [6000.0, 3000.0], 120)  # rounds of 20 ms
    for _ in range(30):
        job.round()
    told = job.finished[-1]
    assert [each.round for each in job.finished[:3]] == [0, 8, 16], "every eighth, once steps are known"
    assert told.table.figures("samples") == [60.0, 60.0]
    assert told.table.figures("micro_batches") == [1.0, 1.0]
    assert told.table.column("compute_s") == pytest.approx([0.01, 0.02])
    assert told.table.column("wait_s") == pytest.approx([0.02, 0.01]), "of the rounds before these"
    assert told.elapsed_s == pytest.approx(0.03)
    assert job.balancers[0].rounds == 30


def test_ranks_that_go_their_own_ways_in_any_of_the_rounds_are_found_out():
    job = Job(BSP, [6000.0, 6000.0], 120)
    for _ in range(4):
        job.round(data=[7, 7])
    job.round(data=[7, 8])

    def go_on():
        for _ in range(30):
            job.round(data=[7, 7])

    with pytest.raises(PlanMismatchError, match=r"round 15: ranks \[1\].* plan"):
        go_on()


def test_a_loss_that_is_not_finite_is_told():
    job = Job(BSP, [60.0, 60.0], 120)
    job.round(broken=1.0)
    with pytest.raises(HeteroError, match=r"round 0: .*gradient.*ranks \[0, 1\]"):
        job.round()


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_rounds_in_step_have_equally_many_micro_batches_with_a_sample_each(workers):
    rng = np.random.default_rng(workers)
    for _ in range(300):
        total = int(rng.integers(4 * workers, 60))
        cuts = np.sort(rng.choice(total - 1, workers - 1, replace=False)) + 1
        plan = RoundPlan.of(np.diff(cuts, prepend=0, append=total))
        least, largest = int(rng.integers(1, 5)), int(rng.integers(0, 9))
        stepped = plan.with_equal_counts(least, largest)
        assert stepped.total == total
        assert len(set(stepped.micro_batches)) == 1
        assert stepped.micro_batches[0] >= least
        sizes = [size for rank in range(workers) for size in stepped.sizes(rank)]
        assert min(sizes) >= 1
        equal = max(stepped.samples) - min(stepped.samples) <= 1
        assert not largest or max(sizes) <= largest + equal
        if min(plan.samples) >= max(least, -(-max(plan.samples) // largest) if largest else 1):
            assert stepped.samples == plan.samples


def test_shards_are_cut_in_step_too():
    stream = StreamParts(lambda *_: range(100), 2, 0, 2, lambda mine: [mine, mine], own=True, rounds=5)
    stream.end = EpochEnd(room=Room(least=2))
    cut = stream.take(RoundPlan((9, 4), (3, 1)), 0)
    assert cut.plan == RoundPlan((9, 4), (2, 2))
    assert [work.samples for work in cut.micro_batches()] == [4, 5]


def test_a_remainder_too_small_for_the_micro_batches_joins_the_round_before():
    end = EpochEnd(joins=True, room=Room(least=3))
    plan = RoundPlan.of([8, 4])
    assert end.fit(plan, 12 + 6).total == 12
    assert end.fit(plan, 12 + 5).total == 17
    assert end.fit(plan, 12 + 5).micro_batches == (3, 3)


def test_a_run_of_several_micro_batches_counts_the_fixed_cost_as_often_as_the_policy_does(tmp_path):
    """Four micro-batches of 5 ms each: 20 ms a round. Rank 1 is half as fast."""
    writer = TelemetryWriter(tmp_path / "run.jsonl", policy="lb-bsp", workers=2, global_batch=120)
    job = Job(LBBSP, [600.0, 300.0], 120, parts=4, fixed_s=0.005)
    job.balancers[0].observer = writer
    for number in range(120):
        job.round(total=120 if number % 10 < 9 else 50)
    writer.close()
    found = figures(read_run(tmp_path / "run.jsonl"), replayed=False)
    truth = [60 / (60 / speed + 0.020) for speed in (600, 300)]
    assert found.ranks.samples_per_s == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(("other", "mean"), [(40, 100), (122, 120.5)], ids=["short", "with a remainder"])
def test_a_line_has_the_plan_of_its_whole_rounds_though_it_ends_with_another_one(tmp_path, other, mean):
    writer = TelemetryWriter(tmp_path / "run.jsonl", policy="bsp", workers=2, global_batch=120)
    job = Job(BSP, [6000.0, 3000.0], 120)  # a line of every eighth round
    job.balancers[0].observer = writer
    for number in range(64):
        job.round(total=other if number % 4 == 0 else 120)
    writer.close()
    run = read_run(tmp_path / "run.jsonl")
    assert set(run.plan.sum(axis=1)[1:]) == {120}
    assert run.samples.sum(axis=1)[1:] == pytest.approx(mean, rel=0.1), "of which samples are the mean"
    assert figures(run, replayed=False).global_batch == 120
