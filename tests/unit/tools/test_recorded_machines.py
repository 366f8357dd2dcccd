"""Every kind of run goes through the report, the replay and the worth, and the machines come out as they were put in.

Figures agree with the truth to 5 %, or a range holds it where the run leaves the fixed cost open: equal batches do, and
so does a record of every k-th round. HVD_HETERO_STRENGTH=3 covers all triples of options.
"""

import os

import numpy as np
import pytest
from late_jobs import Job

from hvd_hetero import late_tables
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, LBNonBlocking, NonBlocking, SelfAdaptive, StaticAllocation
from hvd_hetero.telemetry import Telemetry, TelemetryWriter, read_run
from hvd_hetero.tools.report.build import report_of
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Network, RoundSimulation, Worker, simulate
from hvd_hetero.tools.simulation.compare import RecordedBatches
from hvd_hetero.tools.simulation.recorded_machines import replay
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds
from hvd_hetero.tools.simulation.worth import worth_of_run
from tests.support.covering import covering

BATCH, ROUNDS, TRANSFER_S = 120, 80, 0.004
SPEEDS = {2: (800.0, 400.0), 3: (800.0, 200.0, 600.0)}
POLICIES = {
    "bsp": lambda case: BSP(),
    "lb-bsp": lambda case: LBBSP(max_micro_batch=24 if case["parts"] > 1 and case["reducer"] == "own" else None),
    "rests": lambda case: LBBSP(may_rest=True),
    "static": lambda case: StaticAllocation([3, 1, 2][: case["ranks"]]),
    "self-adaptive": lambda case: SelfAdaptive(every=20),
    "non-blocking": lambda case: NonBlocking(4),
    "lb-non-blocking": lambda case: LBNonBlocking(),
    "elastic-bsp": lambda case: ElasticBSP(),
}
OPTIONS = {
    "policy": [*POLICIES],
    "reducer": ["own", "beside"],
    "row": [1, 4],  # rounds that a row tells of
    "parts": [1, 4],  # micro-batches of a rank, where it is not the policy that says
    "batch": ["constant", "adapts"],
    "fixed_s": [0.0, 0.03],
    "ends_short": [False, True],
    "ranks": [2, 3],
    "every": [1, 5],
    "joins": [False, True],  # the ranks met again in the first round of this file
}


def refused(case):
    """What cannot be recorded: some policies count micro-batches themselves, and need a reducer and a batch of ours."""
    simple = case.get("policy") in (None, "bsp", "lb-bsp", "rests", "static")
    return (
        (not simple and ((case.get("reducer") == "beside") or case.get("batch") == "adapts" or case.get("parts") == 4))
        or (case.get("row") == 4 and (case.get("reducer") == "own" or not simple))
        or (case.get("reducer") == "own" and case.get("parts") == 4 and case.get("policy") not in (None, "lb-bsp"))
        or (case.get("reducer") == "beside" and (case.get("batch") == "adapts" or case.get("policy") == "rests"))
    )


CASES = covering(OPTIONS, int(os.environ.get("HVD_HETERO_STRENGTH", "2")), refused, seed=1)


def machines_of(case):
    speeds = [4.0 if case["policy"] == "rests" and speed == min(SPEEDS[case["ranks"]]) else speed
              for speed in SPEEDS[case["ranks"]]]  # fmt: skip
    workers = (Worker(Compute.at_speed(v, case["fixed_s"]), variation=(Jitter("round", 0.01),)) for v in speeds)
    return Cluster(tuple(workers), Network("recorded", recorded_s=(TRANSFER_S,)), seed=2)


def totals_of(case):
    """A batch that doubles twice."""
    return [BATCH] * 20 + [2 * BATCH] * 30 + [4 * BATCH] * (ROUNDS - 50) if case["batch"] == "adapts" else [BATCH]


