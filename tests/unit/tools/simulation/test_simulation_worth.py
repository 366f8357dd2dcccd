"""What each worker is worth, foretold from a record, against the same machines simulated without it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from report_runs import record

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.telemetry import read_run
from hvd_hetero.tools.cli import main
from hvd_hetero.tools.report.build import report_of
from hvd_hetero.tools.report.tables import worth_table
from hvd_hetero.tools.report.words import UNKNOWN
from hvd_hetero.tools.report.worth_words import leave_out_advice, worth_sentences
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, Worker, simulate
from hvd_hetero.tools.simulation.recorded_machines import replay
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.tools.simulation.worth import Rate, WithoutWorker, Worth, prices_of, worth_of_run

BATCH = 96
ROUNDS = 150


def cluster_of(speeds, *, fixed_s=0.005, network=None, jitter=0.02, links=()):
    links = links or [None] * len(speeds)
    variation = (Jitter("round", jitter),) if jitter else ()
    workers = (
        Worker(Compute.at_speed(v, fixed_s), variation=variation, bandwidth=link)
        for v, link in zip(speeds, links, strict=True)
    )
    return Cluster(tuple(workers), network or Network(), seed=3)


def without(cluster, worker):
    return replace(cluster, workers=tuple(w for i, w in enumerate(cluster.workers) if i != worker))


def really(cluster):
    """Samples per second of LB-BSP on these machines, once it has settled."""
    return simulate(cluster, LBBSP(), BATCH, ROUNDS).rate(50)


def foretold(path, cluster, policy):
    record(path, cluster, policy, BATCH, ROUNDS, data=WholeRounds(10 * BATCH + BATCH // 3, shuffle=True, seed=0))
    return worth_of_run(replay(read_run(path)), BATCH)


@pytest.mark.parametrize(
    ("policy", "speeds"),
    [(BSP, (800, 400)), (LBBSP, (800, 8)), (LBBSP, (800, 600, 300)), (BSP, (800, 700, 9, 400))],
)
def test_the_rate_without_a_worker_is_what_happens_without_it(tmp_path, policy, speeds):
    """In the interval, and within 5 %: for each worker that leaves, and for all of them."""
    cluster = cluster_of(speeds)
    worth = foretold(tmp_path / "run.jsonl", cluster, policy())
    assert worth.all.likely == pytest.approx(really(cluster), rel=0.05)
    for each in worth.each:
        truth = really(without(cluster, each.worker))
        assert each.rate.least <= truth <= each.rate.most, each
        assert each.rate.likely == pytest.approx(truth, rel=0.05)
        assert each.times.likely == pytest.approx(each.rate.likely / worth.all.likely, rel=1e-9)


def test_workers_come_in_order_and_the_one_that_hurts_is_named(tmp_path):
    """One sample of a worker at a hundredth takes as long as twice the round of the others."""
    worth = foretold(tmp_path / "run.jsonl", cluster_of((800, 4, 400)), LBBSP())
    assert [each.worker for each in worth.each] == [0, 2, 1]
    assert leave_out_advice(worth).startswith("Leave out rank 1: ")
    assert worth_sentences(worth)[0] == leave_out_advice(worth)
    equal = foretold(tmp_path / "equal.jsonl", cluster_of((400, 400, 400)), LBBSP())
    assert leave_out_advice(equal) == ""
    assert worth_sentences(equal)[0] == "Without any one of these ranks the training would be slower."
    assert equal.times_fastest.likely == pytest.approx(0.245 / 0.085, rel=0.03)  # 96 and 32 samples, and 5 ms


def test_a_transfer_of_fewer_workers_is_a_range_that_holds_alike_links_and_a_slow_one(tmp_path):
    """On alike links the likely figure is near; where the slow link leaves, the truth is near the upper end."""
    network = Network(latency_s=1e-3, message_bytes=4e6, bandwidth=1e8)
    alike = cluster_of((800, 600, 400), network=network)
    slow = cluster_of((800, 600, 400), network=network, links=(1e8, 1e8, 2e7))
    for cluster, name in ((alike, "alike"), (slow, "slow")):
        worth = foretold(tmp_path / f"{name}.jsonl", cluster, LBBSP())
        assert worth.transfer_open
        assert any("How long transfers of fewer ranks take" in told for told in worth_sentences(worth))
        each = next(one for one in worth.each if one.worker == 2)
        truth = really(without(cluster, 2))
        assert each.rate.least <= truth <= each.rate.most
        if cluster is alike:
            assert each.rate.likely == pytest.approx(truth, rel=0.05)
        else:
            assert truth > each.rate.likely
    pair = foretold(tmp_path / "pair.jsonl", without(slow, 0), LBBSP())
    assert not pair.transfer_open, "a rank alone sends nothing"


def test_a_record_of_one_batch_size_leaves_the_fixed_cost_open(tmp_path):
    cluster = cluster_of((800, 100), fixed_s=0.03)
    record(tmp_path / "run.jsonl", cluster, BSP(), BATCH, ROUNDS)
    worth = worth_of_run(replay(read_run(tmp_path / "run.jsonl")), BATCH)
    assert worth.fixed_open
    assert any("The fixed cost of a micro-batch cannot be seen" in told for told in worth_sentences(worth))
    for each in worth.each:
        assert each.rate.least <= really(without(cluster, each.worker)) <= each.rate.most


def some_worth():
    """Rank 1 costs half of what rank 0 does, and adds a quarter."""
    rates = {1: (1000, 900, 1100), 0: (300, 250, 350)}
    each = tuple(WithoutWorker(w, Rate(*rates[w]), Rate(*(r / 1250 for r in rates[w]))) for w in (0, 1))
    return Worth(2, Rate(1250, 1200, 1300), each, 0, Rate(1.25, 1.1, 1.4))


def test_prices_tell_the_samples_of_the_money():
    """3 an hour for all, 1250 samples a second: 1.5 million for 1. Without rank 1, 2 an hour and 1000: 1.8 million."""
    table = worth_table(some_worth(), (2.0, 1.0))
    assert table.headings[-1] == "samples per 1 paid"
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("none", "1,500,000"), ("rank 0", "1,080,000"), ("rank 1", "1,800,000"),
    ]  # fmt: skip
    assert worth_table(some_worth(), (1.0, 0.0)).rows[1][-1] == UNKNOWN, "no end of samples for nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "must name ranks from 0 to 1, got '") for text in ("", "0=1,2=1", "0=1,-1=1", "0=1,²=1")),
        *((text, "names rank 0 twice; leave one of them out") for text in ("0=1,0=2,1=1", "0=1,00=2,1=1")),
        *((f"0=1,1={price}", "must be numbers of at least 0") for price in ("-2", "nan", "inf", "", "1_0", "1e308")),
        ("0=1", "must name every rank, and rank 1 has none; add 1=… (0 if it is free)"),
        ("0=0,1=0", "must be above 0 for some rank, got 0 for all; leave --prices out"),
    ],
)
def test_wrong_prices_are_one_line_that_says_what_to_write(text, said):
    with pytest.raises(ValueError, match="^--prices " + re.escape(said)) as raised:
        prices_of(text, 2)
    assert "\n" not in str(raised.value)


DESCRIBED = """
[training]
global_batch = 96
rounds = 120
[[workers]]
samples_per_s = 800
fixed_ms = 5
variation = [{ kind = "jitter", sigma = 0.02 }]
[[workers]]
samples_per_s = 400
fixed_ms = 5
variation = [{ kind = "jitter", sigma = 0.02 }]
[[workers]]
samples_per_s = 8
fixed_ms = 5
"""


def test_a_described_cluster_and_a_record_of_it_tell_the_same(described, tmp_path, asked):
    """Each worker's rate within 6 %, and the order."""
    foretold(tmp_path / "run.jsonl", cluster_of((800, 400, 8)), LBBSP())
    one, other = asked(described(text=DESCRIBED), "--worth"), asked("--from", tmp_path / "run.jsonl", "--worth")
    assert [each["worker"] for each in one["each"]] == [each["worker"] for each in other["each"]] == [0, 1, 2]
    rates = [[each["rate"]["likely"] for each in found["each"]] for found in (one, other)]
    assert rates[0] == pytest.approx(rates[1], rel=0.06)


