"""What a run loses and why, on runs made by hand: the cause must explain the loss, and no loss needs no cause."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.telemetry import Run
from hvd_hetero.tools.report import figures
from hvd_hetero.tools.report.causes import KINDS, NOTABLE_LOSS, NOTABLE_UNEXPLAINED_LOSS, Cause, causes
from hvd_hetero.tools.report.slowness import Slowness

ROUNDS, TRANSFER_S = 60, 0.004


def run_of(own_s, **figures):
    """Make a run of ranks that needed so many seconds in each round, all of them computing unless told otherwise."""
    own_s = np.asarray(own_s, dtype=float)
    rounds, workers = own_s.shape
    elapsed_s = own_s.max(axis=1, initial=0.0) + figures.pop("transfer_s", TRANSFER_S)
    given = {"plan": 10, "samples": 10, "micro_batches": 1, "compute_s": own_s, "cpu": 1.0, "memory": 0.5}
    given |= {"wait_s": elapsed_s[:, None] - own_s, "elapsed_s": elapsed_s, **figures}
    return Run.of("bsp", workers, 10 * workers, round=np.arange(rounds), **given)


def steady(*seconds, rounds=ROUNDS, scatter=0.02):
    noise = np.random.Generator(np.random.PCG64(0)).normal(1.0, scatter, (rounds, len(seconds)))
    return noise * np.array(seconds)


def kinds(run):
    return [cause.kind if cause else "" for cause in causes(run)]


def test_the_fixed_cost_of_a_small_batch_is_not_counted_against_its_rank():
    """Per sample alone rank 1 takes 16 times as long; in micro-batches of the typical size, as the table has it, 4.7.

    Both ranks know their fixed cost: 170 samples of the one, 12 of the other. The typical micro-batch has 62.5.
    """
    samples, fixed = np.tile([117, 8], (ROUNDS, 1)), np.array([170.0, 12.0])
    seconds = np.array([1.0, 16.0]) * 1e-5
    run = run_of((samples + fixed) * seconds, samples=samples, plan=samples, fixed_samples=fixed)
    run = run.replace(policy="lb-bsp", global_batch=125)
    ratio = 16 * ((62.5 + 12) / 62.5) / ((62.5 + 170) / 62.5)
    assert ratio == pytest.approx(5.13, abs=0.01)
    assert 1.0 / figures(run, replayed=False).ranks.of_best_rank[1] == pytest.approx(ratio)
    assert 1.0 / (1.0 - Slowness.of(run).lag[1]) == pytest.approx(ratio)
    assert causes(run)[1].evidence.startswith("It took 5.1 times as long per sample as the fastest rank")


@pytest.mark.parametrize("policy", ["bsp", "lb-bsp"])
def test_less_work_is_advised_only_where_the_policy_does_not_give_it(policy):
    cause = causes(run_of(steady(0.05, 0.10)).replace(policy=policy))[1]
    assert cause.remedy == (
        "Give it less work (policy='lb-bsp'), or a faster machine."
        if policy == "bsp"
        else "Its share of the samples follows its speed already, within its limits. A faster machine would help."
    )
    samples = np.tile([20, 10], (ROUNDS, 1))
    evened = causes(run_of(samples * np.array([5e-3, 1e-2]), samples=samples).replace(policy=policy))[1]
    assert evened.remedy == "The split gives it less work already. A faster machine would help."


def test_a_rank_that_is_as_fast_as_others_and_was_given_more_has_too_large_a_share():
    samples = np.tile([10, 90], (ROUNDS, 1))
    run = run_of(1e-3 * samples, samples=samples)
    assert causes(run)[1] == Cause(
        "share",
        "It is not slow, but it got 90% of the samples, and has 50% of the speed of all ranks.",
        "Give it fewer samples.",
    )
    assert kinds(run) == ["", "share"]
    assert kinds(run_of(steady(0.05, 0.054))) == ["", ""], "an equal share"
    three = np.tile([30, 90, 90, 90], (ROUNDS, 1))
    assert kinds(run_of(1e-3 * three, samples=three)) == ["", "share", "share", "share"], "each costs a twelfth"
    fair = np.tile([30, 90], (ROUNDS, 1))
    assert kinds(run_of(fair * np.array([3e-3, 1e-3]), samples=fair)) == ["slower", ""], "a share by speed"


def test_the_start_and_a_last_round_without_waiting_are_left_out():
    own_s = steady(0.1, 0.1)
    own_s[0, 1] = 60.0
    run = run_of(own_s)
    run.wait_s[-1] = np.nan
    assert kinds(run) == ["", ""]
    assert len(Slowness.of(run).run.round) == ROUNDS - 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100])
def test_equal_ranks_raise_no_alarm(ranks):
    assert kinds(run_of(steady(*[0.05] * ranks, scatter=0.05))) == [""] * ranks


def test_a_loss_below_the_threshold_raises_none_whatever_the_readings_say():
    own_s = steady(0.05, 0.05 / (1.0 - 0.9 * NOTABLE_LOSS), scatter=0.0)
    assert kinds(run_of(own_s, throttled=[0.0, 0.09])) == ["", ""]
    assert kinds(run_of(steady(0.05, 0.05 / (1.0 - 1.1 * NOTABLE_LOSS), scatter=0.0), throttled=[0.0, 0.11])) == [
        "",
        "throttled",
    ]


READINGS = {
    "throttled": "throttled",
    "contended": "competition",
    "stolen": "stolen",
    "stalled": "memory",
    "collecting": "garbage",
}


@pytest.mark.parametrize(("column", "kind"), READINGS.items())
def test_a_reading_that_explains_the_loss_is_the_cause(column, kind):
    [none, cause] = causes(run_of(steady(0.05, 0.10), **{column: [0.0, 0.47]}, quota_cores=[0.0, 1.5]))
    assert none is None
    assert cause.kind == kind
    assert "47%" in cause.evidence
    assert cause.remedy


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        *(({column: [0.0, 0.1]}, "slower") for column in READINGS),  # explains little of the loss
        *(({column: [0.4, 0.4]}, "slower") for column in READINGS),  # all ranks have it
        ({"throttled": [0.0, 0.3], "contended": [0.0, 0.2]}, "throttled"),  # what explains more
        ({"throttled": [0.0, 0.2], "contended": [0.0, 0.3]}, "competition"),
        ({"clock": [0.9, 0.45]}, "clock"),
        ({"clock": [0.9, 0.0]}, "slower"),  # not known
        ({"faults_per_s": [2.0, 500.0]}, "memory"),
        ({"memory": [0.5, 0.01]}, "memory"),
        ({"faults_per_s": [2.0, 500.0], "contended": [0.0, 0.5]}, "competition"),  # the stronger evidence
        ({"cpu": [1.0, 0.5]}, "cpu"),
        ({"cpu": [1.0, 0.5], "sent_mb_s": [5.0, 5.0]}, "slower"),  # there are the kernel's counters
        ({"cpu": [np.nan, np.nan]}, "slower"),
    ],
)
def test_readings_tell_why_a_rank_has_half_the_speed(figures, kind):
    assert kinds(run_of(steady(0.05, 0.10), **figures)) == ["", kind]


def test_a_quota_that_came_later_is_named_as_it_is():
    """Not as its mean with the time before, when there was none."""
    quota = np.where(np.arange(ROUNDS)[:, None] < ROUNDS // 2, [0.0, 0.0], [0.0, 1.5])
    run = run_of(steady(0.05, 0.10), throttled=[0.0, 0.41], quota_cores=quota)
    assert "The CPU limit of its container (1.5 cores)" in causes(run)[1].evidence


def test_pauses_that_ranks_have_in_turns_explain_what_they_cost_although_all_have_them():
    own_s = np.full((80, 2), 0.05)
    own_s[::4, 0] += 0.10
    own_s[2::4, 1] += 0.10
    assert kinds(run_of(own_s, collecting=[0.3, 0.3])) == ["garbage", "garbage"]
    assert kinds(run_of(own_s)) == ["", ""], "scatter, for all that is known: below a fifth"
    own_s[::2] += (own_s[::2] > 0.05) * 0.10
    assert kinds(run_of(own_s)) == ["unknown", "unknown"]


@pytest.mark.parametrize(("column", "kind", "share"), [("input_s", "input", "38%"), ("loop", "loop", "37%")])
def test_waiting_for_data_and_work_between_rounds_are_causes(column, kind, share):
    """30 of 80 ms are input. Of a loop, the 1 ms that both ranks take are no rank's own: 29 of 79 ms."""
    base = np.full((ROUNDS, 2), 0.05)
    extra = np.tile([0.001, 0.03], (ROUNDS, 1))
    figures = {"input_s": extra} if column == "input_s" else {}
    [none, cause] = causes(run_of(base + extra, compute_s=base, **figures))
    assert none is None
    assert (cause.kind, share in cause.evidence) == (kind, True)