def record(path, case):
    cluster, policy = machines_of(case), POLICIES[case["policy"]](case)
    writer = TelemetryWriter(
        Telemetry(path, every=case["every"]), policy=policy.name, workers=case["ranks"], global_batch=BATCH
    )
    if case["joins"]:
        writer.recovered_s = 2.5
    if case["reducer"] == "own":
        batch = RecordedBatches(totals_of(case)) if case["batch"] == "adapts" else BATCH
        data = WholeRounds(10 * BATCH + BATCH // 3, shuffle=True, seed=0) if case["ends_short"] else None
        RoundSimulation(cluster, policy, batch, data=data, observer=writer).run(ROUNDS)
    else:
        job = Job(
            lambda: POLICIES[case["policy"]](case), [1.0 / w.compute.slope_s for w in cluster.workers], BATCH,
            parts=case["parts"], fixed_s=case["fixed_s"] / case["parts"],
        )  # fmt: skip
        job.balancers[0].observer = writer
        for number in range(2 * case["row"] * ROUNDS // 4 if case["row"] > 1 else ROUNDS):  # tables teach fixed costs
            job.round(total=BATCH // 3 if case["ends_short"] and number % 11 == 10 else 0)
    writer.close()
    return cluster, read_run(path)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_machines_come_out_as_they_were_put_in(case, tmp_path, monkeypatch):
    # Such a sum takes 1 % of some rounds of the first ones' 0.2 or 0.6 s.
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 0.01 if case["row"] > 1 else 0.0)
    cluster, run = record(tmp_path / "run.jsonl", case)
    found = report_of(run, "run").figures
    machines = replay(run)
    worth = worth_of_run(machines)
    assert found.no_alternatives == ""

    slope_s, fixed_s = np.array([(w.compute.slope_s, w.compute.intercept_s) for w in cluster.workers]).T
    typical = run.plan[0].sum() / run.micro_batches[0].sum()
    with np.errstate(invalid="ignore", divide="ignore"):  # of ranks that rest
        sizes = run.samples[1:] / run.micro_batches[1:]
        sizes = np.where((run.fixed_samples[1:] > 0) & (sizes > 0), typical, sizes)
        speed = 1.0 / np.nanmean(slope_s + fixed_s / sizes, axis=0)
    seen = np.isfinite(speed)  # a rank that rests may do nothing in all recorded rounds but the first, of the start
    assert seen.sum() >= case["ranks"] - (case["policy"] == "rests")
    assert found.ranks.samples_per_s[seen] == pytest.approx(speed[seen], rel=0.05), "the report's speeds"
    assert found.ranks.of_best_rank[seen] == pytest.approx((speed / speed[seen].max())[seen], rel=0.05), "the scores"

    size = run.samples.sum(axis=0) / run.micro_batches.sum(axis=0)
    may_be = [[w.compute.slope_s * x + w.compute.intercept_s for w, x in zip(of.workers, size, strict=True)]
              for of in (machines.cluster, *machines.extremes)]  # fmt: skip
    truth = size * slope_s + fixed_s
    assert (0.95 * np.min(may_be, axis=0) <= truth).all(), "the replay's machines"
    assert (truth <= 1.05 * np.max(may_be, axis=0)).all(), "the replay's machines"
    for (least, _, most), truth in zip(machines.fixed_s, fixed_s, strict=True):
        assert least * 0.95 <= truth <= most * 1.05, "the fixed cost, or its range"

    given = totals_of(case)
    totals = [given[number % len(given)] for number in run.round[list(machines.kept)].tolist()]

    def rate(stay, policy):
        transfer_s = (TRANSFER_S if case["reducer"] == "own" else 0.01) * (len(stay) > 1)  # one alone sends nothing
        some = Cluster(tuple(cluster.workers[i] for i in stay), Network("recorded", recorded_s=(transfer_s,)))
        # Twice, and the second time counts: all is learned then.
        return simulate(some, policy, RecordedBatches(totals), 2 * machines.rounds).rate(machines.rounds)

    def holds(told, truth):
        assert 0 < told.least * 0.95 <= truth <= told.most * 1.05

    ranks = range(case["ranks"])
    may_rest = case["policy"] == "rests"
    holds(found.alternatives.of("equal batches"), rate(ranks, BSP()))
    if worth.fixed_open:  # its ends are no fixed cost and little else, on all ranks: a mixture may be faster than both
        assert worth.all.least * 0.95 <= rate(ranks, LBBSP(may_rest=may_rest))
        return
    holds(worth.all, rate(ranks, LBBSP(may_rest=may_rest)))
    for each in worth.each:
        holds(each.rate, rate([i for i in ranks if i != each.worker], LBBSP(may_rest=may_rest)))