def test_a_short_run_whose_waits_are_known_in_one_long_round_tells_no_negative_rate(tmp_path):
    """That round's transfer is longer than the mean of all that is not computing."""
    path = tmp_path / "run.jsonl"
    record(path, cluster_of((800, 400), network=Network(latency_s=1e-3)), LBBSP(), BATCH, 12)
    run = read_run(path)
    elapsed_s, wait_s = run.elapsed_s.copy(), np.full_like(run.wait_s, np.nan)
    elapsed_s[9] += 5.0
    wait_s[9] = 5.0
    worth = worth_of_run(replay(run.replace(elapsed_s=elapsed_s, wait_s=wait_s)), BATCH)
    rates = [worth.all, worth.times_fastest, *(rate for each in worth.each for rate in (each.rate, each.times))]
    assert all(0.0 < rate.least <= rate.likely <= rate.most for rate in rates), worth


def test_a_report_tells_what_each_rank_is_worth(tmp_path, capsys):
    """In the verdict, in the terminal and on the page; and for the money."""
    path = tmp_path / "run.jsonl"
    record(path, cluster_of((800, 400, 8)), LBBSP(), BATCH, 80)
    assert main(["report", str(path), "--prices", "0=2,1=1,2=1"]) == 0
    out = capsys.readouterr().out
    page = path.with_suffix(".html").read_text()
    assert "Leave out rank 2: " in report_of(read_run(path), "run").verdict.next
    for shown in (out, page):
        assert " ".join(shown.split()).count("Leave out rank 2: ") == 1, "in the verdict"
    for shown in (out, page):
        assert "samples per 1 paid" in shown
        assert "All ranks together are" in " ".join(shown.split())
    assert "What each rank is worth" in page
    assert main(["report", str(path), "--prices", "0=2,5=1"]) == 2
    assert "run.jsonl: --prices must name ranks from 0 to 2, got '5=1'" in capsys.readouterr().err
    assert main(["report", str(path), "--prices", "0=2,1=1,2=1", "--no-replay"]) == 2
    assert "--prices needs the replay of the run; leave --no-replay out" in capsys.readouterr().err