def test_input_that_is_slow_now_on_one_rank_and_now_on_the_other_is_the_cause_on_both():
    base, extra = np.full((80, 2), 0.05), np.zeros((80, 2))
    extra[::4, 0] = extra[2::4, 1] = 0.10
    assert kinds(run_of(base + extra, compute_s=base, input_s=extra)) == ["input", "input"]


def test_what_all_loops_do_between_rounds_makes_a_rank_with_few_samples_no_slower():
    """Both ranks validate for 20 ms in each round; one has 19 of 20 samples, and both need 1 ms for each."""
    samples = np.tile([19, 1], (ROUNDS, 1))
    compute_s = 0.001 * samples
    run = run_of(compute_s, samples=samples, transfer_s=0.02)
    run = run.replace(wait_s=run.wait_s - 0.02)
    assert Slowness.of(run).fractions.kinds["between"] == pytest.approx(0.02 / 0.039)
    assert kinds(run) == ["share", ""], "rank 1 is not slow, and rank 0 has too much"


def test_under_a_split_by_speed_slow_input_is_found_per_sample():
    samples = np.tile([20, 10], (ROUNDS, 1))
    input_s = np.tile([0.002, 0.051], (ROUNDS, 1))
    run = run_of(np.full((ROUNDS, 2), 0.1), samples=samples, input_s=input_s, compute_s=0.1 - input_s)
    assert kinds(run) == ["", "input"]


