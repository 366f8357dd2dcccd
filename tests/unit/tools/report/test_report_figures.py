"""Speeds, other splits, verdicts: what a report says of runs whose truth is known."""

import numpy as np
import pytest
from recorded_runs import finished as a_round
from report_runs import by_hand, record, run_of

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.telemetry import Telemetry, TelemetryWriter, read_run
from hvd_hetero.tools.report import figures
from hvd_hetero.tools.report.causes import LEAST, LEAST_UNEXPLAINED, Cause
from hvd_hetero.tools.report.figures import MOST_BLOCKS, MOST_ROWS
from hvd_hetero.tools.report.made import report_of
from hvd_hetero.tools.report.verdict import verdict
from hvd_hetero.tools.report.work import impossible
from hvd_hetero.tools.simulation import Availability, BestSplit, Cluster, Compute, Jitter, Network, Worker, simulate
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds


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


def test_of_a_thinned_run_as_many_recorded_rounds_are_replayed(tmp_path, monkeypatch):
    """Every fourth round is recorded: the last 60 lines, instead of 300, are of 240 rounds."""
    monkeypatch.setattr("hvd_hetero.tools.report.alternatives.MOST_ROUNDS", 60)
    record(tmp_path / "run.jsonl", Cluster.of_speeds([400, 200]), BSP(), 96, 80)
    run = read_run(tmp_path / "run.jsonl")
    thinned = run.replace(round=4 * run.round, every=4)
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


def test_the_verdict_names_the_rank_its_cause_and_the_way_out():
    run = steady()
    found = figures(run, replayed=False)
    cause = Cause("cpu", "Its CPU was throttled.", "Raise the limit.")
    said = verdict(found, [None, cause])
    assert said.verdict == f"Rank 1 held all others up for {found.ranks.cost[1]:.0%} of the time."
    assert (said.why, said.next) == ("Its CPU was throttled.", "Raise the limit.")
    assert "cause is not known. Rank 1 works at 50% of the fastest" in verdict(found, [None, None]).why


def test_losses_that_any_run_has_raise_no_alarm():
    """A rank that costs 5 % for which no cause is looked for, and transfers of a sixth of the time."""
    run = steady(compute_s=[[1, 1.11]] * 60, elapsed_s=[1.33] * 60, wait_s=[[0.33, 0.22]] * 60)
    said = report_of(run, "run", replayed=False).verdict
    assert said.verdict == "Nothing is wrong. The largest loss is transfers between ranks: 17% of the time."
    assert said.why.startswith("The ranks compute for 79% of the time.")
    assert (said.next, said.kind, said.causes) == ("Nothing to do.", "nothing", ())


@pytest.mark.parametrize("transfer_s", [0.1, 0.5])
def test_a_cause_is_told_though_the_split_makes_up_for_the_rank(transfer_s):
    """Rank 1 is half as fast and has a third of the samples. Transfers, in which it is slow, too, take more time."""
    columns = {"compute_s": [[1, 1]] * 60, "elapsed_s": [1 + transfer_s] * 60, "wait_s": [[transfer_s] * 2] * 60}
    found = figures(run_of([[20, 10]] * 60, **columns), replayed=False)
    said = verdict(found, [None, Cause("throttled", "It was throttled.", "Raise the limit.")])
    share = f"{'9.1' if transfer_s < 0.2 else '33'}%"
    assert said.verdict == (
        "Rank 1 is slow. It held all others up for 0.0% of the time, and the largest loss is transfers between ranks: "
        f"{share} of the time."
    )
    assert (said.why, said.kind, said.causes) == ("It was throttled.", "slow", ("throttled",))
    assert said.next.startswith("Raise the limit.")
    assert ("use a faster network" in said.next) == (transfer_s > 0.2), "a loss that is worth a look"


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
        "Raise the limit. Give the data loaders more workers or a faster disk, or prepare the data beforehand."
    )
    own = verdict(found, [None, Cause("input", "It waited.", "Give it more workers.")])
    assert (own.next, "largest" in own.verdict) == ("Give it more workers.", False)


def test_a_late_rank_that_has_a_cause_is_told_from_a_smaller_cost_on():
    """1.16 s, where 40 / (20 + 17.24) = 1.074 s would do: 0.086 of 1.2 s, which is no alarm by itself."""
    run = steady(compute_s=[[1, 1.16]] * 60, elapsed_s=[1.2] * 60, wait_s=[[0.2, 0.04]] * 60)
    found = figures(run, replayed=False)
    said = verdict(found, [None, Cause("throttled", "It was throttled.", "Raise the limit.")])
    assert said.verdict == "Rank 1 held all others up for 7.2% of the time."
    assert verdict(found, [None, None]).kind == "nothing"
    assert verdict(found, [Cause("garbage", "Python collected garbage.", "gc."), None]).verdict.startswith("Rank 0 is")


