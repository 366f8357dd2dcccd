"""Speeds, other splits, verdicts: what a report says of runs whose truth is known."""

import numpy as np
import pytest
from recorded_runs import finished as a_round
from report_runs import by_hand, record, run_of

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.telemetry import Telemetry, TelemetryWriter, read_run
from hvd_hetero.tools.report import figures
from hvd_hetero.tools.report.build import report_of
from hvd_hetero.tools.report.causes import Cause
from hvd_hetero.tools.report.verdict import verdict
from hvd_hetero.tools.report.work import impossible
from hvd_hetero.tools.simulation import Availability, BestSplit, Cluster, Compute, Jitter, Network, Worker, simulate
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds


def unequal(*, fixed_s=0.0, lost=None):
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
    """Two ranks, of which the second takes twice as long. Columns are those of some rounds, over and over."""
    given = {"samples": [[20, 20]], "compute_s": [[1, 2]], "elapsed_s": [2.1], "wait_s": [[1.1, 0.1]], **columns}
    return run_of(**{name: of if len(of) == rounds else of * (rounds // len(of)) for name, of in given.items()})


def test_the_short_last_round_of_an_epoch_is_no_other_global_batch():
    epoch = np.repeat(np.arange(6), 10)
    run = steady(samples=[[20, 20]] * 9 + [[3, 4]], epoch=epoch)
    assert figures(run).global_batch == 40
    assert figures(run.replace(plan=run.plan // 2)).global_batch == 20, "the batch that was trained, where it adapts"


@pytest.mark.parametrize(
    ("devices", "every"), [((False, False), 1), ((False, True), 1), ((True, True), 10)], ids=["none", "one", "both"]
)
@pytest.mark.parametrize("kind", ["computing", "input", "loop"])
def test_a_rank_that_stalls_in_single_rounds_is_blamed_for_them_on_a_device_as_on_a_cpu(tmp_path, devices, kind, every):
    """Rank 1 stalls for 0.2 s of every tenth round of 0.1 s. A device tells its times a round later."""
    writer = TelemetryWriter(Telemetry(tmp_path / "run.jsonl", every=every), policy="bsp", workers=2, global_batch=20)

    def times(number):
        """What the ranks measure of a round; nothing is known of the one before the first."""
        if number < 0:
            return dict.fromkeys(("compute_s", "input_s", "wait_s", "lap_s"), (np.nan, np.nan))
        stall_s = 0.2 * (number % 10 == 0)
        compute_s, input_s = 0.1 + stall_s * (kind == "computing"), stall_s * (kind == "input")
        return {
            "compute_s": (0.1, compute_s),
            "input_s": (0.0, input_s),
            "wait_s": (stall_s, 0.0),
            "lap_s": 0.1 + stall_s,
        }

    for number in range(145):
        before, now = times(number - 1), times(number)
        told = {name: np.where(devices, before[name], now[name]) for name in ("compute_s", "input_s")}
        told |= {"wait_s": before["wait_s"], "lap_s": np.where(devices, before["lap_s"], 0.0)}
        ahead = 0.05 if devices[0] and number % 2 else 0.0  # the host's lead, which changes
        writer(a_round(number, elapsed_s=0.1 + 0.2 * (number % 10 == 0) - ahead, **told))
    writer.close()
    run = read_run(tmp_path / "run.jsonl")
    found = figures(run, replayed=False)
    stalls, rounds = 14, 144 if every == 1 else 14
    best_s = 0.15 if kind == "computing" else 0.1  # both ranks by their speed, of 1 : 1/3 in a stall of computing
    cost = stalls * (0.3 - best_s) / (0.1 * rounds + 0.2 * stalls)
    assert found.ranks.cost == pytest.approx([0, cost], rel=0.05, abs=1e-9)
    assert found.kinds[kind] == pytest.approx(cost, rel=0.05)
    assert not any(wrong.any() for wrong in impossible(run).values())


def test_equal_batches_and_the_best_split_from_a_balanced_run_are_those_of_such_runs(tmp_path):
    """Within 2 % of simulated trainings with equal batches and with the best split on the very same machines."""
    run = recorded(tmp_path / "run.jsonl", LBBSP(), fixed_s=0.02)
    found = figures(run).alternatives
    cluster = unequal(fixed_s=0.02)
    for name, policy in (("equal batches", BSP()), ("best split", BestSplit())):
        assert found.of(name).samples_per_s == pytest.approx(simulate(cluster, policy, 300, 200).rate(5), rel=0.02)
    assert found.of("lb-bsp") is None, "the run itself says what LB-BSP makes"


def test_a_run_that_cannot_be_replayed_is_reported_without_other_splits():
    found = figures(by_hand())
    assert found.alternatives is None
    assert "at least 2 rounds after the start-up" in found.no_alternatives


def test_a_heat_map_shows_the_worst_rank_of_each_row():
    """One slow rank among 300 is as dark as it would be alone."""
    seconds = np.ones((20, 300))
    seconds[:, 123] = 3.0
    over = figures(run_of(np.full((20, 300), 5), seconds, [3.0] * 20), replayed=False).over_time
    row = int(np.searchsorted(over.cost.first_rank, 123, side="right")) - 1
    assert over.cost.rows.argmax(axis=0).tolist() == [row] * 20


def test_the_verdict_names_the_rank_its_cause_and_the_remedy():
    run = steady()
    found = figures(run, replayed=False)
    cause = Cause("cpu", "Its CPU was throttled.", "Raise the limit.")
    said = verdict(found, [None, cause])
    assert said.verdict == f"Rank 1 held all others up for {found.ranks.cost[1]:.0%} of the time."
    assert (said.why, said.next) == ("Its CPU was throttled.", "Raise the limit.")
    assert "cause is not known. Rank 1 works at 50% of the fastest" in verdict(found, [None, None]).why


THROTTLED, GARBAGE = (Cause(kind, f"It has {kind}.", f"Mend {kind}.") for kind in ("throttled", "garbage"))
NETWORK = Cause("network", "All waited.", "Use a faster link.")
A_LITTLE_LATE = {"compute_s": [[1, 1.16]], "elapsed_s": [1.2], "wait_s": [[0.2, 0.04]]}  # 0.086 of 1.2 s, no alarm
VERDICTS = [  # figures of rounds; causes of both ranks; the kind of the verdict, and the causes that it names
    ({}, [None, None], "late", ()),
    ({}, [GARBAGE, None], "late", ("garbage",)),  # a late rank without a cause does not hide that of another
    ({}, [NETWORK, NETWORK], "late", ()),  # it is on each rank alike
    ({"elapsed_s": [4], "wait_s": [[1, 0]]}, [None, GARBAGE], "late", ("garbage",)),  # work between rounds costs more
    (A_LITTLE_LATE, [None, THROTTLED], "late", ("throttled",)),
    (A_LITTLE_LATE, [None, None], "nothing", ()),
    (A_LITTLE_LATE, [GARBAGE, None], "slow", ("garbage",)),
    # The split makes up for rank 1, and transfers, in which it is slow, too, take more time.
    *(({"samples": [[20, 10]], "compute_s": [[1, 1]], "elapsed_s": [1 + transfer_s], "wait_s": [[transfer_s] * 2]},
       [None, THROTTLED], "slow", ("throttled",)) for transfer_s in (0.1, 0.5)),
    # Losses that equal ranks have on a machine that scatters: below a fifth of the time.
    ({"compute_s": [[1, 1.11]], "elapsed_s": [1.33], "wait_s": [[0.33, 0.22]]}, [None, None], "nothing", ()),
    ({"compute_s": [[1, 1], [1, 1], [1, 2]], "elapsed_s": [1.02, 1.02, 2.02],
      "wait_s": [[0.02, 0.02], [0.02, 0.02], [1.02, 0.02]]}, [None, None], "nothing", ()),
    ({"compute_s": [[1, 1.4], [1.4, 1]], "elapsed_s": [1.42], "wait_s": [[0.42, 0.02], [0.02, 0.42]]},
     [None, None], "nothing", ()),
    ({"compute_s": [[2, 2]], "wait_s": [[0.1, 0.1]]}, [None, None], "nothing", ()),
    # Losses of all ranks.
    ({"compute_s": [[1, 2], [2, 1]], "wait_s": [[1.1, 0.1], [0.1, 1.1]]}, [None, None], "computing", ()),
    ({"compute_s": [[2, 2]], "elapsed_s": [4], "wait_s": [[2, 2]]}, [None, None], "transfer", ()),
    ({"compute_s": [[2, 2]], "elapsed_s": [4], "wait_s": [[0, 0]]}, [None, None], "between", ()),
    ({"compute_s": [[1, 1]], "elapsed_s": [2.0], "wait_s": [[1.0, 0.0], [0.0, 1.0]]}, [None, None], "loop", ()),
    *(({"compute_s": [[3 - a, 1]], "input_s": [[a, 2]], "elapsed_s": [3], "wait_s": [[0, 0]]}, [None] * 2, "input", ())
      for a in (1, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "causes", "kind", "named"), VERDICTS)
def test_the_verdict_is_the_largest_loss_or_the_rank_that_has_a_cause(columns, causes, kind, named):
    said = verdict(figures(steady(**columns), replayed=False), causes)
    assert (said.kind, said.causes) == (kind, named)
    assert "All waited." not in said.why
    assert [cause.remedy in said.next for cause in causes if cause and cause.kind in named] == [True] * len(named)


def test_what_all_ranks_lose_is_told_beside_a_slow_rank_of_another_cause():
    """Ranks wait for their data in turns; rank 1 is throttled, and its split makes up for it."""
    waits = np.where(np.arange(60)[:, None] % 2 == [0, 1], 0.5, 0.0).tolist()
    ends = (1.0 + np.array(waits)).tolist()
    run = run_of(
        [[20, 10]] * 60, [[1, 1]] * 60, [1.5] * 60, input_s=waits, wait_s=(1.5 - np.array(ends)).tolist()
    )  # fmt: skip
    found = figures(run, replayed=False)
    said = verdict(found, [None, Cause("throttled", "It was throttled.", "Raise the limit.")])
    assert "and the largest loss is waiting for ranks that wait for their data: 33% of the time." in said.verdict
    assert said.next == (
        "Raise the limit. Give the data loaders more workers or a faster disk, or preprocess the data before training."
    )
    own = verdict(found, [None, Cause("input", "It waited.", "Give it more workers.")])
    assert (own.next, "largest" in own.verdict) == ("Give it more workers.", False)


def test_the_verdict_tells_what_lb_bsp_would_gain(tmp_path):
    report = report_of(recorded(tmp_path / "run.jsonl", BSP(), 100, fixed_s=0.02), "run")
    assert report.verdict.verdict.startswith("Rank 1 held all others up for")
    found = report.figures.alternatives
    gain = found.of("lb-bsp").samples_per_s / found.samples_per_s
    assert f'policy="lb-bsp" would be about {gain:.2f} times as fast' in report.verdict.next


def test_a_single_rank_keeps_together_with_no_other(capsys):
    run = run_of([[20]] * 60, [[1.0]] * 60, [1.1] * 60, wait_s=[[0.08]] * 60)
    report = report_of(run, "run")
    assert report.verdict.verdict == "Nothing is wrong. The largest loss is synchronising: 7.3% of the time."
    assert report.verdict.why.startswith("The rank computes for 91% of the time.")
    assert report.figures.alternatives is None
    assert report.figures.no_alternatives == "a single rank gets all samples under every policy."
    slow = report_of(run.replace(elapsed_s=np.full(60, 2.0), wait_s=np.full((60, 1), 1.0)), "run").verdict
    assert slow.verdict == "Synchronising took 50% of the time."
    assert slow.why.startswith("It waited for transfers: 50%")


def test_what_is_missing_from_a_run_is_noted():
    run = run_of([[10, 10]] * 6, [[1, np.nan]] * 6, [2, 2, 2, 0, 2, 2])
    notes = " ".join(report_of(run, "run").notes)
    assert "1 of 6 rounds are left out: their duration is zero or impossible." in notes
    assert "The speed of rank 1 is not known." in notes
    assert "because the run has 5 rounds" in notes


def test_the_noise_scale_is_that_of_the_last_rounds_or_not_known():
    """One that was lost in noise since is old, and the last one alone is a matter of chance."""
    scales = np.concatenate([np.full(150, 300.0), np.zeros(50)])
    columns = {"samples": [[10, 10]] * 200, "compute_s": [[1, 2]] * 200, "elapsed_s": [2.5] * 200}
    lost = run_of(**columns).replace(noise_scale=scales)
    assert np.isnan(figures(lost, replayed=False).noise_scale)
    grown = lost.replace(noise_scale=np.concatenate([np.full(180, 300.0), np.full(19, 800.0), [5000.0]]))
    assert figures(grown, replayed=False).noise_scale == 800.0


# Samples that cost unequally much.
ROUNDS = 20


def by_cost(**costs):
    """Rank 1 has few long samples: as much work as rank 0, in as long a time."""
    samples, work = np.tile([15, 5], (ROUNDS, 1)), np.tile([10.0, 10.0], (ROUNDS, 1))
    seconds = np.full((ROUNDS, 2), 1.0)
    return run_of(samples=samples, compute_s=seconds, elapsed_s=np.full(ROUNDS, 1.1), work=work, **costs)


def test_a_rank_with_few_long_samples_is_not_called_slow():
    found = report_of(by_cost(), "made", replayed=False).figures
    fast, slow = found.ranks.samples_per_s
    assert (fast, slow) == pytest.approx((10.0, 10.0))


def test_the_fit_and_what_padding_and_division_by_number_cost_are_told():
    columns = {"cost_number": 0.25, "cost_length": 0.015, "cost_square": 0.0, "cost_padded": 0.001, "by_number": 1.5}
    columns = {name: np.full((ROUNDS, 2), of) for name, of in columns.items()}
    report = report_of(by_cost(**columns, padding=np.tile([0.1, 0.3], (ROUNDS, 1))), "made")
    note = report.costs
    assert note not in report.notes, "nothing is missing"
    for figure in ("0.25 + 0.015 L + 0.001 M of a mean sample", "20% of the work", "1.50 times as long"):
        assert figure in note
    assert "L²" not in note


def test_nothing_is_said_where_all_samples_cost_the_same():
    assert report_of(by_cost(), "made", replayed=False).costs == ""


@pytest.mark.parametrize("times", [1e9, 1e3, -1.0])
def test_work_that_cannot_be_true_counts_as_not_known(times):
    """A mean sample costs 1. The report goes by the samples, and says so."""
    run = by_cost()
    report = report_of(run.replace(work=times * run.work), "made")
    assert report.figures.ranks.samples_per_s == pytest.approx((15.0, 5.0))
    assert any(note.startswith("work is impossible in 20 of 20 rounds (ranks 0 and 1)") for note in report.notes)