def test_prices_of_a_record_without_the_times_it_needs_are_refused(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    record(path, cluster_of((800, 400)), LBBSP(), BATCH, 6)
    assert main(["report", str(path), "--prices", "0=2,1=1"]) == 2
    error = capsys.readouterr().err
    assert "--prices needs a run that can be replayed, but the run must hold at least 2 rounds after" in error
    assert error.count("\n") == 1
    assert main(["simulate", "--from", str(path), "--worth"]) == 2
    assert "record a longer one" in capsys.readouterr().err
    assert main(["report", str(path), "--no-page"]) == 0, "without prices the rest of the report is made"


def test_without_known_waits_all_that_is_not_computing_may_be_the_transfer(tmp_path):
    cluster = cluster_of((800, 600, 400), network=Network(latency_s=5e-3))
    record(tmp_path / "run.jsonl", cluster, LBBSP(), BATCH, ROUNDS)
    run = read_run(tmp_path / "run.jsonl")
    unknown = worth_of_run(replay(run.replace(wait_s=np.full_like(run.wait_s, np.nan))), BATCH)
    assert unknown.transfer_open
    for each in unknown.each:
        assert each.rate.least <= really(without(cluster, each.worker)) <= each.rate.most


def test_a_worker_that_runs_out_of_memory_does_its_share_in_parts(tmp_path):
    """Alone, rank 0 does 96 samples in 4 micro-batches of 24, each with 20 ms besides."""
    cluster = cluster_of((800, 800), fixed_s=0.02, jitter=0)
    record(tmp_path / "run.jsonl", cluster, BSP(), BATCH, 60, data=WholeRounds(1000, shuffle=True, seed=0))
    run = read_run(tmp_path / "run.jsonl")
    limited = run.replace(limit=np.full_like(run.limit, 24))
    unlimited, parts = (worth_of_run(replay(each), BATCH).each[0].rate for each in (run, limited))
    assert unlimited.likely == pytest.approx(96 / (0.12 + 0.02), rel=0.03)
    assert parts.likely == pytest.approx(96 / (0.12 + 4 * 0.02), rel=0.03)


def test_a_rank_that_rests_is_known_by_its_last_round_and_leaving_it_out_changes_nothing(tmp_path, asked):
    """Rank 2 did samples in the first rounds only, before those that a report replays."""
    path = tmp_path / "run.jsonl"
    cluster = cluster_of((800, 400, 4))
    record(path, cluster, LBBSP(may_rest=True), BATCH, 400)
    run = read_run(path)
    assert 0 < (run.samples[:, 2] > 0).sum() < 10
    report = report_of(run, "run")
    each = next(one for one in report.worth.each if one.worker == 2)
    assert each.times.likely == pytest.approx(1.0, rel=1e-3)
    assert report.worth.all.likely == pytest.approx(really(without(cluster, 2)), rel=0.05)
    assert report.causes[2].kind == "rests"
    assert report.verdict.next.count("Remove it from the job, which shortens transfers, too.") == 1
    assert "Leave out" not in report.verdict.next
    rates = {one["worker"]: one["rate"]["likely"] for one in asked("--from", path, "--worth")["each"]}
    assert rates[0] == pytest.approx(really(without(cluster, 0)), rel=0.1), "then rank 2 has samples again, or rests"


@pytest.mark.parametrize(("batch", "told"), [(BATCH, True), (2, False)])
def test_only_a_run_that_lb_bsp_would_make_faster_is_told_to_leave_a_rank_out(tmp_path, batch, told):
    """Figures without a rank are those under lb-bsp, as the table says. Of two samples, each rank has one anyway."""
    path = tmp_path / "run.jsonl"
    record(path, cluster_of((800, 2)), BSP(), batch, 80, data=WholeRounds(1000, shuffle=True, seed=0))
    report = report_of(read_run(path), "run")
    assert leave_out_advice(report.worth)
    assert (leave_out_advice(report.worth) in report.verdict.next) is told
    assert ('policy="lb-bsp" would be' in report.verdict.next) is told


def test_a_run_by_cost_has_its_fixed_cost_and_the_same_worth_in_report_and_simulation(tmp_path, asked):
    """Ranks do as much work as their plan, in other numbers of samples: 3 % more or less, and 5 ms a micro-batch."""
    path, speeds = tmp_path / "run.jsonl", np.array([800, 400, 200])
    data = WholeRounds(10 * BATCH + BATCH // 3, shuffle=True, seed=0)
    record(path, cluster_of(speeds, jitter=0), LBBSP(), BATCH, 200, data=data)
    header, *lines = path.read_text().splitlines()
    rounds, random = [json.loads(line) for line in lines], np.random.default_rng(0)
    for row in rounds:
        work = np.array(row["samples"]) * random.uniform(0.97, 1.03, 3)
        took_s = np.array(row["compute_s"]) + (work - row["samples"]) / speeds
        row |= {"work": work.tolist(), "elapsed_s": row["elapsed_s"] + took_s.max() - max(row["compute_s"])}
        row |= {"compute_s": took_s.tolist(), "samples": np.add(row["samples"], [-1, 1, 0]).tolist()}
    path.write_text("\n".join([header, *map(json.dumps, rounds)]) + "\n")
    machines, worth = replay(read_run(path)), report_of(read_run(path), "run").worth
    assert not worth.fixed_open
    assert [likely for _, likely, _ in machines.fixed_s] == pytest.approx([0.005] * 3, rel=0.2)
    assert asked("--from", path, "--worth")["all"]["likely"] == pytest.approx(worth.all.likely, rel=1e-6)


def test_of_many_workers_the_slowest_are_asked_about(tmp_path):
    cluster = cluster_of([400 + 20 * i for i in range(20)], jitter=0)
    record(tmp_path / "run.jsonl", cluster, BSP(), 100, 30)
    worth = worth_of_run(replay(read_run(tmp_path / "run.jsonl")), 100)
    assert sorted(each.worker for each in worth.each) == list(range(16))
    assert "Only the 16 slowest of 20 ranks were looked at." in worth_sentences(worth)