def test_what_equal_ranks_lose_on_a_machine_that_scatters_is_told_from_a_fifth_of_the_time_on():
    """Rank 1 costs 16 % by half as much time again in each third round; then two ranks cost 15 % each in turns."""
    late = {"compute_s": [[1, 1], [1, 1], [1, 2]] * 20, "elapsed_s": [1.02, 1.02, 2.02] * 20}
    late["wait_s"] = [[0.02, 0.02], [0.02, 0.02], [1.02, 0.02]] * 20
    found = figures(steady(**late), replayed=False)
    assert LEAST < found.ranks.cost[1] < LEAST_UNEXPLAINED
    said = verdict(found, [None, None])
    assert (said.kind, said.verdict.partition(". ")[0]) == ("nothing", "Nothing is known to be wrong")
    assert said.why.startswith(f"Rank 1 held all others up for {found.ranks.cost[1]:.0%} of the time, and no reading")
    turns = {"compute_s": [[1, 1.4], [1.4, 1]] * 30, "elapsed_s": [1.42] * 60}
    turns["wait_s"] = [[0.42, 0.02], [0.02, 0.42]] * 30
    found = figures(steady(**turns), replayed=False)
    assert LEAST < found.kinds["computing"] < LEAST_UNEXPLAINED
    assert verdict(found, [None, None]).kind == "nothing"


def test_late_ranks_without_a_cause_do_not_hide_the_cause_of_another():
    found, cause = figures(steady(), replayed=False), Cause("garbage", "Python collected garbage.", "gc")
    said = verdict(found, [cause, None])
    assert said.verdict.startswith("Rank 1 held all others up")
    assert said.why.startswith("The cause is not known. Rank 1 works at 50%")
    assert said.why.endswith("Rank 0: Python collected garbage.")
    assert said.causes == ("garbage",)


def test_a_late_rank_does_not_hide_a_larger_loss_of_all_ranks():
    """Late ranks cost a fourth of the time that work between rounds takes."""
    found = figures(steady(elapsed_s=[4] * 60, wait_s=[[1, 0]] * 60), replayed=False)
    assert found.kinds["between"] > found.waiting_for_ranks > 0.1
    said = verdict(found, [None, Cause("garbage", "Python collected garbage.", "gc.")])
    assert said.verdict.startswith("Rank 1 held all others up for 17% of the time. The largest loss is other work")
    assert said.next == "gc. Do this work less often, or on another thread."


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
    assert f'policy="lb-bsp" would be about {gain:.2f} times as fast' in report.verdict.next


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"compute_s": [[2, 2]] * 60, "wait_s": [[0.1, 0.1]] * 60}, "Nothing is wrong."),
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


def test_waiting_for_data_is_told_of_each_rank():
    """Per sample rank 0 is twice as slow to compute and rank 1 to get data, so no rank is slow, and none late."""
    columns = {"compute_s": [[2, 1]] * 60, "input_s": [[1, 2]] * 60, "elapsed_s": [3] * 60, "wait_s": [[0, 0]] * 60}
    found = figures(steady(**columns), replayed=False)
    assert found.ranks.input.tolist() == pytest.approx([1 / 3, 2 / 3])
    said = verdict(found, [None, None])
    assert said.verdict == "All ranks waited for their own data for 33% to 67% of the time."
    columns |= {"compute_s": [[2.5, 1]] * 60, "input_s": [[0.5, 2]] * 60}
    said = verdict(figures(steady(**columns), replayed=False), [None, None])
    assert said.verdict == "Rank 1 waited for its own data for 67% of the time."
    assert said.why == "The other ranks waited for theirs for 17% at most."
    assert said.kind == "input"


def test_other_work_of_ranks_by_turns_is_a_loss_of_its_own():
    """Each rank computes for 1 s and saves for 1 s in every second round, in which the other one waits."""
    columns = {"compute_s": [[1, 1]] * 60, "elapsed_s": [2.0] * 60, "wait_s": [[1.0, 0.0], [0.0, 1.0]] * 30}
    said = verdict(figures(steady(**columns), replayed=False), [None, None])
    assert said.kind == "loop"
    assert said.verdict == "The ranks waited for work of others between rounds for 50% of the time."


def test_a_single_rank_keeps_together_with_no_other(capsys):
    run = run_of([[20]] * 60, [[1.0]] * 60, [1.1] * 60, wait_s=[[0.08]] * 60)
    report = report_of(run, "run")
    assert report.verdict.verdict == "Nothing is wrong. The largest loss is synchronising: 7.3% of the time."
    assert report.verdict.why.startswith("The rank computes for 91% of the time.")
    assert report.figures.alternatives is None
    assert report.figures.no_alternatives == "a single rank does all samples, whatever the split."
    slow = report_of(run.replace(elapsed_s=np.full(60, 2.0), wait_s=np.full((60, 1), 1.0)), "run").verdict
    assert slow.verdict == "Synchronising took 50% of the time."
    assert slow.why.startswith("It waited for the transfer: 50%")


def test_what_is_missing_from_a_run_is_noted():
    run = run_of([[10, 10]] * 6, [[1, np.nan]] * 6, [2, 2, 2, 0, 2, 2])
    notes = " ".join(report_of(run, "run").notes)
    assert "or one that cannot be true, are left out: 1." in notes
    assert "No speed is known of rank 1" in notes
    assert "they rest on 5 rounds" in notes


def test_the_noise_scale_is_that_of_the_last_rounds_or_not_known():
    """One that was lost in noise since is old, and the last one alone is a matter of chance."""
    scales = np.concatenate([np.full(150, 300.0), np.zeros(50)])
    columns = {"samples": [[10, 10]] * 200, "compute_s": [[1, 2]] * 200, "elapsed_s": [2.5] * 200}
    lost = run_of(**columns).replace(noise_scale=scales)
    assert np.isnan(figures(lost, replayed=False).noise_scale)
    grown = lost.replace(noise_scale=np.concatenate([np.full(180, 300.0), np.full(19, 800.0), [5000.0]]))
    assert figures(grown, replayed=False).noise_scale == 800.0