@pytest.mark.parametrize("slow", [slice(40, None), slice(None, 120)])
def test_what_began_or_is_over_is_no_slower_processor(slow):
    """For three quarters of the run."""
    own_s = steady(0.05, 0.05, rounds=160)
    own_s[slow, 1] *= 2.0
    assert kinds(run_of(own_s)) == ["", "unknown"]


def test_a_part_in_which_a_rank_did_nothing_says_nothing_of_its_processor():
    own_s, samples = steady(0.05, 0.10, rounds=160), np.full((160, 2), 10)
    own_s[60:80, 1], samples[60:80, 1] = 0.0, 0
    assert kinds(run_of(own_s, samples=samples)) == ["", "slower"]


@pytest.mark.parametrize("extra", [0.15, 0.5, 1.0])
def test_a_slower_processor_on_a_machine_that_scatters(extra):
    """For a tenth of the run the other rank is as slow, and for another it is twice as slow itself."""
    own_s, part = steady(0.05, 0.05 * (1.0 + extra), rounds=160), np.arange(160) * 16 // 160
    own_s[part == 4, 0] *= 1.0 + extra
    own_s[part == 8, 1] *= 2.0
    assert kinds(run_of(own_s)) == ["", "slower"]


def test_a_rank_that_is_slow_by_a_seventh_now_and_then_is_scatter_and_one_by_a_third_is_unknown():
    own_s, parts = steady(0.05, 0.05, rounds=160), np.arange(160) * 8 // 160
    own_s[parts % 3 == 0, 1] *= 1.45
    assert 0.10 < Slowness.of(run_of(own_s)).slow[1] < 0.20
    assert kinds(run_of(own_s)) == ["", ""]
    own_s[parts % 3 == 0, 1] *= 1.7
    assert kinds(run_of(own_s)) == ["", "unknown"]


def test_a_rank_many_times_slower_may_scatter_as_much_as_one_that_is_little_slower():
    """Its time per sample is between 4 and 6 times that of the other: three quarters and five sixths lost."""
    own_s = steady(0.01, 0.05, scatter=0.0)
    own_s[: ROUNDS // 2, 1], own_s[ROUNDS // 2 :, 1] = 0.04, 0.06
    assert kinds(run_of(own_s)) == ["", "slower"]


def test_a_slow_transfer_is_the_cause_on_all_ranks_unless_one_of_them_costs_more():
    slow_s = 0.05 * NOTABLE_UNEXPLAINED_LOSS / (1.0 - NOTABLE_UNEXPLAINED_LOSS) * 1.2
    [first, second] = causes(run_of(steady(0.05, 0.05), transfer_s=slow_s, sent_mb_s=[12.0, 12.0]))
    assert first == second
    assert (first.kind, "12 MB per second" in first.evidence) == ("network", True)
    assert kinds(run_of(steady(0.05, 0.05), transfer_s=slow_s / 1.5)) == ["", ""]
    assert kinds(run_of(steady(0.05, 0.10), transfer_s=slow_s, contended=[0.0, 0.5])) == ["", "competition"]


@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 2), (50, 1)])
def test_runs_too_short_or_of_one_rank_have_no_cause(shape):
    assert kinds(run_of(np.full(shape, 0.1))) == [""] * shape[1]


def test_a_rank_without_samples_is_not_blamed():
    samples = np.tile([10, 0], (ROUNDS, 1))
    assert kinds(run_of(np.tile([0.05, 0.0], (ROUNDS, 1)), samples=samples))[1] == ""


NUMBERS = st.floats(0.0, 1e3) | st.just(float("nan"))


@given(st.data(), st.integers(1, 4), st.integers(0, 12))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_any_file_that_can_be_read_is_answered_for_each_rank(data, workers, rounds):
    def column():
        return np.array(data.draw(st.lists(NUMBERS, min_size=rounds * workers, max_size=rounds * workers)), dtype=float)

    figures = {
        name: column().reshape(rounds, workers)
        for name in ("compute_s", "input_s", "wait_s", "cpu", "memory", *READINGS, "clock", "faults_per_s")
    }
    figures["samples"] = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=rounds * workers, max_size=rounds * workers)), int
    )
    figures["samples"] = figures["samples"].reshape(rounds, workers)
    found = causes(run_of(np.full((rounds, workers), 0.1), **figures))
    assert len(found) == workers
    for cause in found:
        assert cause is None or (cause.kind in KINDS and cause.evidence.endswith(".") and cause.remedy.endswith("."))
